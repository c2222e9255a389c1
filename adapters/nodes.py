"""The nodes of a program that a client was given, as a record or as JSON.

Knows where bodies stand. Refuses to judge: what is no program has no nodes, and the server
says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from conure.server.program.ir import Program

_PARTS = ("nodes", "body", "then", "else", "handlers")


def nodes_of(program: Any) -> Iterator[Mapping[str, Any]]:
    """Every node as JSON, also those in bodies."""
    if isinstance(program, Program):
        program = msgspec.to_builtins(program)
    if isinstance(program, Mapping):
        if "op" in program:
            yield program
        for part in _PARTS:
            yield from nodes_of(program.get(part))
    elif isinstance(program, list | tuple):
        for node in program:
            yield from nodes_of(node)
