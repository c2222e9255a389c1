"""Programs that have not begun may be held while programs of better rank run."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.scheduling.holds import MAX_HELD_PROGRAMS, Opening, ProgramsAhead
from conure.server.scheduling.policy import POLICIES
from conure.server.scheduling.scheduler import QueuedCall, Scheduler
from conure.server.scheduling.service_time import ServiceTimeEstimator

from .scheduler_harness import SchedulerHarness, prefixes, run_loop

SLOW_PREFILL = ServiceTimeEstimator(prompt_token_s=1.0, bare_step_s=1.0)
"""A prompt token takes as long as a decode step."""


def slow_harness() -> SchedulerHarness:
    """Return a harness in which prefills cost much, so that programs are held."""
    harness = SchedulerHarness(Scheduler())
    harness.scheduler.service_time = SLOW_PREFILL
    return harness


def opening(harness: SchedulerHarness, name: str, rank: float, **fields: Any) -> QueuedCall:
    return harness.submit(name, rank=rank, need=90, opens_program=True, **fields)


def test_hold_saves_more_than_it_costs() -> None:
    holds = POLICIES["conure"].holds
    pace = ServiceTimeEstimator(prompt_token_s=0.001, bare_step_s=0.01)
    opens, ahead = Opening(1_000, 1), ProgramsAhead(3, 50)
    assert holds(opens, ahead, pace), "0.5 s of waiting, twice, against 3 s of delay"
    assert not holds(opens._replace(num_waiting_programs=3), ahead, pace)
    assert not holds(opens._replace(num_prefill_tokens=300), ahead, pace)
    assert not holds(opens, ahead._replace(num_programs=1), pace)
    assert not holds(opens, ahead._replace(num_steps=150), pace)


@given(
    opens=st.builds(Opening, st.integers(0, 10**6), st.integers(1, 10**5)),
    ahead=st.builds(ProgramsAhead, st.integers(1, 1_000), st.integers(1, 10**5)),
    more=st.integers(0, 1_000),
)
def test_more_programs_or_fewer_steps_ahead_keep_a_hold(
    opens: Opening, ahead: ProgramsAhead, more: int
) -> None:
    fewer_steps = max(ahead.num_steps - more, 1)
    for policy in POLICIES.values():
        if policy.holds(opens, ahead, SLOW_PREFILL):
            assert policy.holds(
                opens, ProgramsAhead(ahead.num_programs + more, fewer_steps), SLOW_PREFILL
            )


async def test_program_whose_output_has_not_begun_counts_from_then_on() -> None:
    step = 0
    harness = slow_harness()
    harness.add_engine(capacity=1_000, max_sequences=16, steps=lambda: step)
    ahead = harness.submit("ahead", rank=1.0, need=60, num_output=50)
    await run_loop()
    step = 49  # The prompt took as many steps as the output may.
    harness.scheduler.prefill_done(ahead)
    opening(harness, "p", 2.0)
    await run_loop()
    assert harness.started_names == ["ahead", "p"], "50 steps, twice, against 90 tokens"


def test_other_policies_hold_nothing() -> None:
    for name in set(POLICIES) - {"conure"}:
        assert not POLICIES[name].holds(Opening(10**6, 1), ProgramsAhead(100, 0), SLOW_PREFILL)


async def test_program_begins_when_the_program_ahead_ends() -> None:
    harness = slow_harness()
    harness.add_engine(capacity=1_000, max_sequences=16)
    ahead = harness.submit("ahead", rank=1.0, num_output=5)
    await run_loop()
    for call in ("p.1", "p.2"):
        opening(harness, call, 2.0)
    await run_loop()
    assert harness.started_names == ["ahead"]
    assert harness.scheduler.num_waiting == 2
    assert len(harness.scheduler.first_waiting(9)) == 2
    harness.scheduler.release(ahead)
    await run_loop()
    assert harness.started_names == ["ahead", "p.1", "p.2"]


async def test_calls_pass_a_held_program() -> None:
    harness = slow_harness()
    harness.add_engine(capacity=1_000, max_sequences=16)
    harness.submit("ahead", rank=1.0, num_output=5)
    await run_loop()
    opening(harness, "held", 2.0)
    harness.submit("single", rank=3.0)
    await run_loop()
    assert harness.started_names == ["ahead", "single"]


async def test_program_of_worse_rank_holds_nothing_back() -> None:
    harness = slow_harness()
    harness.add_engine(capacity=1_000, max_sequences=16)
    harness.submit("behind", rank=3.0, num_output=5)
    await run_loop()
    opening(harness, "p", 2.0)
    await run_loop()
    assert harness.started_names == ["behind", "p"]


async def test_program_begins_on_another_engine() -> None:
    harness = slow_harness()
    harness.add_engine("busy", capacity=1_000, max_sequences=16)
    harness.submit("ahead", rank=1.0, num_output=5)
    await run_loop()
    harness.add_engine("idle", capacity=1_000, max_sequences=16)
    opening(harness, "p", 2.0)
    await run_loop()
    assert harness.placements[-1] == ("p", "idle")


async def test_engines_share_the_prefills_of_a_program() -> None:
    for num_engines, starts in ((1, False), (4, True)):
        harness = slow_harness()
        for number in range(num_engines):
            harness.add_engine(f"e{number}", capacity=1_000, max_sequences=16)
            harness.submit(f"ahead {number}", rank=1.0, num_output=50)
        await run_loop()
        for call in ("p.1", "p.2", "p.3", "p.4"):
            opening(harness, call, 2.0)
        await run_loop()
        is_begun = "p.1" in harness.started_names
        assert is_begun is starts, "360 tokens, or 90 on each of 4, against 50 steps, twice"


async def test_cached_tokens_do_not_cause_a_hold() -> None:
    harness = slow_harness()
    harness.add_engine(capacity=1_000, max_sequences=16)
    shared = prefixes(80)
    harness.submit("ahead", rank=1.0, need=90, num_output=10, prefixes=shared)
    await run_loop()
    opening(harness, "p.1", 2.0, prefixes=shared)
    opening(harness, "p.2", 2.0, prefixes=shared)
    await run_loop()
    assert harness.started_names == ["ahead", "p.1", "p.2"], "20 tokens against 10 steps, twice"


async def test_released_call_is_held_no_longer() -> None:
    harness = slow_harness()
    harness.add_engine(capacity=1_000, max_sequences=16)
    ahead = harness.submit("ahead", rank=1.0, num_output=5)
    await run_loop()
    held = opening(harness, "p.1", 2.0)
    opening(harness, "p.2", 2.0)
    await run_loop()
    harness.scheduler.release(held)
    harness.scheduler.release(ahead)
    await run_loop()
    assert harness.started_names == ["ahead", "p.2"]
    assert harness.scheduler.num_waiting == 0


async def test_number_of_held_programs_is_bounded() -> None:
    harness = slow_harness()
    harness.scheduler.service_time = ServiceTimeEstimator(prompt_token_s=1e9, bare_step_s=1.0)
    harness.add_engine(capacity=100_000, max_sequences=1_000)
    harness.submit("ahead", rank=1.0, num_output=5)
    await run_loop()
    for number in range(MAX_HELD_PROGRAMS + 3):
        opening(harness, f"p{number}", 2.0 + number)
    await run_loop()
    assert harness.started_names == ["ahead", *(f"p{MAX_HELD_PROGRAMS + i}" for i in range(3))]


async def test_held_program_gets_the_engine_that_a_call_of_worse_rank_reserved() -> None:
    harness = slow_harness()
    harness.add_engine(capacity=100, max_sequences=16)
    ahead = harness.submit("ahead", rank=1.0, need=30, num_output=5)
    await run_loop()
    opening(harness, "held.1", 2.0, num_output=1)
    opening(harness, "held.2", 2.0, num_output=1)
    long = harness.submit("long", rank=3.0, need=95)
    await run_loop()
    assert harness.why["long"].startswith("first in queue")
    harness.scheduler.release(ahead)
    await run_loop()
    assert harness.started_names[:2] == ["ahead", "held.1"]
    assert not long.is_released


class _Model:
    """All calls of a scheduler, and the decision on a program from their plain sums."""

    def __init__(self, harness: SchedulerHarness) -> None:
        self.harness = harness
        self.calls: dict[str, QueuedCall] = {}

    def running(self) -> list[QueuedCall]:
        return [c for c in self.calls.values() if c.reservations is not None and not c.is_released]

    def check(self) -> None:
        """Assert that the engine has every call but those of programs that the policy holds."""
        running = self.running()
        waiting = [c for c in self.calls.values() if c.reservations is None and not c.is_released]
        begun = {call.request.program for call in running}
        assert all(not c.request.opens_program or c.request.program not in begun for c in waiting)
        openings = {c.request.program for c in waiting}
        scheduler = self.harness.scheduler
        for call in waiting:
            mine = [c for c in waiting if c.request.program == call.request.program]
            tokens = sum(c.request.num_prompt for c in mine)
            ahead: dict[str, int] = {}
            for other in running:
                if other.rank < call.rank:
                    known = ahead.get(other.request.program, 0)
                    ahead[other.request.program] = max(known, other.request.num_output)
            assert ahead, "nothing is held without a program of better rank"
            assert scheduler.policy.holds(
                Opening(tokens, len(openings)),
                ProgramsAhead(len(ahead), max(ahead.values())),
                scheduler.service_time,
            )


steps_of_clients = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 60), st.integers(1, 40)),
    max_size=30,
)


@settings(max_examples=60)
@given(steps=steps_of_clients)
def test_holds_equal_a_model_and_every_call_starts(
    steps: list[tuple[int, int, int, int]],
) -> None:
    rounds: list[Any] = []
    harness = SchedulerHarness(Scheduler(defer=rounds.append))
    harness.scheduler.service_time = SLOW_PREFILL
    model = _Model(harness)
    harness.add_engine(capacity=10_000, max_sequences=1_000)

    def settle() -> None:
        while rounds:
            rounds.pop(0)()

    for number, (kind, num_calls, num_prompt, num_output) in enumerate(steps):
        if kind < 4:
            for index in range(num_calls):
                name = f"p{number}.{index}"
                model.calls[name] = harness.submit(
                    name,
                    rank=float(num_prompt + num_calls * 100 + number / 100),
                    need=num_prompt + num_output,
                    num_output=num_output,
                    opens_program=num_calls > 1,
                )
        elif running := model.running():
            harness.scheduler.release(running[num_prompt % len(running)])
        settle()
        model.check()
    while running := model.running():
        harness.scheduler.release(running[0])
        settle()
        model.check()
    assert sorted(harness.started_names) == sorted(model.calls)
    assert harness.scheduler.num_waiting == 0


@settings(max_examples=200)
@given(
    num_engines=st.integers(1, 3),
    latency_tokens=st.sampled_from([None, 60]),
    steps=steps_of_clients,
)
def test_every_call_starts_where_memory_is_short(
    num_engines: int, latency_tokens: int | None, steps: list[tuple[int, int, int, int]]
) -> None:
    rounds: list[Any] = []
    harness = SchedulerHarness(Scheduler(latency_tokens=latency_tokens, defer=rounds.append))
    harness.scheduler.service_time = SLOW_PREFILL
    for number in range(num_engines):
        harness.add_engine(f"e{number}", capacity=100, max_sequences=4)
    calls: list[QueuedCall] = []

    def running() -> list[QueuedCall]:
        return [call for call in calls if call.reservations is not None and not call.is_released]

    def settle() -> None:
        while rounds:
            rounds.pop(0)()

    for number, (kind, num_calls, num_prompt, num_output) in enumerate(steps):
        if kind < 4:
            calls += (
                harness.submit(
                    f"p{number}.{index}",
                    rank=float(num_prompt),
                    need=num_prompt + num_output,
                    num_output=num_output,
                    opens_program=num_calls > 1,
                    is_latency_critical=kind == 0,
                )
                for index in range(num_calls)
            )
        elif now := running():
            harness.scheduler.release(now[num_prompt % len(now)])
        settle()
    while now := running():
        harness.scheduler.release(now[0])
        settle()
    assert harness.scheduler.num_waiting == 0
    assert len(harness.started_names) == len(calls)
