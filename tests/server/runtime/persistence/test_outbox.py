"""Tests of the outbox: what is published, in which order, and when."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.program.status import Event
from conure.server.runtime.clock import SteadyClock
from conure.server.runtime.persistence import outbox
from conure.server.runtime.persistence.event_stream import EventStream
from conure.server.runtime.persistence.outbox import Outbox
from conure.server.runtime.quota import ProgramQuota, QuotaLimits
from conure.server.runtime.turns import Turns
from conure.server.store.journal import (
    EventRecord,
    Journal,
    JournalError,
    ProgramRecord,
    Record,
    ValueRecord,
)


class SlowJournal:
    """A journal whose writes the test completes."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.accepts: list[bool] = []
        self.broken: JournalError | None = None
        self._seq = 0

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def append(self, records: list[Record], *, fail_fast: bool = False) -> asyncio.Future[None]:
        self.batches.append(list(records))
        self.accepts.append(fail_fast)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.broken is None:
            self.waiting.append(done)
        else:
            done.set_exception(self.broken)
        return done

    async def write(self, error: Exception | None = None) -> None:
        """Complete the write of the oldest batch, or reject it."""
        done = self.waiting.pop(0)
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        await turn()

    @property
    def kinds(self) -> list[list[str]]:
        """Return the event types and variable names of each batch."""
        return [[_kind(record) for record in batch] for batch in self.batches]


def _kind(record: Record) -> str:
    if isinstance(record, EventRecord):
        return record.type
    return record.variable if isinstance(record, ValueRecord) else type(record).__name__


async def turn() -> None:
    """Run all callbacks that are due."""
    for _ in range(5):
        await asyncio.sleep(0)


class Stage:
    """An outbox over a slow journal, and one reader."""

    def __init__(self) -> None:
        self.journal = SlowJournal()
        self.feed = EventStream("p")
        self.ends = 0
        journal, quota = cast(Journal, self.journal), ProgramQuota(QuotaLimits())
        self.outbox = Outbox("p", journal, self.feed, quota, SteadyClock(), self._ended)
        self.seen: list[Event] = []
        self.reader = asyncio.create_task(self._read())

    def _ended(self) -> None:
        self.ends += 1

    async def _read(self) -> None:
        async for event in self.feed.read(0):
            self.seen += [event]

    def commit(self, variable: str) -> None:
        self.outbox.add(
            ValueRecord(
                program="p",
                variable=variable,
                value=b"1",
                text=None,
                token_ids=None,
                tokenizer_hash=None,
                epoch=0,
                attempt=1,
            )
        )
        self.outbox.emit("variable.committed", variable=variable, value=1)
        self.outbox.mark_durable_on_commit([variable])


@pytest.fixture
async def stage() -> Any:
    stage = Stage()
    yield stage
    stage.reader.cancel()
    await asyncio.gather(stage.reader, return_exceptions=True)


async def test_records_of_one_turn_form_one_batch(stage: Stage) -> None:
    stage.commit("x")
    stage.outbox.emit("node.finished", node="n")
    stage.commit("y")
    assert stage.journal.batches == []
    await turn()
    stage.commit("z")
    await turn()
    assert stage.journal.kinds == [
        ["x", "variable.committed", "node.finished", "y", "variable.committed"],
        ["z", "variable.committed"],
    ]


async def test_readers_and_waiters_wake_when_durable(stage: Stage) -> None:
    waiting = {v: asyncio.create_task(stage.outbox.wait_for(v, 60)) for v in "xyz"}
    stage.commit("x")
    await turn()
    stage.commit("y")
    await turn()
    assert stage.outbox.has_waiters
    assert (stage.seen, stage.outbox.durable_variables) == ([], set())
    assert not any(task.done() for task in waiting.values())
    await stage.journal.write()
    assert [event.data["variable"] for event in stage.seen] == ["x"]
    assert [v for v, task in waiting.items() if task.done()] == ["x"]
    await stage.journal.write()
    assert stage.outbox.durable_variables == {"x", "y"}
    assert await waiting["y"]
    assert not waiting["z"].done()
    stage.outbox.end()
    await stage.journal.write()
    assert await waiting["z"], "the end of the program wakes everybody"
    assert not stage.outbox.has_waiters


async def test_timed_out_or_cancelled_waiter_is_removed(stage: Stage) -> None:
    assert not await stage.outbox.wait_for("x", 0.001)
    leaving = asyncio.create_task(stage.outbox.wait_for("x", 60))
    await turn()
    leaving.cancel()
    await turn()
    assert not stage.outbox.has_waiters
    stage.commit("x")
    await turn()
    await stage.journal.write()
    assert await stage.outbox.wait_for("x", 0), "who comes late need not wait"


async def test_barrier_writes_the_current_batch_first(stage: Stage) -> None:
    stage.commit("x")
    done = asyncio.create_task(stage.outbox.barrier())
    await turn()
    assert stage.journal.kinds == [["x", "variable.committed"]]
    assert not done.done()
    await stage.journal.write()
    await done
    assert len(stage.journal.batches) == 1, "nothing is written twice"


async def test_barrier_raises_why_a_batch_was_rejected(stage: Stage) -> None:
    await stage.outbox.barrier()  # nothing to wait for
    stage.commit("x")
    done = asyncio.create_task(stage.outbox.barrier())
    await turn()
    await stage.journal.write(JournalError("store.invariant", "a second value"))
    with pytest.raises(JournalError, match="a second value"):
        await done
    stage.commit("y")
    later = asyncio.create_task(stage.outbox.barrier())
    await turn()
    await stage.journal.write()
    with pytest.raises(JournalError, match="a second value"):
        await later


async def test_barrier_raises_for_a_journal_that_writes_no_more(stage: Stage) -> None:
    stage.commit("x")
    done = asyncio.create_task(stage.outbox.barrier())
    stage.journal.broken = JournalError("store.broken", "the journal is broken")
    with pytest.raises(JournalError, match="broken"):
        await done


async def test_end_event_is_last_and_unique(stage: Stage) -> None:
    ended = asyncio.create_task(stage.outbox.wait_ended())
    stage.commit("x")
    stage.outbox.emit("program.finished", status="done")
    stage.outbox.end()
    assert len(stage.journal.batches) == 1, "it does not wait for the end of the turn"
    await turn()
    assert (stage.outbox.has_ended, ended.done(), stage.ends) == (False, False, 0)
    await stage.journal.write()
    assert (stage.outbox.has_ended, ended.done(), stage.ends) == (True, True, 1)
    assert stage.reader.done(), "readers end after the last event"
    assert [event.type for event in stage.seen] == ["variable.committed", "program.finished"]
    assert await stage.outbox.wait_for("never", 60)


RECORD = ProgramRecord(
    id="p", tenant="t", idempotency_key=None, body_hash=b"", body=b"{}", created_at=0.0
)


async def test_program_record_precedes_its_first_events(stage: Stage) -> None:
    stage.outbox.emit("program.accepted", outputs=[])
    stage.outbox.mark_durable_on_commit(["given"])
    accepted = stage.outbox.accept(RECORD)
    await turn()
    assert stage.journal.kinds == [["ProgramRecord", "program.accepted"]]
    assert stage.journal.accepts == [True]
    assert stage.seen == []
    await stage.journal.write()
    assert accepted.done()
    assert [event.type for event in stage.seen] == ["program.accepted"]
    assert stage.outbox.durable_variables == {"given"}


async def test_rejected_program_leaves_no_trace(stage: Stage) -> None:
    stage.outbox.emit("program.accepted", outputs=[])
    stage.outbox.mark_durable_on_commit(["given"])
    accepted = stage.outbox.accept(RECORD)
    await stage.journal.write(UnavailableError("store.unavailable", "full"))
    with pytest.raises(UnavailableError):
        await accepted
    stage.outbox.abandon()
    await turn()
    assert (stage.seen, stage.outbox.durable_variables) == ([], set())
    assert len(stage.journal.batches) == 1


async def test_records_wait_for_their_program(stage: Stage) -> None:
    stage.outbox.emit("program.accepted", outputs=[])
    stage.outbox.accept(RECORD)
    stage.commit("x")
    barrier = asyncio.create_task(stage.outbox.barrier())
    stage.outbox.end()
    await turn()
    assert stage.journal.kinds == [["ProgramRecord", "program.accepted"]]
    await stage.journal.write()
    await turn()
    assert stage.journal.kinds[1:] == [["x", "variable.committed"]]
    assert (stage.outbox.durable_variables, barrier.done()) == (set(), False)
    await stage.journal.write()
    assert (stage.outbox.durable_variables, stage.outbox.has_ended) == ({"x"}, True)
    await barrier


async def test_rejected_program_publishes_nothing(stage: Stage) -> None:
    stage.outbox.accept(RECORD)
    stage.commit("x")
    barrier = asyncio.create_task(stage.outbox.barrier())
    await turn()
    await stage.journal.write(UnavailableError("store.unavailable", "full"))
    with pytest.raises(UnavailableError, match="full"):
        await barrier
    stage.commit("y")
    await turn()
    assert (stage.seen, stage.outbox.durable_variables) == ([], set())
    assert len(stage.journal.batches) == 1


async def test_program_written_during_shutdown_is_left_unchanged(
    stage: Stage,
) -> None:
    stage.outbox.accept(RECORD)
    stage.commit("x")
    await turn()
    stage.outbox.abandon()
    await stage.journal.write()
    await turn()
    assert stage.journal.kinds == [["ProgramRecord"]], "the journal may be closed by now"


async def test_rejected_batch_fails_waiters_and_publishes_nothing(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(stage.outbox.wait_for("x", 60))
    other = asyncio.create_task(stage.outbox.wait_for("y", 60))
    ending = asyncio.create_task(stage.outbox.wait_ended())
    stage.commit("x")
    await turn()
    await stage.journal.write(JournalError("store.invariant", "no"))
    assert (stage.seen, stage.outbox.durable_variables) == ([], set())
    assert "was not written" in caplog.text
    for late in (waiting, stage.outbox.wait_for("x", 60)):
        with pytest.raises(JournalError, match="no"):
            await late
    assert not other.done()
    stage.outbox.emit("program.finished")
    stage.outbox.end()
    await stage.journal.write(JournalError("store.invariant", "no end"))
    with pytest.raises(JournalError, match="no end"):
        await ending
    for late in (other, stage.outbox.wait_for("z", 60)):
        with pytest.raises(JournalError, match="no end"):
            await late
    assert (stage.outbox.has_ended, stage.ends) == (False, 0)


async def test_shutdown_fails_waiters(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.outbox.wait_for("x", 60))
    ending = asyncio.create_task(stage.outbox.wait_ended())
    stage.commit("x")
    await turn()
    stage.outbox.abandon()
    stage.outbox.abandon()
    for task in (waiting, ending, asyncio.create_task(stage.outbox.wait_for("y", 60))):
        with pytest.raises(UnavailableError, match="stop"):
            await task
    assert not stage.outbox.has_ended
    await stage.journal.write()
    assert stage.ends == 0


class WorkLog:
    """The work that was given to a turn."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.turns = Turns()
        setattr(self.turns, "call_later", lambda work: work())  # noqa: B010 - mypy forbids the plain one

    def wait(self, stage: Stage, name: str) -> None:
        stage.outbox.wait_turn(self.turns, lambda: self.waiting.append(name))


async def test_work_waits_until_most_records_are_durable(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING_BYTES", 500)
    log = WorkLog()
    log.wait(stage, "now")
    assert log.waiting == ["now"]
    for variable in "xyz":
        stage.outbox.emit("node.finished", node=variable, text="a" * 200)
        await turn()
    log.wait(stage, "later")
    await stage.journal.write(JournalError("store.invariant", "rejected"))
    assert log.waiting == ["now"], "600 bytes are not durable"
    await stage.journal.write()
    assert log.waiting == ["now", "later"]


async def test_abandoned_program_continues_no_work(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING_BYTES", 0)
    log = WorkLog()
    stage.commit("x")
    await turn()
    log.wait(stage, "later")
    stage.outbox.abandon()
    await stage.journal.write()
    assert log.waiting == []
