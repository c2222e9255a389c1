"""What leaves a program, in which order, and when."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.program.status import Event
from conure.server.runs.feed import Feed
from conure.server.runs.outbox import Outbox
from conure.server.store.journal import (
    EventRecord,
    Journal,
    JournalError,
    ProgramRecord,
    Record,
    ValueRecord,
)


class SlowJournal:
    """A journal whose disk is a test."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.accepts: list[bool] = []
        self._seq = 0

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def append(self, records: list[Record], *, accept: bool = False) -> asyncio.Future[None]:
        self.batches.append(list(records))
        self.accepts.append(accept)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(done)
        return done

    def barrier(self) -> asyncio.Future[None]:
        return self.append([])

    async def write(self, error: Exception | None = None) -> None:
        """The oldest batch reaches the disk, or is refused."""
        done = self.waiting.pop(0)
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        await turn()

    @property
    def kinds(self) -> list[list[str]]:
        """What each batch consists of: types of events, names of variables."""
        return [[_kind(record) for record in batch] for batch in self.batches]


def _kind(record: Record) -> str:
    if isinstance(record, EventRecord):
        return record.type
    return record.variable if isinstance(record, ValueRecord) else type(record).__name__


async def turn() -> None:
    """Let everything happen that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


class Stage:
    """An outbox over a slow journal, and one reader."""

    def __init__(self) -> None:
        self.journal = SlowJournal()
        self.feed = Feed("p")
        self.ends = 0
        self.outbox = Outbox("p", cast(Journal, self.journal), self.feed, self._ended)
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
        self.outbox.settle([variable])


@pytest.fixture
async def stage() -> Any:
    stage = Stage()
    yield stage
    stage.reader.cancel()
    await asyncio.gather(stage.reader, return_exceptions=True)


async def test_what_happens_in_one_turn_goes_to_the_disk_together(stage: Stage) -> None:
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


async def test_readers_and_waiters_hear_of_a_batch_when_it_is_on_disk(stage: Stage) -> None:
    waiting = {v: asyncio.create_task(stage.outbox.wait_for(v, 10)) for v in "xyz"}
    stage.commit("x")
    await turn()
    stage.commit("y")
    await turn()
    assert stage.outbox.has_waiters
    assert (stage.seen, stage.outbox.settled) == ([], set())
    assert not any(task.done() for task in waiting.values())
    await stage.journal.write()
    assert [event.data["variable"] for event in stage.seen] == ["x"]
    assert [v for v, task in waiting.items() if task.done()] == ["x"]
    await stage.journal.write()
    assert stage.outbox.settled == {"x", "y"}
    assert await waiting["y"]
    assert not waiting["z"].done()
    stage.outbox.end()
    await stage.journal.write()
    assert await waiting["z"], "the end of the program wakes everybody"
    assert not stage.outbox.has_waiters


async def test_a_waiter_that_gives_up_or_leaves_is_forgotten(stage: Stage) -> None:
    assert not await stage.outbox.wait_for("x", 0.001)
    leaving = asyncio.create_task(stage.outbox.wait_for("x", 10))
    await turn()
    leaving.cancel()
    await turn()
    assert not stage.outbox.has_waiters
    stage.commit("x")
    await turn()
    await stage.journal.write()
    assert await stage.outbox.wait_for("x", 0), "who comes late need not wait"


async def test_a_barrier_hands_over_what_there_is_first(stage: Stage) -> None:
    stage.commit("x")
    done = asyncio.create_task(stage.outbox.barrier())
    await turn()
    assert stage.journal.kinds == [["x", "variable.committed"], []]
    assert len(stage.journal.batches) == 2, "nothing is written twice"
    await stage.journal.write()
    assert not done.done()
    await stage.journal.write()
    await done


async def test_the_end_comes_last_and_once(stage: Stage) -> None:
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
    assert await stage.outbox.wait_for("never", 10)


RECORD = ProgramRecord(
    id="p", tenant="t", idempotency_key=None, body_hash=b"", body=b"{}", created_at=0.0
)


async def test_a_program_is_accepted_with_its_first_events_behind_it(stage: Stage) -> None:
    stage.outbox.emit("program.accepted", outputs=[])
    stage.outbox.settle(["given"])
    accepted = stage.outbox.accept(RECORD)
    await turn()
    assert stage.journal.kinds == [["ProgramRecord", "program.accepted"]]
    assert stage.journal.accepts == [True]
    assert stage.seen == []
    await stage.journal.write()
    assert accepted.done()
    assert [event.type for event in stage.seen] == ["program.accepted"]
    assert stage.outbox.settled == {"given"}


async def test_a_program_that_the_disk_refuses_leaves_no_trace(stage: Stage) -> None:
    stage.outbox.emit("program.accepted", outputs=[])
    stage.outbox.settle(["given"])
    accepted = stage.outbox.accept(RECORD)
    await stage.journal.write(UnavailableError("store.unavailable", "full"))
    with pytest.raises(UnavailableError):
        await accepted
    stage.outbox.abandon()
    await turn()
    assert (stage.seen, stage.outbox.settled) == ([], set())
    assert len(stage.journal.batches) == 1


async def test_what_happens_while_the_disk_takes_a_program_waits_for_it(stage: Stage) -> None:
    stage.outbox.emit("program.accepted", outputs=[])
    stage.outbox.accept(RECORD)
    stage.commit("x")
    barrier = asyncio.create_task(stage.outbox.barrier())
    stage.outbox.end()
    await turn()
    assert stage.journal.kinds == [["ProgramRecord", "program.accepted"]]
    await stage.journal.write()
    await turn()
    assert stage.journal.kinds[1:] == [["x", "variable.committed"], []]
    assert (stage.outbox.settled, barrier.done()) == (set(), False)
    await stage.journal.write()
    assert (stage.outbox.settled, stage.outbox.has_ended) == ({"x"}, True)
    await stage.journal.write()
    await barrier


async def test_what_happens_to_a_program_that_the_disk_refuses_is_never_told(stage: Stage) -> None:
    stage.outbox.accept(RECORD)
    stage.commit("x")
    barrier = asyncio.create_task(stage.outbox.barrier())
    await turn()
    await stage.journal.write(UnavailableError("store.unavailable", "full"))
    with pytest.raises(UnavailableError, match="full"):
        await barrier
    stage.commit("y")
    await turn()
    assert (stage.seen, stage.outbox.settled) == ([], set())
    assert len(stage.journal.batches) == 1


async def test_a_program_that_the_disk_takes_while_the_server_goes_away_is_left_as_it_is(
    stage: Stage,
) -> None:
    stage.outbox.accept(RECORD)
    stage.commit("x")
    await turn()
    stage.outbox.abandon()
    await stage.journal.write()
    await turn()
    assert stage.journal.kinds == [["ProgramRecord"]], "the journal may be closed by now"


async def test_a_batch_that_is_refused_tells_no_reader_and_fails_whoever_waits_for_it(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(stage.outbox.wait_for("x", 10))
    other = asyncio.create_task(stage.outbox.wait_for("y", 10))
    ending = asyncio.create_task(stage.outbox.wait_ended())
    stage.commit("x")
    await turn()
    await stage.journal.write(JournalError("store.invariant", "no"))
    assert (stage.seen, stage.outbox.settled) == ([], set())
    assert "was not written" in caplog.text
    for late in (waiting, stage.outbox.wait_for("x", 10)):
        with pytest.raises(JournalError, match="no"):
            await late
    assert not other.done()
    stage.outbox.emit("program.finished")
    stage.outbox.end()
    await stage.journal.write(JournalError("store.invariant", "no end"))
    with pytest.raises(JournalError, match="no end"):
        await ending
    for late in (other, stage.outbox.wait_for("z", 10)):
        with pytest.raises(JournalError, match="no end"):
            await late
    assert (stage.outbox.has_ended, stage.ends) == (False, 0)


async def test_a_server_that_goes_away_tells_whoever_waits(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.outbox.wait_for("x", 10))
    ending = asyncio.create_task(stage.outbox.wait_ended())
    stage.commit("x")
    await turn()
    stage.outbox.abandon()
    stage.outbox.abandon()
    for task in (waiting, ending, asyncio.create_task(stage.outbox.wait_for("y", 10))):
        with pytest.raises(UnavailableError, match="stop"):
            await task
    assert not stage.outbox.has_ended
    await stage.journal.write()
    assert stage.ends == 0
