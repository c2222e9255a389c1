"""`conure journal`: a crash during a command leaves an intact journal."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from conure.cli.commands import journal as command
from conure.server.store.damage.integrity import inspect
from conure.server.store.journal import Journal
from conure.server.store.retention import erase_programs

from ...server.store.journal_records import crash_image, end, program


class Crash(BaseException):
    """Ends a command after its deletion."""


async def write_after_crash(folder: Path) -> Path:
    """Write a journal as a killed server leaves it."""
    journal = Journal.open(folder / "data")
    await journal.append([program("p_1"), end("p_1")])
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
