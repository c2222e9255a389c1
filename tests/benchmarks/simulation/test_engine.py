"""The cost model of an engine, compared with one that simulates every step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.scheduling.request import PromptPrefix, ResourceRequest
from simulation.clock import SimulationClock
from simulation.engine import LinearCosts, SimulatedCall, SimulatedEngine

COST = LinearCosts(
    prompt_s=0.01, prompt_token_s=1e-3, step_s=0.02, sequence_s=1e-3, held_token_s=1e-5
)


@dataclass
class Call:
    """A call that arrives at a time, and its results."""

    at_s: float
    num_prompt: int
    num_output: int
    rank: float = 0.0
    filled_s: float = -1.0
    finished_s: float = -1.0


def simulate(calls: list[Call]) -> None:
    clock = SimulationClock()
    engine = SimulatedEngine("e", clock, COST, reads_shared_once=True)

    def arrive(call: Call) -> None:
        def filled() -> None:
            call.filled_s = clock.now

        def finished() -> None:
            assert call.finished_s < 0
            call.finished_s = clock.now

        demand = ResourceRequest(
            program="p", num_prompt=call.num_prompt, num_output=call.num_output
        )
        work = SimulatedCall(demand, call.num_prompt, call.num_output, call.rank, filled, finished)
        engine.start(work)

    for call in calls:
        clock.at(call.at_s, lambda call=call: arrive(call))  # type: ignore[misc]
    clock.run()


def step_by_step(calls: list[Call]) -> list[float]:
    """Return when each call finishes on an engine that runs one step or one prefill at a time."""
    now, made = 0.0, [-1] * len(calls)
    ends = [0.0] * len(calls)
    coming = sorted(range(len(calls)), key=lambda i: (calls[i].rank, calls[i].at_s, i))
    while any(not end for end in ends):
        waiting = [i for i in coming if made[i] < 0 and calls[i].at_s <= now]
        running = [i for i, end in enumerate(ends) if made[i] >= 0 and not end]
        if waiting:
            now += COST.prefill_s(calls[waiting[0]].num_prompt)
            made[waiting[0]] = 0
        elif running:
            held = sum(calls[i].num_prompt + made[i] for i in running)
            now += COST.step_s + len(running) * COST.sequence_s + held * COST.held_token_s
            for i in running:
                made[i] += 1
                if made[i] >= calls[i].num_output:
                    ends[i] = now
        else:
            now = min(calls[i].at_s for i in coming if made[i] < 0)
    return ends


@settings(max_examples=100)
@given(
    st.lists(
        st.builds(
            Call, st.floats(0, 3), st.integers(1, 200), st.integers(1, 40), st.sampled_from([0.0])
        ),
        min_size=1,
        max_size=6,
    )
)
def test_intervals_take_as_long_as_single_steps(calls: list[Call]) -> None:
    simulate(calls)
    for call, end in zip(calls, step_by_step(calls), strict=True):
        assert call.filled_s < call.finished_s
        assert call.finished_s == pytest.approx(end, rel=1e-6)


def test_prompts_are_prefilled_by_rank() -> None:
    calls = [Call(0.0, 100, 1), Call(0.01, 100, 1, rank=2.0), Call(0.02, 100, 1, rank=1.0)]
    simulate(calls)
    assert calls[0].filled_s < calls[2].filled_s < calls[1].filled_s


def attended(prefixes: tuple[PromptPrefix, ...], *, reads_shared_once: bool) -> float:
    """Return how long two calls with these prefixes take."""
    clock = SimulationClock()
    engine = SimulatedEngine("e", clock, COST, reads_shared_once=reads_shared_once)
    ends: list[float] = []
    for _ in range(2):
        demand = ResourceRequest(program="p", num_prompt=1_000, num_output=10, prefixes=prefixes)
        engine.start(
            SimulatedCall(demand, 0, 10, 0.0, lambda: None, lambda: ends.append(clock.now))
        )
    clock.run()
    return ends[-1]


def test_shared_prefix_is_read_once() -> None:
    shared = (PromptPrefix(b"x", 900),)
    apart = attended((), reads_shared_once=True)
    assert attended(shared, reads_shared_once=False) == apart
    saved = apart - attended(shared, reads_shared_once=True)
    assert saved == pytest.approx(10 * 900 * COST.held_token_s, rel=0.15)


def test_cancelled_call_ends_with_running_step() -> None:
    clock = SimulationClock()
    engine = SimulatedEngine("e", clock, COST, reads_shared_once=True)
    ended: list[str] = []
    works = {
        name: SimulatedCall(
            ResourceRequest(program=name, num_prompt=10, num_output=num_output),
            10,
            num_output,
            0.0,
            lambda: None,
            lambda name=name: ended.append(name),  # type: ignore[misc]
        )
        for name, num_output in (("long", 1_000), ("other", 50))
    }
    for work in works.values():
        engine.start(work)
    clock.at(0.5, lambda: engine.cancel(works["long"]))
    clock.run()
    assert ended == ["other"]
    assert clock.now < 2.0
