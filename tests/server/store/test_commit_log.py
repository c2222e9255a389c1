"""The commit log tells lost commits from commits whose rows were deleted later."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from conure.server.store import journal as journal_module
from conure.server.store.damage import integrity
from conure.server.store.damage.commit_log import CommitLine, CommitLog, CommitLosses, find_losses
from conure.server.store.damage.integrity import JournalReport, inspect
from conure.server.store.database import begin_generation, open_writer
from conure.server.store.journal import DeleteRecord, Journal, WatchRecord
from conure.server.store.retention import erase_programs
from conure.server.store.writer import WriteBatch

from .journal_records import crash_image, crash_image_without_log, end, event, program, value


async def delete(journal: Journal, id_: str) -> None:
    await journal.append([DeleteRecord(programs=(id_,))])


async def test_a_crash_between_commit_and_line_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path / "data")
    images: list[Path] = []
    add = CommitLog.add

    def add_after_image(log: CommitLog, line: CommitLine) -> None:
        images.append(crash_image(tmp_path / "data", tmp_path / f"{len(images)}"))
        add(log, line)

    monkeypatch.setattr(CommitLog, "add", add_after_image)
    await journal.append([program("p_a")])
    await journal.append([program("p_b"), event(journal, "p_b"), end("p_b")])
    await journal.append([DeleteRecord(programs=("p_b",))])
    await journal.append([program("p_b"), value("p_b", "x", b"1"), end("p_b")])
    await journal.append([DeleteRecord(programs=("p_b",)), program("p_c")])
    await journal.append([DeleteRecord(programs=("p_a", "p_c"))])
    await journal.append([program("p_d")])
    await journal.close()
    assert len(images) == 7
    assert [inspect(image).findings for image in images] == [[]] * 7


async def test_a_crash_during_the_first_start_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: list[Path] = []

    def with_image(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object) -> object:
            result = function(*args)
            images.append(shutil.copytree(tmp_path / "data", tmp_path / f"{len(images)}"))
            return result

        return wrapped

    for function in (open_writer, begin_generation):
        monkeypatch.setattr(journal_module, function.__name__, with_image(function))
    await Journal.open(tmp_path / "data").close()
    monkeypatch.undo()
    assert len(images) == 2
    for image in images:
        await Journal.open(image).close()


async def test_a_first_start_during_a_check_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_writer(tmp_path).close()
    journals: list[Journal] = []
    was_started = integrity._was_started

    def start_before(connection: sqlite3.Connection) -> bool:
        journals.append(Journal.open(tmp_path))
        return was_started(connection)

    monkeypatch.setattr(integrity, "_was_started", start_before)
    monkeypatch.setattr(journal_module, "inspect", lambda *_, **__: JournalReport())
    report = inspect(tmp_path)
    await journals[0].close()
    assert report.is_intact


async def test_a_crash_before_the_line_of_the_end_of_a_watched_program_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p")])
    await journal.append([WatchRecord(program="p", num_deaths=1, num_values=0, problem=None)])
    monkeypatch.setattr(CommitLog, "add", lambda *_: None)
    await journal.append([end("p")])
    image = crash_image(tmp_path / "data", tmp_path / "image")
    await journal.close()
    assert inspect(image).is_intact


async def test_a_deletion_during_a_check_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p")])
    loop = asyncio.get_running_loop()
    read_bytes = Path.read_bytes

    def read_before_deletion(path: Path) -> bytes:
        content = read_bytes(path)
        asyncio.run_coroutine_threadsafe(delete(journal, "p"), loop).result(timeout=60)
        return content

    monkeypatch.setattr(Path, "read_bytes", read_before_deletion)
    report = await asyncio.to_thread(inspect, tmp_path)
    monkeypatch.undo()
    await journal.close()
    assert report.is_intact


async def test_a_deletion_between_two_queries_of_a_check_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p"), event(journal, "p")])
    loop = asyncio.get_running_loop()

    def find_before_deletion(folder: Path, connection: sqlite3.Connection | None) -> CommitLosses:
        losses = find_losses(folder, connection)
        asyncio.run_coroutine_threadsafe(delete(journal, "p"), loop).result(timeout=60)
        return losses

    monkeypatch.setattr(integrity, "find_losses", find_before_deletion)
    report = await asyncio.to_thread(inspect, tmp_path)
    await journal.close()
    assert report.is_intact
    assert report.num_programs == 1


async def test_an_erasure_is_no_loss(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p"), end("p")])
    image = crash_image(tmp_path / "data", tmp_path / "image")
    await journal.close()
    connection = open_writer(image)
    erase_programs(connection, ["p"])
    connection.close()
    assert inspect(image).is_intact


async def test_a_row_id_that_was_used_before_proves_no_commit(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p_before"), value("p_before", "x", b"1"), end("p_before")])
    journal._writer.checkpoint()
    await journal.append([DeleteRecord(programs=("p_before",))])
    await journal.append([program("p_lost")])
    await journal.append([value("p_lost", "x", b"2")])
    image = await crash_image_without_log(journal, tmp_path)
    report = inspect(image)
    assert report.findings == ["the last 3 acknowledged commits are missing"]
    assert report.lost == ["p_lost"]


async def test_a_program_that_is_accepted_again_after_its_deletion_is_named(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path / "data")
    journal._writer.checkpoint()
    await journal.append([program("p_twice")])
    await journal.append([program("p_deleted"), event(journal, "p_deleted")])
    await journal.append([DeleteRecord(programs=("p_twice", "p_deleted"))])
    await journal.append([program("p_twice")])
    image = await crash_image_without_log(journal, tmp_path)
    assert inspect(image).lost == ["p_twice"]


async def test_a_program_that_is_deleted_and_accepted_in_one_commit_is_named(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path / "data")
    journal._writer.checkpoint()
    await journal.append([program("p")])
    journal._writer.join(60)  # From here on this thread uses the connection.
    batches = [
        WriteBatch(records, asyncio.get_running_loop().create_future(), False)
        for records in ([DeleteRecord(programs=("p",))], [program("p")])
    ]
    assert journal._writer._try_commit(batches) is None
    image = await crash_image_without_log(journal, tmp_path)
    assert inspect(image).lost == ["p"]


async def test_a_lost_deletion_brings_a_program_back_as_damaged_if_it_lacks_records(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p_whole"), program("p_changed")])
    journal._writer.checkpoint()
    await journal.append([value("p_changed", "x", b"1")])
    await journal.append([DeleteRecord(programs=("p_whole", "p_changed"))])
    image = await crash_image_without_log(journal, tmp_path)
    report = inspect(image)
    assert report.lost == []
    assert report.damaged == ["p_changed"]


async def test_a_line_of_an_earlier_version_is_compared_by_row_after_a_deletion(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p_deleted"), end("p_deleted")])
    await delete(journal, "p_deleted")
    journal._writer.checkpoint()
    await journal.append([program("p_lost")])
    image = await crash_image_without_log(journal, tmp_path)
    log = CommitLog(image)
    log.clear()
    log.add(CommitLine("program", 1, 0, ["p_lost"], [], []))
    log.close()
    assert inspect(image).lost == ["p_lost"]


def test_a_missing_journal_lost_all_commits_of_an_earlier_version(tmp_path: Path) -> None:
    log = CommitLog(tmp_path)
    log.add(CommitLine("program", 1, 0, ["p_first", "p_deleted"], [], []))
    log.add(CommitLine("program", 0, 0, [], [], ["p_deleted"]))
    log.add(CommitLine("program", 2, 0, ["p_last"], [], []))
    log.close()
    assert inspect(tmp_path).lost == ["p_first", "p_last"]
