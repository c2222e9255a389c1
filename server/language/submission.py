"""Submissions with a text: compiled to submissions with a graph, for the functions of a server.

Applications send the same text with other inputs again and again, so compiled and validated
programs are kept, with their JSON.

Invariant: a submission and its JSON are those that its client could have sent as a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from cachetools import LRUCache
from msgspec import Raw, Struct

from ..program.content import Json
from ..program.decoding.bodies import revalidate
from ..program.decoding.bounded_json import check_bounds
from ..program.errors import ProgramError
from ..program.functions import FunctionSignature
from ..program.ir import Node, Objective, Options, Program, SourceSubmission, Submission
from .compiler import compile_source, locate

CACHED_BYTES = 64 * 1024 * 1024
"""Memory of all programs that are kept. One that needs more than a quarter of it is not kept."""
NODE_BYTES = 1_024
"""Memory of the records of one node, without their texts."""


class _Kept(NamedTuple):
    """A compiled program that has been validated, and its share of CACHED_BYTES."""

    program: Program
    json: bytes
    size: int


class _SubmissionJson(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The fields of a Submission that a text can have, with the program as JSON."""

    program: Raw
    inputs: dict[str, Json] = {}
    objectives: dict[str, Objective] = {}
    options: Options = Options()


class SourceCompiler:
    """Compiles the texts that one server receives. Safe to use from several threads."""

    def __init__(self, functions: Iterable[FunctionSignature]) -> None:
        self._signatures = {each.name: tuple(each.parameters) for each in functions}
        self._programs: LRUCache[object, _Kept] = LRUCache(CACHED_BYTES, lambda kept: kept.size)
        self._lock = threading.Lock()

    def compile(self, source: SourceSubmission) -> tuple[Submission, bytes]:
        """Return the submission that a text describes, and its JSON.

        Raises:
            ProgramError: a LanguageError with line and column, if the text is invalid.
        """
        kept = self._kept(source)
        submission = Submission(
            program=kept.program,
            inputs=source.inputs,
            objectives=source.objectives,
            options=source.options,
        )
        body = msgspec.json.encode(
            _SubmissionJson(
                program=Raw(kept.json),
                inputs=source.inputs,
                objectives=source.objectives,
                options=source.options,
            )
        )
        check_bounds(body)  # program and inputs are valid, but may exceed a bound together
        return submission, body

    def _kept(self, source: SourceSubmission) -> _Kept:
        key = (source.source, source.language, source.name, frozenset(source.inputs))
        with self._lock:
            kept = self._programs.get(key)
        if kept is not None:
            return kept
        program = compile_source(
            source.source,
            source.language,
            inputs=source.inputs.keys(),
            signatures=self._signatures,
            name=source.name,
        )
        try:
            submission, _ = revalidate(Submission(program=program))
        except ProgramError as error:
            raise locate(error, program) from None
        program = submission.program
        json = msgspec.json.encode(program)
        # The texts of the program are in its JSON and in its records.
        size = len(source.source) + 2 * len(json) + NODE_BYTES * (1 + _count_nodes(program.nodes))
        kept = _Kept(program, json, size)
        if kept.size <= CACHED_BYTES // 4:
            with self._lock:
                self._programs[key] = kept
        return kept


def _count_nodes(nodes: Iterable[Node]) -> int:
    """Return the number of nodes and of those in their bodies."""
    return sum(1 + sum(_count_nodes(body.nodes) for body in node.bodies()) for node in nodes)
