"""Checksums of the programs, appends, values, events and ends in the journal: CRC-32 over all
fields of a row.

A row stores its program as a number. The checksum covers the program's id in its place, so it also
detects a damaged number. Stored checksums determine how the functions join the fields.

Out of scope: procedures, pins, usage and watched programs, which have no checksums.
"""

from __future__ import annotations

from zlib import crc32


def program_checksum(
    id_: str,
    tenant: str,
    idempotency_key: str | None,
    body_hash: bytes,
    created_at: float,
    body: bytes,
    name: str,
) -> int:
    """Return the checksum of a program's row."""
    head = f"program\0{id_}\0{tenant}\0{idempotency_key!r}\0{float(created_at)!r}\0{name}\0"
    return crc32(body, crc32(body_hash, crc32(head.encode())))


def append_checksum(program: str, body: bytes) -> int:
    """Return the checksum of an append's row."""
    return crc32(body, crc32(f"append\0{program}\0".encode()))


def value_checksum(
    program: str,
    variable: str,
    epoch: int,
    attempt: int,
    tokenizer_hash: str | None,
    token_ids: bytes | None,
    text: str | None,
    value: bytes,
) -> int:
    """Return the checksum of a value's row; `token_ids` as stored."""
    size = -1 if token_ids is None else len(token_ids)
    head = f"value\0{program}\0{variable}\0{epoch}\0{attempt}\0{tokenizer_hash!r}\0{size}\0"
    crc = crc32(token_ids or b"", crc32(head.encode()))
    crc = crc32(b"\0" if text is None else text.encode() + b"\1", crc)
    return crc32(value, crc)


def event_checksum(program: str, seq: int, type_: str, at: float, data: bytes) -> int:
    """Return the checksum of an event's row."""
    return crc32(data, crc32(f"event\0{program}\0{seq}\0{type_}\0{float(at)!r}\0".encode()))


def end_checksum(
    program: str,
    status: str,
    finished_at: float,
    receipt: bytes,
    error: bytes | None,
    nodes: bytes,
) -> int:
    """Return the checksum of a row of `ending`."""
    size = -1 if error is None else len(error)
    head = f"end\0{program}\0{status}\0{float(finished_at)!r}\0{len(receipt)}\0{size}\0"
    return crc32(nodes, crc32(error or b"", crc32(receipt, crc32(head.encode()))))
