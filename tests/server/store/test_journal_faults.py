"""The journal with a failing disk, and after the process is killed."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import selectors
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.store.journal import Journal, JournalError
from conure.server.store.writer import WriteBatch

from .journal_records import FILE, event, program


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal.open(tmp_path / "data")
    yield journal
    await journal.close()


# --- a failing disk ---------------------------------------------------------------------


@contextmanager
def failing_disk(kind: str, folder: Path) -> Iterator[None]:
    """Make every write fail inside the block."""
    if kind == "busy":
        other = sqlite3.connect(folder / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")
            other.close()
    else:
        # No file of this process may grow beyond the log's size, as on a full disk.
        size = (folder / (FILE + "-wal")).stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["busy", "full"])
async def test_failing_disk_fails_fast_or_delays(
    journal: Journal, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    await journal.append([program("p")])
    resolved: list[int] = []
    with failing_disk(kind, tmp_path / "data"):
        first = [journal.append([event(journal, "p")]) for _ in range(3)]
        with pytest.raises(UnavailableError) as caught:
            await journal.append([program("waits in the queue")], fail_fast=True)
        assert (caught.value.code, caught.value.status) == ("store.unavailable", 503)
        assert caught.value.retry_after_s is not None
        assert not journal.healthy
        at_once = journal.append([program("comes later")], fail_fast=True)
        assert isinstance(at_once.exception(), UnavailableError)
        second = [journal.append([event(journal, "p")]) for _ in range(3)]
        barrier = journal.append(())
        for i, future in enumerate([*first, *second, barrier]):
            assert not future.done()
            future.add_done_callback(lambda _, i=i: resolved.append(i))  # type: ignore[misc]
    await asyncio.wait_for(barrier, 60)
    assert resolved == list(range(7))
    assert len(await journal.events("a", "p")) == 6
    assert journal.healthy
    await journal.append([program("accepted again")], fail_fast=True)
    assert {p.id for p in await journal.unfinished()} == {"p", "accepted again"}
    messages = [record.getMessage() for record in caplog.records if "conure" in record.name]
    assert [message.split()[3] for message in messages] == ["failing:", "recovered"]


async def test_fail_fast_batch_fails_after_a_retry(journal: Journal, tmp_path: Path) -> None:
    await journal.append([program("p")])
    with failing_disk("busy", tmp_path / "data"):
        first = journal.append([event(journal, "p")])
        # Wait until the writer has the batch and waits for the lock; later batches queue after it.
        while not journal._writer._queue.empty():  # noqa: ASYNC110 - a thread has no event for it
            await asyncio.sleep(0)
        assert journal.healthy
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(journal.append([program("q")], fail_fast=True), 60)
        assert not first.done()
    await asyncio.wait_for(first, 60)


async def test_batches_of_a_failing_disk_are_answered_when_the_journal_breaks(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.append([program("p")])
    writer, attempts = journal._writer, 0
    loop = asyncio.get_running_loop()
    first_attempts, during = [asyncio.Event(), asyncio.Event()], [threading.Event() for _ in "ab"]

    def try_commit(group: list[WriteBatch]) -> Exception:
        nonlocal attempts
        attempts += 1
        if attempts > 2:
            raise sqlite3.DatabaseError("database disk image is malformed")
        loop.call_soon_threadsafe(first_attempts[attempts - 1].set)
        during[attempts - 1].wait(60)
        return sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(writer, "_try_commit", try_commit)
    futures = [journal.append([event(journal, "p")])]
    for arrived, leave in zip(first_attempts, during, strict=True):
        await asyncio.wait_for(arrived.wait(), 60)
        futures.append(journal.append([event(journal, "p")]))
        leave.set()
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 60)
    assert [result.code for result in results] == ["store.broken"] * 3  # type: ignore[union-attr]  # errors
    assert journal.status().num_pending == 0


async def test_health_recovers_without_writes(journal: Journal, tmp_path: Path) -> None:
    with failing_disk("busy", tmp_path / "data"):
        with pytest.raises(UnavailableError):
            await journal.append([program("p")], fail_fast=True)
        assert journal.status().last_error == "database is locked"
    deadline = time.monotonic() + 60
    while not journal.healthy and time.monotonic() < deadline:  # noqa: ASYNC110 - no event for it
        await asyncio.sleep(0.01)
    await journal.append([program("p")], fail_fast=True)


async def test_close_on_failing_disk_fails_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conure.server.store.journal.CLOSE_TIMEOUT_S", 0.5)
    journal = Journal.open(tmp_path)
    await journal.append([program("p")])
    with failing_disk("busy", tmp_path):
        future = journal.append([event(journal, "p")])
        await journal.close()
    assert isinstance(future.exception(), UnavailableError)
    await Journal.open(tmp_path).close()


async def test_damaged_file_fails_all_without_hanging(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(*_: object) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(journal._writer, "_write", corrupt)
    futures = [journal.append([program(f"p{i}")]) for i in range(3)]
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert {getattr(outcome, "code", None) for outcome in outcomes} == {"store.broken"}
    assert not journal.healthy
    with pytest.raises(JournalError, match="malformed"):
        await journal.append([program("later")])


# --- kill -9 ----------------------------------------------------------------------------

CHILD = """
import asyncio, sys
from pathlib import Path
from conure.server.store.journal import *

async def produce(journal, name):
    p = f"{journal.generation}-{name}"
    await journal.append([ProgramRecord(id=p, tenant="a", idempotency_key=None, body_hash=b"",
                                        body=b"{}", created_at=0.0)], fail_fast=True)
    print("program", p, flush=True)
    for i in range(1_000_000):
        seq = journal.next_seq()
        await journal.append([
            EventRecord(program=p, seq=seq, type="t", data=b"", at=0.0),
            ValueRecord(program=p, variable=f"v{i}", value=b"%d" % seq, text=None, token_ids=[i],
                        tokenizer_hash=None, epoch=0, attempt=0)])
        print("value", p, f"v{i}", seq, flush=True)

async def main():
    journal = Journal.open(Path(sys.argv[1]))
    await asyncio.gather(*(produce(journal, n) for n in range(int(sys.argv[2]))))

asyncio.run(main())
"""


def run_and_kill(folder: Path, random_: random.Random, num_lines: int) -> list[list[str]]:
    """Let a child write until it has acknowledged `num_lines` lines, kill it, and return all of
    them.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(random_.choice([1, 4, 16]))],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        kill_at: float | None = None
        while kill_at is None or time.monotonic() < kill_at:
            timeout = 60.0 if kill_at is None else max(0.0, kill_at - time.monotonic())
            if selector.select(timeout):
                chunk = os.read(child.stdout.fileno(), 65_536)
                assert chunk, "the child ended by itself"
                output += chunk
            if kill_at is None and output.count(b"\n") >= num_lines:
                kill_at = time.monotonic() + random_.random() * 0.02
    os.killpg(child.pid, signal.SIGKILL)
    output += child.stdout.read()
    child.stdout.close()
    child.wait()
    lines = output.decode().split("\n")
    return [line.split() for line in lines[:-1]]  # The last line may be incomplete.


async def test_kill_9_loses_no_acknowledged_batch(tmp_path: Path) -> None:
    random_ = random.Random(20_261)
    programs: set[str] = set()
    values: dict[tuple[str, str], int] = {}
    for _ in range(10):
        acknowledged = run_and_kill(tmp_path, random_, random_.randrange(1, 300))
        programs |= {line[1] for line in acknowledged if line[0] == "program"}
        fresh = {(line[1], line[2]): int(line[3]) for line in acknowledged if line[0] == "value"}
        assert not fresh.keys() & values.keys()
        assert not set(fresh.values()) & set(values.values()), (
            "a sequence number was assigned twice"
        )
        values |= fresh
    journal = Journal.open(tmp_path)
    assert journal.generation == 11
    assert journal.last_seq > max(values.values())
    stored = {p.id: p for p in await journal.unfinished()}
    assert programs <= stored.keys()
    found = {(p.id, v.variable): int(v.value) for p in stored.values() for v in p.values}
    assert values.items() <= found.items()
    # An unacknowledged batch may be there, but only as a whole: a value with its event.
    for id_, kept in stored.items():
        assert {int(v.value) for v in kept.values} == {e.seq for e in kept.events}, id_
    check = journal._connection.execute("PRAGMA integrity_check").fetchone()
    assert check == ("ok",)
    await journal.close()
