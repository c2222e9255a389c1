"""Submissions with a text: compiled to submissions with a graph, for the functions of a server.

Applications send the same text with other inputs again and again, so compiled programs are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from cachetools import LRUCache

from ..program.decode import revalidate
from ..program.errors import ProgramError
from ..program.functions import FunctionSignature
from ..program.ir import Node, Program, SourceSubmission, Submission
from .compiler import compile_source, locate

CACHED_NODES = 50_000
"""Nodes of all programs that are kept; a text counts as 64."""


class _Kept(NamedTuple):
    """A compiled program, and its share of CACHED_NODES."""

    program: Program
    size: int


class SourceCompiler:
    """Compiles the texts that one server receives. Safe to use from several threads."""

    def __init__(self, functions: Iterable[FunctionSignature]) -> None:
        self._signatures = {each.name: tuple(each.parameters) for each in functions}
        self._programs: LRUCache[object, _Kept] = LRUCache(CACHED_NODES, lambda kept: kept.size)
        self._lock = threading.Lock()

    def compile(self, source: SourceSubmission) -> tuple[Submission, bytes]:
        """Return the submission that a text describes, and its JSON.

        Raises:
            ProgramError: a LanguageError with line and column, if the text is invalid.
        """
        program = self._program(source)
        submission = Submission(
            program=program,
            inputs=source.inputs,
            objectives=source.objectives,
            options=source.options,
        )
        try:
            return revalidate(submission)
        except ProgramError as error:
            raise locate(error, program) from None

    def _program(self, source: SourceSubmission) -> Program:
        key = (source.source, source.language, source.name, frozenset(source.inputs))
        with self._lock:
            kept = self._programs.get(key)
        if kept is not None:
            return kept.program
        program = compile_source(
            source.source,
            source.language,
            inputs=source.inputs.keys(),
            signatures=self._signatures,
            name=source.name,
        )
        kept = _Kept(program, 64 + _count_nodes(program.nodes))
        if kept.size <= CACHED_NODES:
            with self._lock:
                self._programs[key] = kept
        return program


def _count_nodes(nodes: Iterable[Node]) -> int:
    """Return the number of nodes and of those in their bodies."""
    return sum(1 + sum(_count_nodes(body.nodes) for body in node.bodies()) for node in nodes)
