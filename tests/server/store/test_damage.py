"""Damaged journals: a start reports what is lost, or is refused; nothing is lost silently."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import sqlite3
import tracemalloc
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.store.damage.commit_log import CommitLine, CommitLog
from conure.server.store.damage.integrity import TABLES, find_traces, inspect, readable_rows
from conure.server.store.damage.row_ids import RowIds
from conure.server.store.database import RESERVE_NAME
from conure.server.store.journal import DeleteRecord, Journal, JournalError, ProcedureRecord

from .damaged_journals import KINDS, Sample, check_damaged, make_sample
from .journal_records import FILE, crash_image, crash_image_without_log, end, event, program, value

NUM_PER_KIND = 2
"""`python -m tests.server.store.damaged_journals` checks hundreds."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return asyncio.run(make_sample(tmp_path_factory.mktemp("sample"), seed=3, num_programs=60))


@pytest.mark.parametrize("kind", KINDS)
async def test_report_of_damaged_journal_is_true(sample: Sample, tmp_path: Path, kind: str) -> None:
    for seed in range(NUM_PER_KIND):
        await check_damaged(sample, tmp_path / str(seed), kind, seed)


async def test_lost_commits_are_named(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p_before"), event(journal, "p_before")])
    journal._writer.checkpoint()
    await journal.append([program("p_after"), event(journal, "p_after")])
    await journal.append([value("p_before", "x", b"1"), event(journal, "p_before")])
    image = await crash_image_without_log(journal, tmp_path)
    with pytest.raises(JournalError, match="1 lost: p_after, 1 damaged: p_before") as caught:
        Journal.open(image)
    assert "--recover" in str(caught.value)
    assert (image / FILE).exists()
    seq = journal.last_seq
    recovered = Journal.open(image, recover=True)
    assert recovered.last_seq > seq
    (left,) = await recovered.unfinished()
    assert left.id == "p_before"
    assert left.watch is not None
    assert left.watch.problem == "program.damaged"
    await recovered.close()
    (aside,) = image.glob("damaged-*")
    assert {path.name for path in aside.iterdir()} >= {FILE, "commits.log", "report.json"}


async def test_new_journal_without_its_log_is_damaged(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p")])
    image = await crash_image_without_log(journal, tmp_path)
    with pytest.raises(JournalError, match=f"1 lost: p, .*{FILE} is missing or empty"):
        Journal.open(image)
    recovered = Journal.open(image, recover=True)
    assert await recovered.unfinished() == []
    await recovered.close()
    assert inspect(image).is_intact


async def test_lost_deletion_hides_no_other_loss(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    journal._writer.checkpoint()
    await journal.append([program("p_deleted"), program("p_lost")])
    await journal.append([DeleteRecord(programs=("p_deleted",))])
    image = await crash_image_without_log(journal, tmp_path)
    report = inspect(image)
    assert report.lost == ["p_lost"]
    assert report.findings == ["the last 2 acknowledged commits are missing"]


async def test_deletion_without_a_line_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p")])
    with monkeypatch.context() as patched:
        patched.setattr("conure.server.store.damage.commit_log.os.write", lambda *_: 0)
        await journal.append([DeleteRecord(programs=("p",))])
    image = crash_image(tmp_path / "data", tmp_path / "image")
    await journal.close()
    assert inspect(image).is_intact


async def test_deletion_that_an_earlier_version_logged_is_no_loss(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p")])
    await journal.append([DeleteRecord(programs=("p",))])
    image = crash_image(tmp_path / "data", tmp_path / "image")
    await journal.close()
    with sqlite3.connect(image / FILE) as connection:
        connection.execute("UPDATE head SET num_deletions = 0")
    connection.close()
    log = CommitLog(image)
    log.clear()
    log.add(CommitLine("program", 1, 0, ["p"], [], []))
    log.add(CommitLine("program", 0, 0, [], [], ["p"]))
    log.close()
    assert inspect(image).is_intact


class Crash(BaseException):
    """Ends a recovery between two of its steps."""


@pytest.mark.parametrize("step", ["mkdir", "rename", "touch", "write_bytes", "unlink"])
async def test_interrupted_recovery_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    journal = Journal.open(tmp_path / "data")
    large = b"x" * 20_000 + b"intact"  # separate pages, which later commits do not write again
    await journal.append([program("p_damaged"), value("p_damaged", "x", large)])
    await journal.append([program("p_main")])
    journal._writer.checkpoint()
    await journal.append([program("p_log"), value("p_log", "x", b"1")])
    image = crash_image(tmp_path / "data", tmp_path / "image")
    await journal.close()
    content = (image / FILE).read_bytes()
    (image / FILE).write_bytes(content.replace(b"intact", b"broken"))
    for num_done in range(100):
        folder = shutil.copytree(image, tmp_path / f"{num_done}")
        recovered = recover_until_crash(folder, monkeypatch, step, num_done)
        has_crashed = recovered is None
        if recovered is None:
            report = inspect(folder)
            assert not report.is_intact or report.num_programs == 3, num_done
            recovered = Journal.open(folder, recover=True)
        left = {each.id: each for each in await recovered.unfinished()}
        await recovered.close()
        assert set(left) == {"p_damaged", "p_main", "p_log"}, num_done
        assert [each.value for each in left["p_log"].values] == [b"1"]
        marked = [id_ for id_, each in left.items() if each.watch is not None]
        assert marked == ["p_damaged"], num_done
        if not has_crashed:
            return
    pytest.fail("the recovery does not end")


def recover_until_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, num_done: int
) -> Journal | None:
    """Recover a journal; return None if the recovery has crashed after `num_done` steps."""
    original = getattr(Path, step)
    calls = itertools.count()

    def interrupted(*args: object, **kwargs: object) -> object:
        if next(calls) == num_done:
            raise Crash
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, step, interrupted)
        try:
            return Journal.open(folder, recover=True)
        except Crash:
            return None


async def test_program_stays_marked_in_a_second_recovery(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p_before")])
    journal._writer.checkpoint()
    await journal.append([value("p_before", "x", b"1")])
    image = await crash_image_without_log(journal, tmp_path)
    await Journal.open(image, recover=True).close()
    (image / "commits.log").unlink()
    recovered = Journal.open(image, recover=True)
    (left,) = await recovered.unfinished()
    await recovered.close()
    assert left.watch is not None
    assert left.watch.problem == "program.damaged"


def test_rows_of_a_missing_table_are_not_tried() -> None:
    num_queries = 0

    class Counted(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            nonlocal num_queries
            num_queries += 1
            return super().execute(*args)

    connection = sqlite3.connect(":memory:", factory=Counted)
    assert list(readable_rows(connection, TABLES[0], RowIds())) == [(None, ())]
    connection.close()
    assert num_queries < 10


async def write_large_damaged(folder: Path) -> int:
    """Write a journal whose first value has an unreadable page; return the size of the file."""
    journal = Journal.open(folder)
    for number in range(60):
        id_ = f"p_{number:024x}"
        await journal.append([program(id_), value(id_, "x", b"x" * 100_000), end(id_)])
    await journal.close()
    content = bytearray((folder / FILE).read_bytes())
    start = content.index(b"x" * 4_000) // 4096 * 4096
    content[start : start + 4096] = b"\xff" * 4096
    (folder / FILE).write_bytes(content)
    return len(content)


async def test_the_check_of_a_damaged_journal_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = await write_large_damaged(tmp_path)
    monkeypatch.setattr("conure.server.store.damage.integrity.BLOCK_BYTES", 4096)
    tracemalloc.start()
    report = inspect(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.damaged == [f"p_{0:024x}"]
    assert report.num_programs == 60
    assert peak < size / 4


async def test_recovery_checks_all_records_of_a_large_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conure.server.store.damage.integrity.MAX_START_CHECK_BYTES", 0)
    await write_large_damaged(tmp_path)
    journal = Journal.open(tmp_path)
    assert journal.report.is_intact
    await journal.close()
    recovered = Journal.open(tmp_path, recover=True)
    assert recovered.report.damaged == [f"p_{0:024x}"]
    await recovered.close()


async def test_findings_are_reported_before_every_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_large_damaged(tmp_path)

    def killed(_: sqlite3.Connection) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("conure.server.store.damage.integrity.survey", killed)
    findings: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        inspect(tmp_path, on_finding=findings.append)
    assert findings == [f"the structure of {FILE} is damaged"]


@pytest.mark.parametrize("block_bytes", [1, 25, 26, 4096])
def test_traces_are_found_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("conure.server.store.damage.integrity.BLOCK_BYTES", block_bytes)
    ids = [f"p_{number:024x}" for number in range(9)]
    (tmp_path / FILE).write_text(f"{'..'.join(ids)}, {''.join(ids)}, {ids[0][:-1]}")
    assert find_traces(tmp_path, {ids[4]}) == ids[:4] + ids[5:]


async def test_damaged_record_is_an_error_and_not_a_value(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p"), value("p", "x", b"true"), end("p")])
    with sqlite3.connect(tmp_path / FILE) as other:
        other.execute("UPDATE value SET value = CAST('trux' AS BLOB)")
    for reading in (journal.load_program("a", "p"), journal.load_variable("a", "p", "x")):
        with pytest.raises(JournalError, match="value of x in program p does not match") as caught:
            await reading
        assert caught.value.code == "store.damaged"
    assert not journal.healthy
    assert "damaged" in (journal.problem or "")
    with pytest.raises(UnavailableError, match="damaged"):
        await journal.append([program("q")], fail_fast=True)
    await journal.close()
    with pytest.raises(JournalError, match="records do not match their checksums"):
        Journal.open(tmp_path)


async def test_journal_without_checksums_is_opened(tmp_path: Path) -> None:
    """A journal of schema version 2, as the version before checksums wrote it."""
    folder = tmp_path / "old"
    folder.mkdir()
    with sqlite3.connect(folder / FILE) as connection:
        for name in ("0001_programs.sql", "0002_usage.sql"):
            script = files("conure.server.store.migrations").joinpath(name).read_text("utf-8")
            connection.executescript(script)
        connection.execute("INSERT INTO program VALUES (1, 'old', 'a', NULL, x'00', 1.5, x'7b7d')")
        connection.execute("INSERT INTO value VALUES (1, 'x', 0, 1, NULL, NULL, NULL, x'31')")
        connection.execute("INSERT INTO event VALUES (1, 1, 't', 2.5, x'7b7d')")
        connection.execute("UPDATE head SET next_seq = 1000001, generation = 4")
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    journal = Journal.open(folder)
    assert journal.generation == 5
    assert journal.report.num_unchecked == 3
    (stored,) = await journal.unfinished()
    assert (stored.id, stored.values[0].value) == ("old", b"1")
    await journal.append([value("old", "y", b"2"), end("old")])
    await journal.close()
    report = inspect(folder)
    assert report.is_intact
    assert (report.num_records, report.num_unchecked) == (5, 3)


async def test_checkpoint_empties_both_logs(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p")])
    assert (tmp_path / "commits.log").stat().st_size > 0
    journal._writer.checkpoint()
    assert (tmp_path / "commits.log").stat().st_size == 0
    assert (tmp_path / f"{FILE}-wal").stat().st_size == 0
    await journal.close()


async def test_large_log_is_checkpointed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conure.server.store.writer.MAX_LOG_BYTES", 100_000)
    journal = Journal.open(tmp_path)
    await journal.append([program("p")])
    for number in range(50):
        await journal.append([value("p", f"v{number}", random.Random(number).randbytes(10_000))])
    await journal.append(())
    assert (tmp_path / f"{FILE}-wal").stat().st_size < 200_000
    await journal.close()


async def test_removed_folder_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    journal = Journal.open(folder)
    await journal.append([program("p")])
    shutil.rmtree(folder)
    with pytest.raises(UnavailableError, match="removed or replaced"):
        await journal.append([program("q")], fail_fast=True)
    assert not journal.healthy
    second = Journal.open(folder)
    await second.append([program("other")])
    with pytest.raises(UnavailableError, match="removed or replaced"):
        await journal.append([program("q")], fail_fast=True)
    await second.close()
    await journal.close()


async def test_waiting_write_makes_the_journal_unhealthy(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    writer = journal._writer
    assert journal.healthy
    writer.busy_since = -60.0  # as while an fsync hangs for a minute
    assert not journal.healthy
    assert "has been waiting for" in (journal.problem or "")
    with pytest.raises(UnavailableError, match="has been waiting for"):
        await journal.append([program("p")], fail_fast=True)
    writer.busy_since = None
    await journal.append([program("p")], fail_fast=True)
    await journal.close()


async def test_late_batch_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conure.server.store.writer.MAX_WAIT_S", -1.0)
    journal = Journal.open(tmp_path)
    with pytest.raises(UnavailableError):
        await journal.append([program("p")], fail_fast=True)
    await journal.append([program("q")])
    assert [stored.id for stored in await journal.unfinished()] == ["q"]
    await journal.close()


async def test_start_on_full_disk_uses_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p")])
    await journal.close()
    reserve = tmp_path / RESERVE_NAME
    assert reserve.stat().st_size == 1024 * 1024
    freed = []
    statvfs = os.statvfs(tmp_path)
    full = os.statvfs_result([*statvfs[:3], 0, 0, *statvfs[5:]])

    def report_full(path: Path) -> os.statvfs_result:
        freed.append(path)
        return full

    monkeypatch.setattr("conure.server.store.database.os.statvfs", report_full)
    monkeypatch.setattr("conure.server.store.journal.fill_reserve", lambda _: None)
    monkeypatch.setattr("conure.server.store.writer.fill_reserve", lambda _: None)
    again = Journal.open(tmp_path)
    assert freed == [tmp_path]
    assert not reserve.exists()
    assert [stored.id for stored in await again.unfinished()] == ["p"]
    await again.close()


async def test_file_of_another_program_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    with pytest.raises(JournalError, match="database of another program"):
        Journal.open(tmp_path)


async def test_journal_without_a_schema_version_is_refused_unchanged(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p"), end("p")])
    await journal.close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("PRAGMA user_version = 0")
    connection.close()
    content = (tmp_path / FILE).read_bytes()
    with pytest.raises(JournalError, match="has tables and no schema version") as caught:
        Journal.open(tmp_path, recover=True)
    assert caught.value.code == "store.unusable"
    assert (tmp_path / FILE).read_bytes() == content


def test_link_to_a_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to(tmp_path / "missing")
    with pytest.raises(JournalError, match="is a link to a file that is missing"):
        Journal.open(tmp_path)


async def test_program_of_an_unfinished_turn_is_known_after_a_crash(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    journal.turn_mark.set("p_1")
    image = crash_image(tmp_path / "data", tmp_path / "image")
    shutil.copy(tmp_path / "data" / "turn", image / "turn")
    await journal.close()
    after_crash = Journal.open(image)
    assert after_crash.program_at_death == "p_1"
    await after_crash.close()
    after_stop = Journal.open(image)
    assert after_stop.program_at_death is None
    await after_stop.close()


@pytest.mark.parametrize("is_secure", [False, True])
async def test_deleted_program_is_gone(tmp_path: Path, is_secure: bool) -> None:
    journal = Journal.open(tmp_path / "data")
    secret = b"hunter2 " * 2_000
    await journal.append([program("p", key="k"), value("p", "x", secret), end("p")])
    await journal.append([program("q"), value("q", "x", b"1"), end("q")])
    await journal.append([DeleteRecord(programs=("p", "unknown"), is_secure=is_secure)])
    assert await journal.load_program("a", "p") is None
    assert await journal.find_idempotent("a", "k") is None
    assert await journal.load_program("a", "q") is not None
    image = crash_image(tmp_path / "data", tmp_path / "image")
    content = b"".join(path.read_bytes() for path in image.iterdir())
    assert (b"hunter2" in content) == (not is_secure)
    (image / f"{FILE}-wal").unlink(missing_ok=True)
    await journal.close()
    assert (await _sums(tmp_path / "data")) == 2


async def test_commit_with_a_procedure_is_found_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p"), *(event(journal, "p") for _ in range(3))])
    await journal.append([DeleteRecord(programs=("p",))])
    stored = ProcedureRecord(tenant="a", name="n", version="v", created_at=1.0, program=b"{}")
    await journal.append([program("q")])
    await journal.append([event(journal, "q"), stored])
    image = crash_image(tmp_path / "data", tmp_path / "image")
    await journal.close()
    after_crash = Journal.open(image)
    assert (await after_crash.list_procedures("a", None)).versions == [("n", "v", 1.0)]
    await after_crash.close()


async def _sums(folder: Path) -> float:
    journal = Journal.open(folder)
    sums = await journal.usage("a")
    await journal.close()
    return sum(each.amount for each in sums if each.name == "programs")
