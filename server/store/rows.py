"""The statements that write records, and the parameters of each record."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import structs

from .checksums import (
    append_checksum,
    end_checksum,
    event_checksum,
    program_checksum,
    value_checksum,
)
from .records import (
    AliasRecord,
    AliasRemoval,
    AppendRecord,
    DeleteRecord,
    EndRecord,
    EventRecord,
    PinRecord,
    ProcedureRecord,
    ProcedureRemoval,
    ProgramRecord,
    Record,
    ValueRecord,
    WatchRecord,
)

# For an unknown program the subquery is NULL, which violates the column's constraint.
_NUMBER = "(SELECT number FROM program WHERE id = ?)"
STATEMENTS: Final[tuple[tuple[type[Record], str], ...]] = (
    (
        ProgramRecord,
        "INSERT INTO program (id, tenant, idempotency_key, body_hash, created_at, body, "
        "name, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    ),
    (AppendRecord, f"INSERT INTO appended (program, body, crc) VALUES ({_NUMBER}, ?, ?)"),
    (
        ValueRecord,
        "INSERT INTO value (program, variable, epoch, attempt, tokenizer_hash, token_ids, text, "
        f"value, crc) VALUES ({_NUMBER}, ?, ?, ?, ?, ?, ?, ?, ?)",
    ),
    (
        EventRecord,
        f"INSERT INTO event (program, seq, type, at, data, crc) VALUES ({_NUMBER}, ?, ?, ?, ?, ?)",
    ),
    (
        EndRecord,
        "INSERT INTO ending (program, status, finished_at, receipt, error, nodes, crc) "
        f"VALUES ({_NUMBER}, ?, ?, ?, ?, ?, ?)",
    ),
    (
        WatchRecord,
        "INSERT OR REPLACE INTO watched (program, num_deaths, num_values, problem) "
        f"VALUES ({_NUMBER}, ?, ?, ?)",
    ),
    (
        ProcedureRecord,
        "INSERT INTO procedure (tenant, name, version, created_at, program) "
        "VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
    ),
    (
        AliasRecord,
        "INSERT INTO procedure_alias (tenant, name, alias, version) VALUES (?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET version = excluded.version",
    ),
    (ProcedureRemoval, "DELETE FROM procedure_pin WHERE tenant = ? AND name = ? AND version = ?"),
    (ProcedureRemoval, "DELETE FROM procedure WHERE tenant = ? AND name = ? AND version = ?"),
    (AliasRemoval, "DELETE FROM procedure_alias WHERE tenant = ? AND name = ? AND alias = ?"),
    (
        PinRecord,
        "INSERT INTO procedure_pin (tenant, name, version, expires_at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET expires_at = excluded.expires_at",
    ),
)
"""The statements that write each kind of record, in the order of their execution: programs before
the records that refer to them. The removal of a procedure has two, because its pin refers to it."""
TABLE_OF: Final[dict[type[Record], str]] = {
    ProgramRecord: "program",
    AppendRecord: "appended",
    ValueRecord: "value",
    EventRecord: "event",
    EndRecord: "ending",
}
"""The tables in which a row proves that its commit is on disk. The row of a watch proves nothing: a
second watch replaces it, and the end of its program deletes it."""


def row_of(record: Record) -> tuple[object, ...]:
    """Return the parameters of the statement that writes a record, its checksum last."""
    match record:
        case EventRecord(program=program):
            fields = (record.seq, record.type, record.at, record.data)
            return program, *fields, event_checksum(program, *fields)
        case ValueRecord(program=program, token_ids=ids):
            content = (
                record.variable,
                record.epoch,
                record.attempt,
                record.tokenizer_hash,
                None if ids is None else msgspec.msgpack.encode(ids),
                record.text,
                record.value,
            )
            return program, *content, value_checksum(program, *content)
        case ProgramRecord():
            row = (
                record.id,
                record.tenant,
                record.idempotency_key,
                record.body_hash,
                record.created_at,
                record.body,
                record.name,
            )
            return *row, program_checksum(*row)
        case AppendRecord(program=program):
            return program, record.body, append_checksum(program, record.body)
        case EndRecord(program=program):
            last = (
                record.status,
                record.finished_at,
                record.receipt,
                record.error,
                record.nodes,
            )
            return program, *last, end_checksum(program, *last)
        case WatchRecord():
            return record.program, record.num_deaths, record.num_values, record.problem
        case DeleteRecord():
            raise AssertionError("a removal has no row")
        case _:  # of procedures: the fields are the parameters, in order
            return structs.astuple(record)


def name_of(record: Record) -> str:
    """Return the name of a record for error messages."""
    match record:
        case ProgramRecord():
            return f"program {record.id}"
        case ValueRecord():
            return f"value of {record.variable} in {record.program}"
        case EventRecord():
            return f"event {record.seq} of {record.program}"
        case EndRecord():
            return f"end of {record.program}"
        case AliasRemoval():
            return f"alias {record.name}:{record.alias}"
        case ProcedureRecord() | AliasRecord() | PinRecord() | ProcedureRemoval():
            return f"procedure {record.name}@{record.version}"
        case AppendRecord():
            return f"nodes of {record.program}"
        case WatchRecord():
            return f"watch over {record.program}"
        case DeleteRecord():
            return f"removal of {len(record.programs)} programs"
