"""Space that deleted programs leave is given back in parts, while no batch waits."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from conure.server.store.journal import DeleteRecord, Journal
from conure.server.store.writer import WriteBatch

from .journal_records import end, program, value


async def journal_with_unused_space(folder: Path) -> Journal:
    """Return an open journal with about 100 free pages."""
    journal = Journal.open(folder)
    await journal.append([program("p"), value("p", "x", b"x" * 400_000), end("p")])
    await journal.append([program("kept"), DeleteRecord(programs=("p",))])
    return journal


def count_free(journal: Journal) -> int:
    (num_free,) = journal._connection.execute("PRAGMA freelist_count").fetchone()
    return int(num_free)


@pytest.mark.parametrize("limit", ["MAX_PART", "MAX_SEARCHED"])
async def test_an_idle_moment_gives_back_all_unused_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(f"conure.server.store.retention.{limit}", 30)
    journal = await journal_with_unused_space(tmp_path)
    assert count_free(journal) >= 90
    journal._writer._tidy_up()
    assert count_free(journal) == 0
    assert (tmp_path / "journal.sqlite3").stat().st_size < 200_000
    assert await journal.load_program("a", "kept") is not None
    await journal.close()


async def test_a_waiting_batch_and_a_full_disk_interrupt_the_giving_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = await journal_with_unused_space(tmp_path)
    writer = journal._writer
    writer.join(60)  # From here on this thread uses the connection.
    parts: list[float | None] = []

    def give_back(_: sqlite3.Connection) -> bool:
        parts.append(writer.busy_since)
        if len(parts) == 2:
            writer.put(WriteBatch((), asyncio.get_running_loop().create_future(), False))
        if len(parts) == 3:
            raise sqlite3.OperationalError("database or disk is full")
        return len(parts) < 4

    monkeypatch.setattr("conure.server.store.writer.give_back_space", give_back)
    writer._tidy_up()
    assert len(parts) == 2
    writer._drain()
    writer._tidy_up()
    assert len(parts) == 3
    assert "database or disk is full" in caplog.text
    writer._tidy_up()
    writer._tidy_up()
    assert len(parts) == 4
    assert None not in parts
    assert writer.busy_since is None
    await journal.close()


async def test_unused_space_is_kept_while_a_reader_uses_the_log(tmp_path: Path) -> None:
    journal = await journal_with_unused_space(tmp_path)
    reader = sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM program").fetchone()
    num_free = count_free(journal)
    journal._writer._tidy_up()
    assert count_free(journal) == num_free
    reader.close()
    journal._writer._tidy_up()
    assert count_free(journal) == 0
    await journal.close()
