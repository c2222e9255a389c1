"""The waiting queue: who runs next, and where."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.scheduling.demand import Standing
from conure.server.scheduling.policy import POLICIES, THROUGHPUT_S, Policy
from conure.server.scheduling.scheduler import LOOK_AHEAD, Scheduler, Ticket

from .desks import Desk, prefixes, turn


async def test_a_call_waits_until_an_engine_is_there(desk: Desk) -> None:
    desk.ticket("a")
    await turn()
    assert desk.names == []
    assert desk.scheduler.num_waiting == 1
    desk.engine()
    await turn()
    assert desk.names == ["a"]
    assert desk.scheduler.num_waiting == 0


async def test_better_rank_runs_first_and_equal_ranks_in_order_of_arrival(desk: Desk) -> None:
    for name, place_in_line in [("a", 2.0), ("b", 1.0), ("c", 1.0)]:
        desk.ticket(name, rank=place_in_line)
    desk.engine(capacity=1_000)
    await turn()
    assert desk.names == ["b", "c", "a"]


async def test_nobody_overtakes_a_call_that_waits_for_room(desk: Desk) -> None:
    desk.engine()
    running = desk.ticket("a", need=60)
    desk.ticket("big", rank=1.0, need=80)
    desk.ticket("small", rank=2.0, need=10)
    await turn()
    assert desk.names == ["a"]
    desk.scheduler.withdraw(running)
    await turn()
    assert desk.names == ["a", "big", "small"]


async def test_an_empty_engine_takes_a_call_of_any_size(desk: Desk) -> None:
    desk.engine()
    desk.ticket("huge", need=1_000)
    await turn()
    assert desk.names == ["huge"]


async def test_an_engine_holds_no_more_calls_than_it_runs_and_looks_ahead(desk: Desk) -> None:
    desk.engine(capacity=10**9, max_sequences=2)
    for i in range(20):
        desk.ticket(f"p.{i}")
    await turn()
    assert len(desk.names) == 2 + LOOK_AHEAD


async def test_a_withdrawn_call_never_starts_and_frees_its_room_once(desk: Desk) -> None:
    waiting = desk.ticket("a")
    desk.scheduler.withdraw(waiting)
    desk.engine()
    running = desk.ticket("b", need=100)
    await turn()
    desk.scheduler.withdraw(running)
    desk.scheduler.withdraw(running)
    desk.ticket("c", need=100)
    desk.ticket("d", need=100)
    await turn()
    assert desk.names == ["b", "c"]


async def test_a_lost_engines_calls_do_not_count_against_its_next_life(desk: Desk) -> None:
    desk.engine()
    old = desk.ticket("a", need=100)
    await turn()
    desk.scheduler.engine_lost("e")
    desk.engine()
    desk.scheduler.withdraw(old)
    desk.ticket("b", need=100)
    desk.ticket("c", need=100)
    await turn()
    assert desk.names == ["a", "b"]


async def test_a_paused_scheduler_starts_nothing_and_tells_when_engines_are_idle(
    desk: Desk,
) -> None:
    desk.engine()
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


async def test_a_steady_load_of_others_starves_nobody(policy: Policy, desk: Desk) -> None:
    """Every second somebody comes who is as urgent as can be, and there is room for one."""
    desk.engine(max_sequences=1)
    running = desk.ticket("first", rank=-1e9, need=100)
    await turn()
    worst = Standing(
        came_s=0.0, began_s=0.0, kind="throughput", total_s=1e9, attained_s=1e9, ahead_s=1e9
    )
    desk.ticket("patient", rank=policy.rank(worst).at_s, need=100)
    overtaken = 0
    while desk.names[-1] != "patient":
        urgent = Standing(came_s=overtaken, began_s=-1e9, depth=1_000, latest_s=-1e9)
        ticket = desk.ticket(f"u.{overtaken}", rank=policy.rank(urgent).at_s, need=100)
        desk.scheduler.withdraw(running)
        await turn()
        running = ticket
        overtaken += 1
        assert overtaken <= policy.patience_s + 2
    assert policy.name != "conure" or overtaken > THROUGHPUT_S, "it is the least urgent of all"


async def test_withdrawn_calls_do_not_pile_up_behind_one_that_waits(desk: Desk) -> None:
    desk.engine()
    running = desk.ticket("a", need=60)
    desk.ticket("big", need=80)
    await turn()
    kept = [desk.ticket(f"k.{i}", rank=float(i)) for i in range(1, 4)]
    for i in range(1_000):
        desk.scheduler.withdraw(desk.ticket(f"w.{i}", rank=float(i % 7)))
    assert desk.scheduler.num_waiting == 1 + len(kept)
    assert sum(len(line.heap) for line in desk.scheduler._lines) < 100
    desk.scheduler.withdraw(running)
    await turn()
    assert desk.names == ["a", "big", "k.1", "k.2"]


async def test_the_first_in_line_has_an_engine_kept_for_it_and_others_pass_it_elsewhere(
    conure: Desk,
) -> None:
    conure.engine("a")
    conure.engine("b")
    running = [conure.ticket(f"r.{i}", need=60) for i in range(2)]
    await turn()
    big = conure.ticket("big", rank=1.0, need=80)
    for i in range(4):
        conure.ticket(f"s.{i}", rank=2.0, need=20)
    await turn()
    assert conure.names[2:] == ["s.0", "s.1"], "40 tokens were free on each, and one is kept"
    (kept,) = {"a", "b"} - conure.where("s.0", "s.1")
    assert (
        conure.why["big"] == f"first in line: {kept}, with room for 40 tokens, is kept for its 80"
    )
    conure.scheduler.withdraw(running[0 if conure.started[0][1] == kept else 1])
    await turn()
    assert conure.started[4] == ("big", kept)
    assert big.load is not None
    assert conure.started[5] == ("s.2", kept), "it is kept for nobody any more"


async def test_who_is_better_takes_over_the_engine_that_is_kept(desk: Desk) -> None:
    desk.engine()
    running = desk.ticket("r", need=90)
    await turn()
    desk.ticket("big", rank=1.0, need=90)
    await turn()
    desk.ticket("better", rank=0.5, need=80)
    await turn()
    desk.scheduler.withdraw(running)
    await turn()
    assert desk.names == ["r", "better"]


async def test_an_engine_is_kept_for_nobody_who_is_gone(desk: Desk) -> None:
    desk.engine()
    desk.ticket("r", need=60)
    await turn()
    big = desk.ticket("big", need=80)
    await turn()
    desk.ticket("small", rank=1.0)
    await turn()
    assert desk.names == ["r"]
    desk.scheduler.withdraw(big)
    await turn()
    assert desk.names == ["r", "small"]


async def test_an_engine_that_dies_is_kept_for_nobody(desk: Desk) -> None:
    desk.engine()
    desk.ticket("r", need=60)
    await turn()
    desk.ticket("big", need=80)
    await turn()
    desk.scheduler.engine_lost("e")
    desk.engine()
    await turn()
    assert desk.names == ["r", "big"]


async def test_a_lost_engine_takes_its_group_with_it_and_the_next_life_starts_anew() -> None:
    desk = Desk(Scheduler(POLICIES["parrot"]))
    desk.engine("e")
    old = [desk.ticket(f"p.{i}", need=10, group="g") for i in range(2)]
    await turn()
    desk.scheduler.engine_lost("e")
    desk.engine("e")
    again = desk.ticket("p.0", need=10, group="g")
    await turn()
    for ticket in [*old, again]:
        desk.scheduler.withdraw(ticket)
    assert desk.scheduler._gangs == {}
    assert all(load.peak == load.num_calls == 0 for load in desk.scheduler._roster.loads.values())


def _submit_all(desk: Desk, draw: st.DataObject) -> Iterator[Ticket]:
    for i in range(draw.draw(st.integers(1, 12))):
        length = draw.draw(st.sampled_from([0, 20, 40]))
        yield desk.ticket(
            f"p{i % 3}.{i}",
            rank=draw.draw(st.floats(0, 10)),
            need=draw.draw(st.integers(max(length, 1), 120)),
            prefixes=prefixes(length) if length else (),
            group=draw.draw(st.sampled_from([None, "g"])),
            is_strict=draw.draw(st.booleans()),
        )


@settings(max_examples=100, deadline=None)
@given(draw=st.data(), name=st.sampled_from(list(POLICIES)), bound=st.sampled_from([None, 60]))
def test_every_call_runs_once_and_nothing_is_left_behind(
    draw: st.DataObject, name: str, bound: int | None
) -> None:
    """Whatever comes, whoever is withdrawn and whichever engine dies: all others run, each once,
    no engine is overbooked, and the books are empty in the end.
    """
    deferred: list[object] = []
    scheduler = Scheduler(POLICIES[name], strict_tokens=bound, defer=deferred.append)
    desk = Desk(scheduler)
    for engine in ("a", "b", "c"):
        desk.engine(engine)
    tickets = list(_submit_all(desk, draw))
    withdrawn = draw.draw(st.sets(st.sampled_from(range(len(tickets)))))
    for i in withdrawn:
        scheduler.withdraw(tickets[i])
    lost = draw.draw(st.sampled_from([None, "a", "b"]))
    for _ in range(3 * len(tickets) + 3):
        scheduler.run()
        loads = scheduler._roster.loads.values()
        for line in scheduler._lines:
            has_one_kept = line.kept is not None and line.kept.kept is not None
            assert has_one_kept or not line.num_waiting or not scheduler._roster._versions
        for load in loads:
            assert load.peak <= load.bound(is_strict=False) or load.num_calls == 1
        if lost is not None and desk.started:
            scheduler.engine_lost(lost)
            for i, ticket in enumerate(tickets):
                if ticket.load is not None and ticket.load.engine == lost:
                    scheduler.withdraw(ticket)
                    withdrawn.add(i)
            lost = None
        running = [t for t in tickets if t.load is not None and not t.is_withdrawn]
        if running:
            scheduler.withdraw(draw.draw(st.sampled_from(running)))
    assert all(ticket.is_withdrawn for ticket in tickets)
    assert len(desk.names) == len(set(desk.names))
    started = set(desk.names)
    assert all(f"p{i % 3}.{i}" in started for i in range(len(tickets)) if i not in withdrawn)
    assert scheduler.num_waiting == 0
    assert scheduler._gangs == {}
    assert scheduler._roster._kept == set()
    for load in scheduler._roster.loads.values():
        assert (load.used, load.num_calls, load.num_strict, load.num_filling) == (0, 0, 0, 0)
        assert not load.held
