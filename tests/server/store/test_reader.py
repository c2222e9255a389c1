"""Tests of the queries of the journal."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from conure.server.store.database import open_reader
from conure.server.store.journal import Journal
from conure.server.store.reader import DamagedRecordError, JournalReader, list_programs, unfinished


async def test_a_query_reports_its_error_although_its_transaction_has_ended(
    tmp_path: Path,
) -> None:
    def damaged(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")  # as SQLite does after some errors
        raise DamagedRecordError("a record")

    await Journal.open(tmp_path).close()
    reader = JournalReader(tmp_path, num_threads=1)
    with pytest.raises(DamagedRecordError):
        await reader.read(damaged)
    assert await reader.read(lambda connection: connection.in_transaction)
    reader.close()


async def test_ended_programs_are_not_read_to_find_the_others(tmp_path: Path) -> None:
    await Journal.open(tmp_path).close()
    connection = open_reader(tmp_path)
    queries: list[str] = []
    connection.set_trace_callback(queries.append)
    unfinished(connection)
    list_programs(connection, "a", "running", "", before=9, limit=9)
    connection.set_trace_callback(None)
    plans = [connection.execute(f"EXPLAIN QUERY PLAN {query}").fetchall() for query in queries]
    connection.close()
    first_steps = [plan[0][3].split()[1] for plan in plans]
    assert first_steps == ["u", "u", "u", "u", "watched", "u"]
