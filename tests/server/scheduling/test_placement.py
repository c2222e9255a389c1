"""Which engine a call gets, and when there is room for it."""

from __future__ import annotations

from conure.server.scheduling.policy import POLICIES
from conure.server.scheduling.scheduler import Scheduler

from .desks import Desk, prefixes, turn


async def test_a_shared_prefix_takes_room_once(conure: Desk) -> None:
    conure.engine()
    for i in range(4):
        conure.ticket(f"p.{i}", need=60, prefixes=prefixes(50))
    await turn()
    assert conure.names == ["p.0", "p.1", "p.2", "p.3"], "50 tokens, and four times ten"
    conure.ticket("q", need=20)
    await turn()
    assert "q" not in conure.names


async def test_a_policy_that_knows_no_prefixes_counts_each_alone() -> None:
    desk = Desk(Scheduler(POLICIES["fcfs"]))
    desk.engine()
    for i in range(2):
        desk.ticket(f"p.{i}", need=60, prefixes=prefixes(50))
    await turn()
    assert desk.names == ["p.0"]


async def test_a_long_prefix_draws_its_readers_to_one_engine(conure: Desk) -> None:
    for name in ("a", "b", "c"):
        conure.engine(name, capacity=10_000)
    conure.ticket("other.1", need=900)
    for i in range(3):
        conure.ticket(f"p.{i}", need=1_000, num_output=10, prefixes=prefixes(900))
    await turn()
    assert len(conure.where("p.0", "p.1", "p.2")) == 1
    assert "900 of 990 prompt tokens are here" in conure.why["p.2"]


async def test_calls_that_share_nothing_spread(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.engine(name, capacity=10_000)
    for i in range(3):
        desk.ticket(f"p.{i}", need=1_000)
    await turn()
    assert len(desk.where("p.0", "p.1", "p.2")) == 3


async def test_a_prefix_stays_in_the_cache_of_the_engine_that_had_it(conure: Desk) -> None:
    for name in ("a", "b"):
        conure.engine(name, capacity=10_000)
    first = conure.ticket("p", need=1_000, prefixes=prefixes(900, stays=True))
    await turn()
    conure.scheduler.withdraw(first)
    conure.ticket("q", need=100)
    await turn()
    conure.ticket("r", need=1_000, prefixes=prefixes(900, stays=True))
    await turn()
    assert conure.where("r") == conure.where("p")


async def test_a_task_group_goes_to_one_engine_and_splits_where_it_does_not_fit() -> None:
    desk = Desk(Scheduler(POLICIES["parrot"]))
    desk.engine("small", capacity=250)
    desk.engine("large", capacity=400)
    desk.engine("spare", capacity=200)
    for i in range(6):
        desk.ticket(f"p.{i}", need=100, group="g", is_waited=True)
    await turn()
    engines = [engine for _, engine in desk.started]
    assert engines == ["large"] * 4 + ["small"] * 2
    assert "3 calls of its group run here" in desk.why["p.3"]


async def test_a_strict_call_wants_little_company_and_gets_it() -> None:
    """The paper's example: an engine for 64,000 tokens holds 2,000 beside a strict call."""
    desk = Desk(Scheduler(strict_tokens=2_000))
    desk.engine("busy", capacity=64_000)
    bulk = [desk.ticket(f"bulk.{i}", need=3_000, is_waited=False) for i in range(3)]
    await turn()
    desk.ticket("chat.1", need=500, num_output=100, is_strict=True)
    await turn()
    assert "chat.1" not in desk.names, "the engine is kept for it, and drains"
    desk.ticket("bulk.9", need=3_000, is_waited=False)
    await turn()
    assert "bulk.9" not in desk.names
    desk.engine("free", capacity=64_000)
    await turn()
    assert desk.where("chat.1") == {"free"}
    assert desk.where("bulk.9") == {"busy"}, "like runs with like"
    desk.ticket("chat.2", need=500, num_output=100, is_strict=True)
    await turn()
    assert desk.where("chat.2") == {"free"}, "one more costs nothing where one is"
    for ticket in bulk:
        desk.scheduler.withdraw(ticket)


async def test_bulk_goes_on_while_a_strict_call_waits_for_its_engine() -> None:
    desk = Desk(Scheduler(strict_tokens=100))
    for name in ("a", "b"):
        desk.engine(name, capacity=1_000)
    for i in range(2):
        desk.ticket(f"bulk.{i}", need=500)
    await turn()
    desk.ticket("chat", rank=-1.0, need=50, is_strict=True)
    desk.ticket("bulk.2", need=100)
    desk.ticket("bulk.3", need=100)
    await turn()
    assert len(desk.where("bulk.2", "bulk.3")) == 1
    assert "chat" not in desk.names


async def test_calls_that_are_nearly_done_make_room_before_they_end() -> None:
    """Each call comes to a hundred tokens, eighty of them written step by step."""
    step = 0
    desk = Desk(Scheduler())
    desk.engine("telling", capacity=150, steps=lambda: step)
    first = desk.ticket("p.0", need=100, num_output=80)
    await turn()
    desk.scheduler.filled(first)
    desk.ticket("p.1", need=100, num_output=80)
    await turn()
    assert desk.names == ["p.0"]
    step = 50
    desk.ticket("p.2", rank=-1.0, need=100, num_output=80)
    await turn()
    assert desk.names == ["p.0", "p.2"], "in thirty steps, when the first has all, it has 50"


async def test_an_engine_that_tells_no_steps_is_booked_with_all_that_may_be_written() -> None:
    desk = Desk(Scheduler())
    desk.engine("silent", capacity=150)
    first = desk.ticket("p.0", need=100, num_output=80)
    desk.ticket("p.1", need=100, num_output=80)
    await turn()
    desk.scheduler.filled(first)
    await turn()
    assert desk.names == ["p.0"]
    desk.scheduler.withdraw(first)
    await turn()
    assert desk.names == ["p.0", "p.1"]
