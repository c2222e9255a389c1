"""The wait queues: which call runs next, and where."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.scheduling.policy import BACKGROUND_DELAY_S, POLICIES, Policy
from conure.server.scheduling.request import PriorityInputs
from conure.server.scheduling.scheduler import MAX_LOOKAHEAD_CALLS, QueuedCall, Scheduler

from .scheduler_harness import SchedulerHarness, prefixes, run_loop


async def test_a_call_waits_until_an_engine_is_there(harness: SchedulerHarness) -> None:
    harness.submit("a")
    await run_loop()
    assert harness.started_names == []
    assert harness.scheduler.num_waiting == 1
    harness.add_engine()
    await run_loop()
    assert harness.started_names == ["a"]
    assert harness.scheduler.num_waiting == 0


async def test_calls_run_by_rank_then_arrival(
    harness: SchedulerHarness,
) -> None:
    for name, place_in_line in [("a", 2.0), ("b", 1.0), ("c", 1.0)]:
        harness.submit(name, rank=place_in_line)
    harness.add_engine(capacity=1_000)
    await run_loop()
    assert harness.started_names == ["b", "c", "a"]


async def test_no_call_overtakes_one_waiting_for_room(harness: SchedulerHarness) -> None:
    harness.add_engine()
    running = harness.submit("a", need=60)
    harness.submit("big", rank=1.0, need=80)
    harness.submit("small", rank=2.0, need=10)
    await run_loop()
    assert harness.started_names == ["a"]
    harness.scheduler.release(running)
    await run_loop()
    assert harness.started_names == ["a", "big", "small"]


async def test_head_of_the_queue_starts_in_the_step_in_which_it_fits(
    harness: SchedulerHarness,
) -> None:
    step = 0
    harness.add_engine(capacity=100, steps=lambda: step)
    harness.submit("a", need=60, num_output=50)
    harness.submit("b", rank=1.0, need=60, num_output=50)
    await run_loop()
    while step < 20:
        assert harness.started_names == ["a"], "over 40 tokens when `a` ends with its 60"
        step += 1
        harness.scheduler.engine_advanced("e")
        await run_loop()
    assert harness.started_names == ["a", "b"]


async def test_progress_of_an_engine_without_a_waiting_call_starts_nothing(
    harness: SchedulerHarness,
) -> None:
    step = 0
    harness.add_engine(capacity=100, steps=lambda: step)
    harness.submit("a", need=60, num_output=50)
    harness.submit("head", rank=1.0, need=100)
    harness.submit("later", rank=2.0, need=60, num_output=50)
    await run_loop()
    step = 30  # `later` has room beside `a`, but the engine drains for `head`.
    harness.scheduler.engine_advanced("e")
    harness.scheduler.engine_advanced("unknown")
    await run_loop()
    assert harness.started_names == ["a"]


async def test_waiting_calls_are_listed_in_the_order_in_which_they_start(
    harness: SchedulerHarness,
) -> None:
    harness.add_engine()
    running = harness.submit("a", need=60)
    for name, rank in [("d", 3.0), ("b", 1.0), ("c", 2.0), ("gone", 2.0)]:
        call = harness.submit(name, rank=rank, need=80)
        if name == "gone":
            harness.scheduler.release(call)
    await run_loop()  # `b` is the head of the queue: the engine drains for it

    def listed(limit: int) -> list[str]:
        return [request.program for request in harness.scheduler.first_waiting(limit)]

    assert listed(9) == ["b", "c", "d"]
    assert listed(2) == ["b", "c"]
    harness.scheduler.release(running)
    await run_loop()
    assert harness.started_names == ["a", "b"]
    assert listed(9) == ["c", "d"]


async def test_idle_engine_accepts_call_of_any_size(harness: SchedulerHarness) -> None:
    harness.add_engine()
    harness.submit("huge", need=1_000)
    await run_loop()
    assert harness.started_names == ["huge"]


async def test_engine_accepts_max_sequences_plus_lookahead(
    harness: SchedulerHarness,
) -> None:
    harness.add_engine(capacity=10**9, max_sequences=2)
    for i in range(20):
        harness.submit(f"p.{i}")
    await run_loop()
    assert len(harness.started_names) == 2 + MAX_LOOKAHEAD_CALLS


async def test_released_call_never_starts_and_frees_tokens_once(
    harness: SchedulerHarness,
) -> None:
    waiting = harness.submit("a")
    harness.scheduler.release(waiting)
    harness.add_engine()
    running = harness.submit("b", need=100)
    await run_loop()
    harness.scheduler.release(running)
    harness.scheduler.release(running)
    harness.submit("c", need=100)
    harness.submit("d", need=100)
    await run_loop()
    assert harness.started_names == ["b", "c"]


async def test_lost_calls_do_not_count_on_restarted_engine(
    harness: SchedulerHarness,
) -> None:
    harness.add_engine()
    old = harness.submit("a", need=100)
    await run_loop()
    harness.scheduler.remove_engine("e")
    harness.add_engine()
    harness.scheduler.release(old)
    harness.submit("b", need=100)
    harness.submit("c", need=100)
    await run_loop()
    assert harness.started_names == ["a", "b"]


async def test_paused_scheduler_starts_nothing_and_signals_idle(
    harness: SchedulerHarness,
) -> None:
    harness.add_engine()
    running = harness.submit("a")
    await run_loop()
    harness.scheduler.pause()
    harness.submit("b")
    idle = asyncio.create_task(harness.scheduler.wait_idle())
    await run_loop()
    assert not idle.done()
    harness.scheduler.release(running)
    await asyncio.wait_for(idle, 60)
    assert harness.started_names == ["a"]


async def test_the_loss_of_the_last_busy_engine_signals_idle(harness: SchedulerHarness) -> None:
    harness.add_engine("a")
    harness.add_engine("b")
    harness.submit("p")
    await run_loop()
    harness.scheduler.pause()
    idle = asyncio.create_task(harness.scheduler.wait_idle())
    await run_loop()
    harness.scheduler.remove_engine(harness.placements[0][1])
    await asyncio.wait_for(idle, 60)


async def test_steady_urgent_load_starves_no_call(
    policy: Policy, harness: SchedulerHarness
) -> None:
    """A maximally urgent call arrives every second, and one call fits at a time."""
    harness.add_engine(max_sequences=1)
    running = harness.submit("first", rank=-1e9, need=100)
    await run_loop()
    worst = PriorityInputs(
        arrived_at_s=0.0,
        program_started_at_s=0.0,
        kind="throughput",
        total_s=1e9,
        attained_s=1e9,
        tenant_overuse_s=1e9,
    )
    harness.submit("patient", rank=policy.rank(worst).at_s, need=100)
    overtaken = 0
    while harness.started_names[-1] != "patient":
        urgent = PriorityInputs(
            arrived_at_s=overtaken, program_started_at_s=-1e9, depth=1_000, latest_start_s=-1e9
        )
        call = harness.submit(f"u.{overtaken}", rank=policy.rank(urgent).at_s, need=100)
        harness.scheduler.release(running)
        await run_loop()
        running = call
        overtaken += 1
        assert overtaken <= policy.patience_s + 2
    assert policy.name != "conure" or overtaken > BACKGROUND_DELAY_S, (
        "it is the least urgent of all"
    )


async def test_released_calls_do_not_accumulate_in_queue(
    harness: SchedulerHarness,
) -> None:
    harness.add_engine()
    running = harness.submit("a", need=60)
    harness.submit("big", need=80)
    await run_loop()
    reserved_engine = [harness.submit(f"k.{i}", rank=float(i)) for i in range(1, 4)]
    for i in range(1_000):
        harness.scheduler.release(harness.submit(f"w.{i}", rank=float(i % 7)))
    assert harness.scheduler.num_waiting == 1 + len(reserved_engine)
    assert sum(len(line.heap) for line in harness.scheduler._queues) < 100
    harness.scheduler.release(running)
    await run_loop()
    assert harness.started_names == ["a", "big", "k.1", "k.2"]


async def test_head_of_queue_reserves_engine_while_others_pass(
    default_harness: SchedulerHarness,
) -> None:
    default_harness.add_engine("a")
    default_harness.add_engine("b")
    running = [default_harness.submit(f"r.{i}", need=60) for i in range(2)]
    await run_loop()
    big = default_harness.submit("big", rank=1.0, need=80)
    for i in range(4):
        default_harness.submit(f"s.{i}", rank=2.0, need=20)
    await run_loop()
    assert default_harness.started_names[2:] == ["s.0", "s.1"], (
        "40 tokens were free on each, and one is reserved"
    )
    (reserved_engine,) = {"a", "b"} - default_harness.engines_of("s.0", "s.1")
    assert (
        default_harness.why["big"]
        == f"first in queue: {reserved_engine} is reserved for it and has room for 40 of 80 tokens"
    )
    default_harness.scheduler.release(
        running[0 if default_harness.placements[0][1] == reserved_engine else 1]
    )
    await run_loop()
    assert default_harness.placements[4] == ("big", reserved_engine)
    assert big.reservations is not None
    assert default_harness.placements[5] == ("s.2", reserved_engine), (
        "the engine is no longer reserved"
    )


async def test_better_rank_takes_over_reserved_engine(harness: SchedulerHarness) -> None:
    harness.add_engine()
    running = harness.submit("r", need=90)
    await run_loop()
    harness.submit("big", rank=1.0, need=90)
    await run_loop()
    harness.submit("better", rank=0.5, need=80)
    await run_loop()
    harness.scheduler.release(running)
    await run_loop()
    assert harness.started_names == ["r", "better"]


async def test_releasing_a_call_frees_its_reserved_engine(harness: SchedulerHarness) -> None:
    harness.add_engine()
    harness.submit("r", need=60)
    await run_loop()
    big = harness.submit("big", need=80)
    await run_loop()
    harness.submit("small", rank=1.0)
    await run_loop()
    assert harness.started_names == ["r"]
    harness.scheduler.release(big)
    await run_loop()
    assert harness.started_names == ["r", "small"]


async def test_releasing_the_call_that_blocks_a_queue_unblocks_it(
    default_harness: SchedulerHarness,
) -> None:
    default_harness.add_engine("a")
    default_harness.add_engine("b")
    for name, need in (("r", 80), ("s", 60)):
        default_harness.submit(name, need=need)
    await run_loop()
    default_harness.submit("head", rank=1.0, need=100)
    blocking = default_harness.submit("blocking", rank=2.0, need=60)
    default_harness.submit("small", rank=3.0, need=20)
    await run_loop()
    assert default_harness.started_names == ["r", "s"]
    default_harness.scheduler.release(blocking)
    await run_loop()
    assert default_harness.started_names == ["r", "s", "small"]


async def test_a_release_of_all_waiting_calls_costs_one_decision_per_turn(
    default_harness: SchedulerHarness,
) -> None:
    default_harness.add_engine()
    default_harness.submit("r", need=60)
    waiting = [default_harness.submit(f"w.{i}", rank=1.0, need=80) for i in range(100)]
    await run_loop()
    num_decisions = default_harness.scheduler.num_decisions
    for call in waiting[1:]:
        default_harness.scheduler.release(call)
    await run_loop()
    assert default_harness.scheduler.num_decisions <= num_decisions + 2
    assert default_harness.scheduler.first_waiting(2) == [waiting[0].request]


async def test_lost_engine_is_no_longer_reserved(harness: SchedulerHarness) -> None:
    harness.add_engine()
    harness.submit("r", need=60)
    await run_loop()
    harness.submit("big", need=80)
    await run_loop()
    harness.scheduler.remove_engine("e")
    harness.add_engine()
    await run_loop()
    assert harness.started_names == ["r", "big"]


async def test_lost_engine_clears_task_group_state() -> None:
    harness = SchedulerHarness(Scheduler(POLICIES["parrot"]))
    harness.add_engine("e")
    old = [harness.submit(f"p.{i}", need=10, group="g") for i in range(2)]
    await run_loop()
    harness.scheduler.remove_engine("e")
    harness.add_engine("e")
    again = harness.submit("p.0", need=10, group="g")
    await run_loop()
    for call in [*old, again]:
        harness.scheduler.release(call)
    assert harness.scheduler._task_groups == {}
    assert all(
        engine.peak == engine.num_calls == 0 for engine in harness.scheduler._index.engines.values()
    )


def _submit_all(harness: SchedulerHarness, draw: st.DataObject) -> Iterator[QueuedCall]:
    for i in range(draw.draw(st.integers(1, 12))):
        length = draw.draw(st.sampled_from([0, 20, 40]))
        yield harness.submit(
            f"p{i % 3}.{i}",
            rank=draw.draw(st.floats(0, 10)),
            need=draw.draw(st.integers(max(length, 1), 120)),
            prefixes=prefixes(length) if length else (),
            group=draw.draw(st.sampled_from([None, "g"])),
            is_latency_critical=draw.draw(st.booleans()),
        )


@settings(max_examples=100)
@given(draw=st.data(), name=st.sampled_from(list(POLICIES)), bound=st.sampled_from([None, 60]))
def test_every_call_runs_once_and_reservations_end_empty(
    draw: st.DataObject, name: str, bound: int | None
) -> None:
    """Under any arrivals, releases and engine losses, all remaining calls run once, no engine is
    overcommitted, and all reservations are released.
    """
    deferred: list[object] = []
    scheduler = Scheduler(POLICIES[name], latency_tokens=bound, defer=deferred.append)
    harness = SchedulerHarness(scheduler)
    for engine_name in ("a", "b", "c"):
        harness.add_engine(engine_name)
    calls = list(_submit_all(harness, draw))
    withdrawn = draw.draw(st.sets(st.sampled_from(range(len(calls)))))
    for i in withdrawn:
        scheduler.release(calls[i])
    lost = draw.draw(st.sampled_from([None, "a", "b"]))
    for _ in range(3 * len(calls) + 3):
        scheduler.run_round()
        engines = scheduler._index.engines.values()
        for line in scheduler._queues:
            has_one_kept = (
                line.head_of_line is not None and line.head_of_line.reserved_engine is not None
            )
            assert has_one_kept or not line.num_waiting or not scheduler._index._versions
        for engine in engines:
            assert (
                engine.peak <= engine.token_limit(is_latency_critical=False)
                or engine.num_calls == 1
            )
        if lost is not None and harness.placements:
            scheduler.remove_engine(lost)
            for i, call in enumerate(calls):
                if call.reservations is not None and call.reservations.engine == lost:
                    scheduler.release(call)
                    withdrawn.add(i)
            lost = None
        running = [t for t in calls if t.reservations is not None and not t.is_released]
        if running:
            scheduler.release(draw.draw(st.sampled_from(running)))
    assert all(call.is_released for call in calls)
    assert len(harness.started_names) == len(set(harness.started_names))
    started = set(harness.started_names)
    assert all(f"p{i % 3}.{i}" in started for i in range(len(calls)) if i not in withdrawn)
    assert scheduler.num_waiting == 0
    assert scheduler._task_groups == {}
    assert scheduler._index._reserved == set()
    for engine in scheduler._index.engines.values():
        assert (
            engine.reserved_tokens,
            engine.num_calls,
            engine.num_latency_critical,
            engine.num_prefilling_tokens,
        ) == (0, 0, 0, 0)
        assert not engine.active_prefixes
