"""The waiting queue: who runs next, and where."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.engines.scheduler import (
    HEAD_START_S,
    LOOK_AHEAD,
    PRIORITY_S,
    THROUGHPUT_S,
    Load,
    Placement,
    Scheduler,
    Ticket,
    place,
    rank,
)


async def turn() -> None:
    """Let the loop take what `call_soon` queued."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class Desk:
    """Remembers which calls were started, in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.started: list[tuple[str, str]] = []

    def ticket(self, name: str, *, rank: float = 0.0, need: int = 10) -> Ticket:
        def start(placement: Placement) -> None:
            self.started.append((name, placement.engine))

        ticket = Ticket(name.split(".")[0], rank, need, start)
        self.scheduler.submit(ticket)
        return ticket

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.started]


@pytest.fixture
def desk() -> Desk:
    return Desk(Scheduler())


async def test_a_call_waits_until_an_engine_is_there(desk: Desk) -> None:
    desk.ticket("a")
    await turn()
    assert desk.names == []
    assert desk.scheduler.num_waiting == 1
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    await turn()
    assert desk.names == ["a"]
    assert desk.scheduler.num_waiting == 0


async def test_better_rank_runs_first_and_equal_ranks_in_order_of_arrival(desk: Desk) -> None:
    for name, place_in_line in [("a", 2.0), ("b", 1.0), ("c", 1.0)]:
        desk.ticket(name, rank=place_in_line)
    desk.scheduler.engine_arrived("e", capacity=1_000, max_sequences=4)
    await turn()
    assert desk.names == ["b", "c", "a"]


async def test_nobody_overtakes_a_call_that_waits_for_room(desk: Desk) -> None:
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    running = desk.ticket("a", need=60)
    desk.ticket("big", rank=1.0, need=80)
    desk.ticket("small", rank=2.0, need=10)
    await turn()
    assert desk.names == ["a"]
    desk.scheduler.withdraw(running)
    await turn()
    assert desk.names == ["a", "big", "small"]


async def test_an_empty_engine_takes_a_call_of_any_size(desk: Desk) -> None:
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    desk.ticket("huge", need=1_000)
    await turn()
    assert desk.names == ["huge"]


async def test_an_engine_holds_no_more_calls_than_it_runs_and_looks_ahead(desk: Desk) -> None:
    desk.scheduler.engine_arrived("e", capacity=10**9, max_sequences=2)
    for i in range(20):
        desk.ticket(f"p.{i}")
    await turn()
    assert len(desk.names) == 2 + LOOK_AHEAD


async def test_a_program_stays_on_the_engine_that_works_for_it(desk: Desk) -> None:
    desk.scheduler.engine_arrived("small", capacity=1_000, max_sequences=4)
    desk.ticket("p.1", need=500)
    await turn()
    desk.scheduler.engine_arrived("large", capacity=100_000, max_sequences=4)
    desk.ticket("p.2", need=10)
    desk.ticket("q.1", need=10)
    await turn()
    assert desk.started == [("p.1", "small"), ("p.2", "small"), ("q.1", "large")]


async def test_a_withdrawn_call_never_starts_and_frees_its_room_once(desk: Desk) -> None:
    waiting = desk.ticket("a")
    desk.scheduler.withdraw(waiting)
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    running = desk.ticket("b", need=100)
    await turn()
    desk.scheduler.withdraw(running)
    desk.scheduler.withdraw(running)
    desk.ticket("c", need=100)
    desk.ticket("d", need=100)
    await turn()
    assert desk.names == ["b", "c"]


async def test_a_lost_engines_calls_do_not_count_against_its_next_life(desk: Desk) -> None:
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    old = desk.ticket("a", need=100)
    await turn()
    desk.scheduler.engine_lost("e")
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    desk.scheduler.withdraw(old)
    desk.ticket("b", need=100)
    desk.ticket("c", need=100)
    await turn()
    assert desk.names == ["a", "b"]


async def test_a_paused_scheduler_starts_nothing_and_tells_when_engines_are_idle(
    desk: Desk,
) -> None:
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    running = desk.ticket("a")
    await turn()
    desk.scheduler.pause()
    desk.ticket("b")
    idle = asyncio.create_task(desk.scheduler.wait_idle())
    await turn()
    assert not idle.done()
    desk.scheduler.withdraw(running)
    await asyncio.wait_for(idle, 1)
    assert desk.names == ["a"]


@given(
    st.lists(
        st.builds(
            Load,
            st.uuids().map(str),
            st.integers(1, 1_000),
            st.integers(1, 8),
            used=st.integers(0, 1_000),
            num_calls=st.integers(0, 8),
        ),
        max_size=6,
    ),
    st.integers(1, 1_200),
)
def test_place_chooses_an_engine_with_room_whenever_there_is_one(
    loads: list[Load], need: int
) -> None:
    able = {
        load.engine
        for load in loads
        if load.num_calls < load.max_calls
        and (load.num_calls == 0 or load.used + need <= load.capacity)
    }
    placement = place("p", need, loads)
    assert (placement is None) == (not able)
    if placement is not None:
        assert placement.engine in able


times = st.floats(0, 1e6)


@given(came=times, wait=st.floats(0, 1e4), priority=st.integers(-5, 5), head_start=times)
def test_a_call_is_overtaken_only_by_what_comes_within_a_bounded_time(
    came: float, wait: float, priority: int, head_start: float
) -> None:
    """Whoever waits longest is next at last, however urgent and old the others are."""
    waiting = rank(came, came, is_latency=False, priority=priority)
    later = came + wait
    other = rank(later - head_start, later, is_latency=True, priority=priority)
    if wait > THROUGHPUT_S + HEAD_START_S:
        assert other > waiting
    elif wait < THROUGHPUT_S - 1:
        assert other < waiting
    urgent = rank(came, came, is_latency=False, priority=priority + 1)
    assert urgent == pytest.approx(waiting - PRIORITY_S)


async def test_a_steady_load_that_is_waited_for_starves_nobody(desk: Desk) -> None:
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=1)
    running = desk.ticket("first", rank=-1.0, need=100)
    await turn()
    desk.ticket("patient", rank=rank(0.0, 0.0, is_latency=False, priority=0), need=100)
    overtaken = 0
    while overtaken < 100:
        now = float(overtaken)
        urgent = rank(now, now, is_latency=True, priority=0)
        ticket = desk.ticket(f"urgent.{overtaken}", rank=urgent, need=100)
        desk.scheduler.withdraw(running)
        await turn()
        if desk.names[-1] == "patient":
            break
        running = ticket
        overtaken += 1
    assert overtaken == THROUGHPUT_S, "it was overtaken for so long, and no longer"


async def test_withdrawn_calls_do_not_pile_up_behind_one_that_waits(desk: Desk) -> None:
    desk.scheduler.engine_arrived("e", capacity=100, max_sequences=4)
    running = desk.ticket("a", need=60)
    desk.ticket("big", need=80)
    await turn()
    kept = [desk.ticket(f"k.{i}", rank=float(i)) for i in range(1, 4)]
    for i in range(1_000):
        desk.scheduler.withdraw(desk.ticket(f"w.{i}", rank=float(i % 7)))
    assert desk.scheduler.num_waiting == 1 + len(kept)
    assert len(desk.scheduler._waiting) < 100
    desk.scheduler.withdraw(running)
    await turn()
    assert desk.names == ["a", "big", "k.1", "k.2"]
