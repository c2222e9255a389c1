"""The JSON of a status in parts: a program may have 100,000 nodes.

The records of nodes and variables are made one by one while their part is encoded, so that neither
the memory nor a turn of the event loop grows with the program. A node that changes meanwhile is
shown as it is when its part is encoded.

Invariant: the parts together are the JSON of the whole record.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Final

import msgspec
from msgspec import UNSET, Struct

from ...program.decoding.typed_json import decode_record
from ...program.status import ProgramStatus, QuotaUse, Receipt
from ...store.journal import StoredProgram
from ..program_state import ProgramState
from .status import (
    node_status,
    program_status,
    stored_head,
    stored_snapshot,
    stored_variables,
    variable_status,
)

PART_BYTES: Final = 32 * 1024
"""Size of all parts but the last: a client that does not read its status keeps few of them."""


def live_status_parts(
    program: ProgramState,
    durable: Container[str],
    receipt: Receipt | None,
    quotas: dict[str, QuotaUse],
) -> Iterator[bytes]:
    """Iterate over the JSON of a program that is live or in memory; see `program_status`."""
    is_ended = receipt is not None
    head = program_status(program, durable, receipt, names=(), nodes=())
    if not is_ended:
        head = msgspec.structs.replace(head, quotas=quotas)
    names, nodes = program.variable_names(), list(program.nodes.values())
    variables = (
        (name, variable_status(program, durable, name, is_ended=is_ended)) for name in names
    )
    return _status_parts(head, variables, ((state.node.id, node_status(state)) for state in nodes))


def stored_status_parts(stored: StoredProgram) -> Iterator[bytes]:
    """Iterate over the JSON of an ended program from the journal; see `stored_status`."""
    snapshot = stored_snapshot(stored)
    head = stored_head(stored, snapshot)
    variables = (*stored_variables(stored), *snapshot.absences.items())
    nodes = decode_record(snapshot.nodes, dict[str, msgspec.Raw])
    return _status_parts(head, variables, nodes.items())


def end_snapshot(program: ProgramState) -> bytes:
    """Return `EndRecord.nodes` of a program that has just ended: a `StoredSnapshot` as JSON."""
    missing = (name for name in program.variable_names() if name not in program.values)
    absences = (
        (name, variable_status(program, program.missing_values, name, is_ended=True))
        for name in missing
    )
    nodes = ((node_id, node_status(state)) for node_id, state in program.nodes.items())
    json = bytearray(b'{"nodes":{')
    json += b"".join(_joined(_members(nodes)))
    json += b'},"absences":{'
    json += b"".join(_joined(_members(absences)))
    json += b'},"outputs":' + msgspec.json.encode(list(program.graph.outputs)) + b"}"
    return bytes(json)


def _status_parts(
    head: ProgramStatus,
    variables: Iterable[tuple[str, Struct]],
    nodes: Iterable[tuple[str, Struct | msgspec.Raw]],
) -> Iterator[bytes]:
    """Yield the JSON of a status that lacks its variables and nodes, with these in their place."""
    before = msgspec.structs.replace(head, receipt=UNSET, error=UNSET, quotas=UNSET)
    start = msgspec.json.encode(before)[:-1]
    rest = msgspec.json.encode(head)[len(start) :]
    return _joined(
        each
        for pieces in (
            [start],
            _object("variables", variables),
            _object("nodes", nodes),
            [rest],
        )
        for each in pieces
    )


def _object(name: str, members: Iterable[tuple[str, Struct | msgspec.Raw]]) -> Iterator[bytes]:
    """Yield a field whose value is an object; nothing for an empty one, which is the default."""
    is_empty = True
    for member in _members(members):
        if is_empty:
            yield b',"%s":{' % name.encode()
        is_empty = False
        yield member
    if not is_empty:
        yield b"}"


def _members(members: Iterable[tuple[str, Struct | msgspec.Raw]]) -> Iterator[bytes]:
    separator = b""
    for key, record in members:
        yield b"%s%s:%s" % (separator, msgspec.json.encode(key), msgspec.json.encode(record))
        separator = b","


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join and split pieces to parts of `PART_BYTES`; the last one may have fewer."""
    part = bytearray()
    for piece in pieces:
        rest = memoryview(piece)
        while len(part) + len(rest) >= PART_BYTES:
            num_added = PART_BYTES - len(part)
            part += rest[:num_added]
            rest = rest[num_added:]
            yield bytes(part)
            part.clear()
        part += rest
    yield bytes(part)
