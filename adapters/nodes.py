"""Iteration over the nodes of a program, given as a record or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from conure.server.program.ir import Program

_FIELDS_WITH_NODES = ("nodes", "body", "then", "else", "handlers")


def iter_nodes(program: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every node as JSON, including those in bodies.

    Invalid programs are not an error here: the server reports them.
    """
    if isinstance(program, Program):
        program = msgspec.to_builtins(program)
    if isinstance(program, Mapping):
        if "op" in program:
            yield program
        for field in _FIELDS_WITH_NODES:
            yield from iter_nodes(program.get(field))
    elif isinstance(program, list | tuple):
        for node in program:
            yield from iter_nodes(node)
