"""What is read back from the journal, by read-only connections in a few threads.

Knows the columns. Every query but those of a start binds the tenant, so a program of another
tenant reads as one that does not exist. Parameters are bound, never written into a query.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .database import open_reader
from .records import EndRecord, EventRecord, StoredProgram, UsageRecord, ValueRecord

T = TypeVar("T")

_decode_ids = msgspec.msgpack.Decoder(list[int]).decode

_PROGRAM = "p.id, p.tenant, p.idempotency_key, p.body_hash, p.body, p.created_at"
_VALUE = "v.variable, v.value, v.text, v.token_ids, v.tokenizer_hash, v.epoch, v.attempt"
_EVENT = "e.seq, e.type, e.data, e.at"


class Reader:
    """A pool of read-only connections, as many as threads."""

    def __init__(self, folder: Path, *, num_threads: int) -> None:
        self._connections = [open_reader(folder) for _ in range(num_threads)]
        self._idle = list(self._connections)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="journal-read")

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query in a thread, on one snapshot of the journal."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, query)

    def close(self) -> None:
        """Finish the queries that run, then close; blocks."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def _run(self, query: Callable[[sqlite3.Connection], T]) -> T:
        # One connection per thread, and list.pop and append are atomic: never empty here.
        connection = self._idle.pop()
        try:
            connection.execute("BEGIN")
            try:
                return query(connection)
            finally:
                connection.execute("COMMIT")
        finally:
            self._idle.append(connection)


def find_idempotent(
    connection: sqlite3.Connection, tenant: str, key: str
) -> tuple[str, bytes] | None:
    """The program that was submitted under a key, and the hash of its body."""
    row: tuple[str, bytes] | None = connection.execute(
        "SELECT id, body_hash FROM program WHERE tenant = ? AND idempotency_key = ?", (tenant, key)
    ).fetchone()
    return row


def load_program(connection: sqlite3.Connection, tenant: str, program: str) -> StoredProgram | None:
    """One program with its appends, values and end."""
    row = connection.execute(
        f"SELECT p.number, {_PROGRAM} FROM program p WHERE p.tenant = ? AND p.id = ?",
        (tenant, program),
    ).fetchone()
    if row is None:
        return None
    number = (row[0],)
    appends = connection.execute(
        "SELECT body FROM appended WHERE program = ? ORDER BY position", number
    )
    values = connection.execute(f"SELECT {_VALUE} FROM value v WHERE v.program = ?", number)
    end = connection.execute(
        "SELECT status, finished_at, receipt, error, nodes FROM ending WHERE program = ?", number
    ).fetchone()
    return _stored(
        row[1:],
        appends=[body for (body,) in appends],
        values=[_value(program, value) for value in values],
        end=None if end is None else _end(program, end),
    )


def events(
    connection: sqlite3.Connection, tenant: str, program: str, after: int, limit: int
) -> list[EventRecord]:
    """The first `limit` events of a program beyond sequence number `after`."""
    rows = connection.execute(
        f"SELECT {_EVENT} FROM event e WHERE e.seq > ? AND e.program = "
        "(SELECT number FROM program WHERE tenant = ? AND id = ?) ORDER BY e.seq LIMIT ?",
        (after, tenant, program, limit),
    )
    return [_event(program, row) for row in rows]


def usage(
    connection: sqlite3.Connection, tenant: str, since: str | None, until: str | None
) -> list[UsageRecord]:
    """The sums over what a tenant's programs cost that ended on these days, both included."""
    rows = connection.execute(
        "SELECT status, name, sum(amount) FROM usage "
        "WHERE tenant = ? AND day >= ? AND day <= ? GROUP BY status, name",
        (tenant, since or "", until or "9999-12-31"),
    )
    return [UsageRecord(*row) for row in rows]


def unfinished(connection: sqlite3.Connection) -> list[StoredProgram]:
    """Every program that has not ended, of all tenants, oldest first."""
    appends: dict[int, list[bytes]] = defaultdict(list)
    values: dict[int, list[ValueRecord]] = defaultdict(list)
    happened: dict[int, list[EventRecord]] = defaultdict(list)
    programs = connection.execute(
        f"SELECT p.number, {_PROGRAM} FROM unfinished u JOIN program p ON p.number = u.program "
        "ORDER BY p.number"
    ).fetchall()
    ids = {row[0]: row[1] for row in programs}
    for number, body in connection.execute(
        "SELECT a.program, a.body FROM unfinished u JOIN appended a ON a.program = u.program "
        "ORDER BY a.position"
    ):
        appends[number].append(body)
    for number, *row in connection.execute(
        f"SELECT v.program, {_VALUE} FROM unfinished u JOIN value v ON v.program = u.program"
    ):
        values[number].append(_value(ids[number], row))
    # CROSS JOIN fixes the order of the loops: by program, and within it by seq.
    for number, *row in connection.execute(
        f"SELECT e.program, {_EVENT} FROM unfinished u CROSS JOIN event e "
        "ON e.program = u.program WHERE e.type <> 'variable.committed' "
        "ORDER BY u.program, e.seq"
    ):
        happened[number].append(_event(ids[number], row))
    return [
        _stored(row[1:], appends=appends[row[0]], values=values[row[0]], events=happened[row[0]])
        for row in programs
    ]


# A row is Any: SQLite's types are checked where they are written, by STRICT tables.


def _stored(
    row: Any,
    *,
    appends: list[bytes],
    values: list[ValueRecord],
    events: list[EventRecord] | None = None,
    end: EndRecord | None = None,
) -> StoredProgram:
    id_, tenant, key, body_hash, body, created_at = row
    return StoredProgram(
        id=id_,
        tenant=tenant,
        idempotency_key=key,
        body_hash=body_hash,
        body=body,
        created_at=created_at,
        appends=appends,
        values=values,
        events=events or [],
        end=end,
    )


def _value(program: str, row: Any) -> ValueRecord:
    variable, value, text, token_ids, tokenizer_hash, epoch, attempt = row
    return ValueRecord(
        program=program,
        variable=variable,
        value=value,
        text=text,
        token_ids=None if token_ids is None else _decode_ids(token_ids),
        tokenizer_hash=tokenizer_hash,
        epoch=epoch,
        attempt=attempt,
    )


def _event(program: str, row: Any) -> EventRecord:
    seq, type_, data, at = row
    return EventRecord(program=program, seq=seq, type=type_, data=data, at=at)


def _end(program: str, row: Any) -> EndRecord:
    status, finished_at, receipt, error, nodes = row
    return EndRecord(
        program=program,
        status=status,
        finished_at=finished_at,
        receipt=receipt,
        error=error,
        nodes=nodes,
    )
