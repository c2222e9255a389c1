"""The cost model of an engine, against one that makes every step by itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.scheduling.demand import Demand, Prefix
from conure.server.simulation.clock import Clock
from conure.server.simulation.engine import Cost, SimulatedEngine, Work

COST = Cost(prompt_s=0.01, prompt_token_s=1e-3, step_s=0.02, sequence_s=1e-3, held_token_s=1e-5)


@dataclass
class Call:
    """A call that comes at a time, and what became of it."""

    at_s: float
    num_prompt: int
    num_output: int
    rank: float = 0.0
    filled_s: float = -1.0
    finished_s: float = -1.0


def simulate(calls: list[Call]) -> None:
    clock = Clock()
    engine = SimulatedEngine("e", clock, COST, reads_shared_once=True)

    def come(call: Call) -> None:
        def filled() -> None:
            call.filled_s = clock.now

        def finished() -> None:
            assert call.finished_s < 0
            call.finished_s = clock.now

        demand = Demand(program="p", num_prompt=call.num_prompt, num_output=call.num_output)
        work = Work(demand, call.num_prompt, call.num_output, call.rank, filled, finished)
        engine.start(work)

    for call in calls:
        clock.at(call.at_s, lambda call=call: come(call))  # type: ignore[misc]
    clock.run()


def step_by_step(calls: list[Call]) -> list[float]:
    """When each call finishes on an engine that makes one step, or fills one prompt, at a time."""
    now, made = 0.0, [-1] * len(calls)
    ends = [0.0] * len(calls)
    coming = sorted(range(len(calls)), key=lambda i: (calls[i].rank, calls[i].at_s, i))
    while any(not end for end in ends):
        waiting = [i for i in coming if made[i] < 0 and calls[i].at_s <= now]
        running = [i for i, end in enumerate(ends) if made[i] >= 0 and not end]
        if waiting:
            now += COST.fill_s(calls[waiting[0]].num_prompt)
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


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(
            Call, st.floats(0, 3), st.integers(1, 200), st.integers(1, 40), st.sampled_from([0.0])
        ),
        min_size=1,
        max_size=6,
    )
)
def test_stretches_of_steps_take_as_long_as_the_steps(calls: list[Call]) -> None:
    simulate(calls)
    for call, end in zip(calls, step_by_step(calls), strict=True):
        assert call.filled_s < call.finished_s
        assert call.finished_s == pytest.approx(end, rel=1e-6)


def test_prompts_are_filled_in_order_of_rank() -> None:
    calls = [Call(0.0, 100, 1), Call(0.01, 100, 1, rank=2.0), Call(0.02, 100, 1, rank=1.0)]
    simulate(calls)
    assert calls[0].filled_s < calls[2].filled_s < calls[1].filled_s


def attended(prefixes: tuple[Prefix, ...], *, reads_shared_once: bool) -> float:
    """How long two calls take that share what they share."""
    clock = Clock()
    engine = SimulatedEngine("e", clock, COST, reads_shared_once=reads_shared_once)
    ends: list[float] = []
    for _ in range(2):
        demand = Demand(program="p", num_prompt=1_000, num_output=10, prefixes=prefixes)
        engine.start(Work(demand, 0, 10, 0.0, lambda: None, lambda: ends.append(clock.now)))
    clock.run()
    return ends[-1]


def test_a_shared_prefix_is_read_once_where_the_kernels_do_so() -> None:
    shared = (Prefix(b"x", 900),)
    apart = attended((), reads_shared_once=True)
    assert attended(shared, reads_shared_once=False) == apart
    saved = apart - attended(shared, reads_shared_once=True)
    assert saved == pytest.approx(10 * 900 * COST.held_token_s, rel=0.15)


def test_a_call_that_is_cancelled_leaves_with_the_step_that_runs() -> None:
    clock = Clock()
    engine = SimulatedEngine("e", clock, COST, reads_shared_once=True)
    ended: list[str] = []
    works = {
        name: Work(
            Demand(program=name, num_prompt=10, num_output=num_output),
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
