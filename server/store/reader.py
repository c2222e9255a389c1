"""Queries of the journal, on read-only connections in a few threads.

Every query except `unfinished` and `list_pins` selects by tenant: it returns no data of other
tenants. Values are always bound, never formatted into a query.
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

from ..program.errors import UnavailableError
from .checksums import (
    append_checksum,
    end_checksum,
    event_checksum,
    program_checksum,
    value_checksum,
)
from .database import open_reader
from .records import (
    TRACE,
    EndRecord,
    EventRecord,
    JournalError,
    PinRecord,
    ProcedureListing,
    ProcedureRecord,
    ProgramListing,
    StoredProgram,
    UsageRecord,
    ValueRecord,
    WatchRecord,
)

T = TypeVar("T")

RETRY_AFTER_S = 1.0

_decode_ids = msgspec.msgpack.Decoder(list[int]).decode

_PROGRAM = "p.id, p.tenant, p.idempotency_key, p.body_hash, p.created_at, p.body, p.name, p.crc"
_VALUE = "v.variable, v.epoch, v.attempt, v.tokenizer_hash, v.token_ids, v.text, v.value, v.crc"
_EVENT = "e.seq, e.type, e.at, e.data, e.crc"
_END = "status, finished_at, receipt, error, nodes, crc"
_TRUNCATED = b'"truncated":true'
"""Occurs in every event of a value that was cut off. Other values may contain these bytes by
chance.
"""


class JournalReader:
    """A pool of read-only connections, one per thread."""

    def __init__(self, folder: Path, *, num_threads: int) -> None:
        self.damage: str | None = None
        """The last damage that a query found; None if none has found any."""
        self._connections = [open_reader(folder) for _ in range(num_threads)]
        self._idle = list(self._connections)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="journal-read")

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query in a thread, on one snapshot of the journal."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, query)

    def close(self) -> None:
        """Wait for running queries, then close the connections; blocks."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def _run(self, query: Callable[[sqlite3.Connection], T]) -> T:
        # Never empty: there are as many connections as threads. list.pop and append are atomic.
        connection = self._idle.pop()
        try:
            connection.execute("BEGIN")
            return query(connection)
        except sqlite3.OperationalError as error:
            raise UnavailableError(
                "store.unavailable",
                f"the journal cannot be read: {error}; retry later",
                retry_after_s=RETRY_AFTER_S,
            ) from error
        except sqlite3.DatabaseError as error:
            self.damage = str(error)
            raise JournalError("store.damaged", f"the journal is damaged: {error}") from error
        except DamagedRecordError as error:
            self.damage = error.message
            raise
        finally:
            connection.rollback()  # without effect if an error has ended the transaction
            self._idle.append(connection)


class DamagedRecordError(JournalError):
    """A record does not match its checksum."""

    def __init__(self, record: str) -> None:
        super().__init__(
            "store.damaged", f"the journal is damaged: {record} does not match its checksum"
        )


def find_idempotent(
    connection: sqlite3.Connection, tenant: str, key: str
) -> tuple[str, bytes] | None:
    """Return the id and body hash of the program that was submitted under a key."""
    row: tuple[str, bytes] | None = connection.execute(
        "SELECT id, body_hash FROM program WHERE tenant = ? AND idempotency_key = ?", (tenant, key)
    ).fetchone()
    return row


def load_program(connection: sqlite3.Connection, tenant: str, program: str) -> StoredProgram | None:
    """Return a program with its appends, values and end."""
    row = connection.execute(
        f"SELECT p.number, {_PROGRAM} FROM program p WHERE p.tenant = ? AND p.id = ?",
        (tenant, program),
    ).fetchone()
    if row is None:
        return None
    number, *fields = row
    appends = connection.execute(
        "SELECT body, crc FROM appended WHERE program = ? ORDER BY position", (number,)
    )
    values = connection.execute(f"SELECT {_VALUE} FROM value v WHERE v.program = ?", (number,))
    end = connection.execute(f"SELECT {_END} FROM ending WHERE program = ?", (number,)).fetchone()
    return _stored(
        fields,
        appends=[_append(program, *append) for append in appends],
        values=[_value(program, value) for value in values],
        end=None if end is None else _end(program, end),
    )


def find_status(connection: sqlite3.Connection, tenant: str, program: str) -> str | None:
    """Return the status of a program that has ended; None if there is no such program."""
    row = connection.execute(
        "SELECT e.status FROM program p JOIN ending e ON e.program = p.number "
        "WHERE p.tenant = ? AND p.id = ?",
        (tenant, program),
    ).fetchone()
    return None if row is None else row[0]


def load_variable(
    connection: sqlite3.Connection, tenant: str, program: str, variable: str
) -> tuple[EndRecord, ValueRecord | None] | None:
    """Return the end of a program, and the value of one of its variables if it has one.

    None if there is no such program, or it has not ended.
    """
    ends = f"SELECT program, {_END} FROM ending"
    row = connection.execute(
        f"{ends} WHERE program = (SELECT number FROM program WHERE tenant = ? AND id = ?)",
        (tenant, program),
    ).fetchone()
    if row is None:
        return None
    number, *end = row
    value = connection.execute(
        f"SELECT {_VALUE} FROM value v WHERE v.program = ? AND v.variable = ?", (number, variable)
    ).fetchone()
    return _end(program, end), None if value is None else _value(program, value)


def find_procedure(
    connection: sqlite3.Connection, tenant: str, name: str, version: str | None, alias: str | None
) -> ProcedureRecord | None:
    """Return a version of a procedure, by its hash or by an alias."""
    if version is None:
        found = connection.execute(
            "SELECT version FROM procedure_alias WHERE tenant = ? AND name = ? AND alias = ?",
            (tenant, name, alias),
        ).fetchone()
        if found is None:
            return None
        (version,) = found
    row = connection.execute(
        "SELECT created_at, program FROM procedure WHERE tenant = ? AND name = ? AND version = ?",
        (tenant, name, version),
    ).fetchone()
    if row is None:
        return None
    assert version is not None
    return ProcedureRecord(
        tenant=tenant, name=name, version=version, created_at=row[0], program=row[1]
    )


def list_procedures(
    connection: sqlite3.Connection, tenant: str, name: str | None
) -> ProcedureListing:
    """Return the versions and aliases of one procedure, or of all procedures of a tenant."""
    condition = "tenant = ?" if name is None else "tenant = ? AND name = ?"
    parameters = (tenant,) if name is None else (tenant, name)
    versions = connection.execute(
        f"SELECT name, version, created_at FROM procedure WHERE {condition} "
        "ORDER BY name, created_at, version",
        parameters,
    ).fetchall()
    aliases = connection.execute(
        f"SELECT name, alias, version FROM procedure_alias WHERE {condition} ORDER BY name, alias",
        parameters,
    ).fetchall()
    return ProcedureListing(versions=versions, aliases=aliases)


def list_pins(connection: sqlite3.Connection, now: float) -> list[PinRecord]:
    """Return the pins of all tenants that expire after `now`."""
    rows = connection.execute(
        "SELECT tenant, name, version, expires_at FROM procedure_pin WHERE expires_at > ? "
        "ORDER BY expires_at",
        (now,),
    ).fetchall()
    return [
        PinRecord(tenant=tenant, name=name, version=version, expires_at=expires_at)
        for tenant, name, version, expires_at in rows
    ]


def list_programs(
    connection: sqlite3.Connection,
    tenant: str,
    status: str | None,
    search: str,
    before: int,
    limit: int,
) -> list[ProgramListing]:
    """Return the newest `limit` programs of a tenant with a number below `before`.

    Args:
        connection: a read-only connection.
        tenant: owner of the programs.
        status: a final status; `running` selects the programs that have not ended, None all.
        search: text that the name or the id contains, in any case; empty selects all.
        before: exclusive upper bound of the programs' numbers.
        limit: maximum length of the list.
    """
    columns = "p.number, p.id, p.name, p.created_at, e.status, e.finished_at, "
    columns += "json_extract(CAST(e.receipt AS TEXT), '$.calls')"
    source, number = "program p LEFT JOIN ending e ON e.program = p.number", "p.number"
    if status == "running":
        source = "unfinished u CROSS JOIN program p ON p.number = u.program "
        source += "LEFT JOIN ending e ON e.program = p.number"
        number = "u.program"
    elif status is not None:
        source = "ending e JOIN program p ON p.number = e.program AND e.status = :status"
        number = "e.program"
    rows = connection.execute(
        f"SELECT {columns} FROM {source} WHERE p.tenant = :tenant AND {number} < :before "
        "AND (:search = '' OR instr(casefold(p.name), :search) OR instr(p.id, :search)) "
        f"ORDER BY {number} DESC LIMIT :limit",
        {
            "status": status,
            "tenant": tenant,
            "search": search.casefold(),
            "before": before,
            "limit": limit,
        },
    )
    return [
        ProgramListing(
            number=number,
            id=id_,
            name=name,
            created_at=created_at,
            status=ended,
            finished_at=finished_at,
            num_calls=num_calls,
        )
        for number, id_, name, created_at, ended, finished_at, num_calls in rows
    ]


def events(
    connection: sqlite3.Connection,
    tenant: str,
    program: str,
    after: int,
    limit: int,
    max_bytes: int | None,
    is_trace: bool,
) -> list[EventRecord]:
    """Return the first `limit` events of a program after sequence number `after`, or the records of
    its trace.

    The data of the returned events has at most `max_bytes`, unless the first event is larger.
    """
    rows = connection.execute(
        f"SELECT {_EVENT} FROM event e WHERE (e.type = ?) = ? AND e.seq > ? AND e.program = "
        "(SELECT number FROM program WHERE tenant = ? AND id = ?) ORDER BY e.seq LIMIT ?",
        (TRACE, is_trace, after, tenant, program, limit),
    )
    found: list[EventRecord] = []
    num_bytes = 0
    for row in rows:
        record = _event(program, row)
        num_bytes += len(record.data)
        if max_bytes is not None and num_bytes > max_bytes and found:
            break
        found.append(record)
    return found


def usage(
    connection: sqlite3.Connection, tenant: str, since: str | None, until: str | None
) -> list[UsageRecord]:
    """Return the summed receipts of a tenant's programs that ended between two days, both
    inclusive.
    """
    rows = connection.execute(
        "SELECT status, name, sum(amount) FROM usage "
        "WHERE tenant = ? AND day >= ? AND day <= ? GROUP BY status, name",
        (tenant, since or "", until or "9999-12-31"),
    )
    return [UsageRecord(*row) for row in rows]


def unfinished(connection: sqlite3.Connection) -> list[StoredProgram]:
    """Return every program that has not ended, of all tenants, oldest first.

    Raises:
        DamagedRecordError: if one record of them does not match its checksum.
    """
    # CROSS JOIN makes SQLite search the rows of each unfinished program; it would scan all rows.
    appends: dict[int, list[bytes]] = defaultdict(list)
    values: dict[int, list[ValueRecord]] = defaultdict(list)
    program_events: dict[int, list[EventRecord]] = defaultdict(list)
    programs = connection.execute(
        f"SELECT p.number, {_PROGRAM} FROM unfinished u CROSS JOIN program p "
        "ON p.number = u.program ORDER BY u.program"
    ).fetchall()
    ids = {number: program for number, program, *_ in programs}
    for number, *row in connection.execute(
        "SELECT a.program, a.body, a.crc FROM unfinished u CROSS JOIN appended a "
        "ON a.program = u.program ORDER BY u.program, a.position"
    ):
        appends[number].append(_append(ids[number], *row))
    for number, *row in connection.execute(
        f"SELECT v.program, {_VALUE} FROM unfinished u CROSS JOIN value v ON v.program = u.program"
    ):
        values[number].append(_value(ids[number], row))
    for number, *row in connection.execute(
        f"SELECT e.program, {_EVENT} FROM unfinished u CROSS JOIN event e "
        "ON e.program = u.program WHERE e.type <> ? "
        "AND (e.type <> 'variable.committed' OR instr(e.data, ?)) ORDER BY u.program, e.seq",
        (TRACE, _TRUNCATED),
    ):
        program_events[number].append(_event(ids[number], row))
    watched = {
        number: WatchRecord(
            program=ids[number], num_deaths=deaths, num_values=num_values, problem=problem
        )
        for number, deaths, num_values, problem in connection.execute(
            "SELECT program, num_deaths, num_values, problem FROM watched"
        )
        if number in ids
    }
    return [
        _stored(
            fields,
            appends=appends[number],
            values=values[number],
            events=program_events[number],
            watch=watched.get(number),
        )
        for number, *fields in programs
    ]


# The functions below check the checksum of a row and build its record. Rows are Any, because STRICT
# tables check the types when rows are written. Rows of an older version have no checksum.


def _stored(
    row: Any,
    *,
    appends: list[bytes],
    values: list[ValueRecord],
    events: list[EventRecord] | None = None,
    end: EndRecord | None = None,
    watch: WatchRecord | None = None,
) -> StoredProgram:
    *fields, crc = row
    id_, tenant, key, body_hash, created_at, body, _ = fields
    if crc is not None and crc != program_checksum(*fields):
        raise DamagedRecordError(f"program {id_}")
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
        watch=watch,
    )


def _append(program: str, body: bytes, crc: int | None) -> bytes:
    if crc is not None and crc != append_checksum(program, body):
        raise DamagedRecordError(f"an append of program {program}")
    return body


def _value(program: str, row: Any) -> ValueRecord:
    variable, epoch, attempt, tokenizer_hash, token_ids, text, value, crc = row
    if crc is not None and crc != value_checksum(program, *row[:-1]):
        raise DamagedRecordError(f"the value of {variable} in program {program}")
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
    seq, type_, at, data, crc = row
    if crc is not None and crc != event_checksum(program, seq, type_, at, data):
        raise DamagedRecordError(f"event {seq} of program {program}")
    return EventRecord(program=program, seq=seq, type=type_, data=data, at=at)


def _end(program: str, row: Any) -> EndRecord:
    status, finished_at, receipt, error, nodes, crc = row
    if crc is not None and crc != end_checksum(program, *row[:-1]):
        raise DamagedRecordError(f"the end of program {program}")
    return EndRecord(
        program=program,
        status=status,
        finished_at=finished_at,
        receipt=receipt,
        error=error,
        nodes=nodes,
    )
