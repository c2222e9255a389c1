"""`conure journal`: a crash or a reader during a command, and the content that is left."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from conure.cli.command import CommandError
from conure.cli.commands import journal as command
from conure.server.store.damage.integrity import inspect
from conure.server.store.database import open_reader
from conure.server.store.journal import Journal
from conure.server.store.retention import erase_programs

from ...server.store.journal_records import crash_image, end, program

SECRET = b'{"x": "hunter2"}'


class Crash(BaseException):
    """Ends a command after its deletion."""


async def write_after_crash(folder: Path) -> Path:
    """Write a journal as a killed server leaves it."""
    journal = Journal.open(folder / "data")
    await journal.append([program("p_1", body=SECRET), end("p_1")])
    image = crash_image(folder / "data", folder / "image")
    await journal.close()
    return image


def test_a_crash_after_the_deletion_leaves_an_intact_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = asyncio.run(write_after_crash(tmp_path))

    def crash_afterwards(connection: sqlite3.Connection, programs: Sequence[str]) -> None:
        erase_programs(connection, programs)
        raise Crash

    monkeypatch.setattr(command, "erase_programs", crash_afterwards)
    with pytest.raises(Crash):
        command.delete(folder, ["p_1"])
    report = inspect(folder)
    assert report.is_intact
    assert report.num_programs == 0


def test_nothing_is_deleted_while_a_reader_uses_the_write_ahead_log(tmp_path: Path) -> None:
    folder = asyncio.run(write_after_crash(tmp_path))
    commits = (folder / "commits.log").read_bytes()
    with closing(open_reader(folder)) as reader:
        read(reader)
        with pytest.raises(CommandError, match="a reader uses the journal"):
            command.delete(folder, ["p_1"])
    assert (folder / "commits.log").read_bytes() == commits
    assert inspect(folder).num_programs == 1
    command.delete(folder, ["p_1"])
    assert not has_secret(folder)


def test_a_deletion_reports_content_that_a_reader_keeps(tmp_path: Path) -> None:
    asyncio.run(write_after_crash(tmp_path))
    folder = tmp_path / "data"
    with closing(open_reader(folder)) as reader:
        read(reader)  # the write-ahead log is empty
        with pytest.raises(CommandError, match="still contain the earlier content"):
            command.delete(folder, ["p_1"])
        assert has_secret(folder)
    command.compact(folder)
    assert not has_secret(folder)
    assert inspect(folder).num_programs == 0


def read(reader: sqlite3.Connection) -> None:
    """Begin a transaction that reads, as a check or a backup does."""
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM program").fetchone()


def has_secret(folder: Path) -> bool:
    """Return whether a file of the folder contains the body of the program."""
    return any(SECRET in path.read_bytes() for path in folder.iterdir() if path.is_file())
