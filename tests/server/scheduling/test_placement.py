"""Which engine a call gets, and when an engine has room for it."""

from __future__ import annotations

from conure.server.scheduling.policy import POLICIES
from conure.server.scheduling.scheduler import Scheduler

from .scheduler_harness import SchedulerHarness, prefixes, run_loop


async def test_shared_prefix_is_reserved_once(default_harness: SchedulerHarness) -> None:
    default_harness.add_engine()
    for i in range(4):
        default_harness.submit(f"p.{i}", need=60, prefixes=prefixes(50))
    await run_loop()
    assert default_harness.started_names == ["p.0", "p.1", "p.2", "p.3"], (
        "50 tokens, and four times ten"
    )
    default_harness.submit("q", need=20)
    await run_loop()
    assert "q" not in default_harness.started_names


async def test_policy_without_prefixes_counts_each_call_alone() -> None:
    harness = SchedulerHarness(Scheduler(POLICIES["fcfs"]))
    harness.add_engine()
    for i in range(2):
        harness.submit(f"p.{i}", need=60, prefixes=prefixes(50))
    await run_loop()
    assert harness.started_names == ["p.0"]


async def test_long_prefix_attracts_readers_to_one_engine(
    default_harness: SchedulerHarness,
) -> None:
    for name in ("a", "b", "c"):
        default_harness.add_engine(name, capacity=10_000)
    default_harness.submit("other.1", need=900)
    for i in range(3):
        default_harness.submit(f"p.{i}", need=1_000, num_output=10, prefixes=prefixes(900))
    await run_loop()
    assert len(default_harness.engines_of("p.0", "p.1", "p.2")) == 1
    assert "900 of 990 prompt tokens are here" in default_harness.why["p.2"]


async def test_calls_without_shared_prefix_spread(harness: SchedulerHarness) -> None:
    for name in ("a", "b", "c"):
        harness.add_engine(name, capacity=10_000)
    for i in range(3):
        harness.submit(f"p.{i}", need=1_000)
    await run_loop()
    assert len(harness.engines_of("p.0", "p.1", "p.2")) == 3


async def test_cached_prefix_attracts_later_call(
    default_harness: SchedulerHarness,
) -> None:
    for name in ("a", "b"):
        default_harness.add_engine(name, capacity=10_000)
    first = default_harness.submit("p", need=1_000, prefixes=prefixes(900, stays=True))
    await run_loop()
    default_harness.scheduler.release(first)
    default_harness.submit("q", need=100)
    await run_loop()
    default_harness.submit("r", need=1_000, prefixes=prefixes(900, stays=True))
    await run_loop()
    assert default_harness.engines_of("r") == default_harness.engines_of("p")


async def test_task_group_fills_one_engine_then_splits() -> None:
    harness = SchedulerHarness(Scheduler(POLICIES["parrot"]))
    harness.add_engine("small", capacity=250)
    harness.add_engine("large", capacity=400)
    harness.add_engine("spare", capacity=200)
    for i in range(6):
        harness.submit(f"p.{i}", need=100, group="g", is_latency_sensitive=True)
    await run_loop()
    engines = [engine for _, engine in harness.placements]
    assert engines == ["large"] * 4 + ["small"] * 2
    assert "3 calls of its group run here" in harness.why["p.3"]


async def test_latency_critical_call_limits_engine_tokens() -> None:
    """The paper's example: an engine for 64,000 tokens holds 2,000 with a latency-critical call."""
    harness = SchedulerHarness(Scheduler(latency_tokens=2_000))
    harness.add_engine("busy", capacity=64_000)
    bulk = [harness.submit(f"bulk.{i}", need=3_000, is_latency_sensitive=False) for i in range(3)]
    await run_loop()
    harness.submit("chat.1", need=500, num_output=100, is_latency_critical=True)
    await run_loop()
    assert "chat.1" not in harness.started_names, "the engine is reserved for it and drains"
    harness.submit("bulk.9", need=3_000, is_latency_sensitive=False)
    await run_loop()
    assert "bulk.9" not in harness.started_names
    harness.add_engine("free", capacity=64_000)
    await run_loop()
    assert harness.engines_of("chat.1") == {"free"}
    assert harness.engines_of("bulk.9") == {"busy"}, "calls of one kind run together"
    harness.submit("chat.2", need=500, num_output=100, is_latency_critical=True)
    await run_loop()
    assert harness.engines_of("chat.2") == {"free"}, (
        "another critical call costs nothing on this engine"
    )
    for call in bulk:
        harness.scheduler.release(call)


async def test_batch_calls_run_while_critical_call_waits() -> None:
    harness = SchedulerHarness(Scheduler(latency_tokens=100))
    for name in ("a", "b"):
        harness.add_engine(name, capacity=1_000)
    for i in range(2):
        harness.submit(f"bulk.{i}", need=500)
    await run_loop()
    harness.submit("chat", rank=-1.0, need=50, is_latency_critical=True)
    harness.submit("bulk.2", need=100)
    harness.submit("bulk.3", need=100)
    await run_loop()
    assert len(harness.engines_of("bulk.2", "bulk.3")) == 1
    assert "chat" not in harness.started_names


async def test_almost_finished_calls_make_room_early() -> None:
    """Each call reaches a hundred tokens, eighty of them generated step by step."""
    step = 0
    harness = SchedulerHarness(Scheduler())
    harness.add_engine("telling", capacity=150, steps=lambda: step)
    first = harness.submit("p.0", need=100, num_output=80)
    await run_loop()
    harness.scheduler.prefill_done(first)
    harness.submit("p.1", need=100, num_output=80)
    await run_loop()
    assert harness.started_names == ["p.0"]
    step = 50
    harness.submit("p.2", rank=-1.0, need=100, num_output=80)
    await run_loop()
    assert harness.started_names == ["p.0", "p.2"], (
        "in thirty steps, when the first has all, it has 50"
    )


async def test_engine_without_step_count_reserves_full_length() -> None:
    harness = SchedulerHarness(Scheduler())
    harness.add_engine("silent", capacity=150)
    first = harness.submit("p.0", need=100, num_output=80)
    harness.submit("p.1", need=100, num_output=80)
    await run_loop()
    harness.scheduler.prefill_done(first)
    await run_loop()
    assert harness.started_names == ["p.0"]
    harness.scheduler.release(first)
    await run_loop()
    assert harness.started_names == ["p.0", "p.1"]


async def test_engine_that_was_alone_is_compared_with_later_ones(harness: SchedulerHarness) -> None:
    harness.add_engine("first", capacity=10_000)
    harness.submit("p", need=9_000)
    await run_loop()
    harness.add_engine("second", capacity=8_000)
    harness.add_engine("third", capacity=10_000)
    harness.submit("q", need=2_000)
    await run_loop()
    assert harness.engines_of("q") == {"third"}
    harness.scheduler.remove_engine("third")
    harness.scheduler.remove_engine("second")
    harness.submit("r", need=500)
    await run_loop()
    assert harness.engines_of("r") == {"first"}
