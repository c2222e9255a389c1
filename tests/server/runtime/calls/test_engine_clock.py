"""Tests of the costs of an engine's fills, and of what a call would take alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.ir import GenerateNode
from conure.server.runtime.calls.engine_clock import CallTimer, EngineClock, FillCosts
from conure.server.runtime.node_state import NodeState, NodeUsage

from ...inprocess import generate, server_harness

STEP_S, TOKEN_S = 0.005, 0.0001


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 500)), min_size=60, max_size=80))
def test_fills_of_different_lengths_tell_both_costs(fills: list[tuple[int, int]]) -> None:
    fills += [(1, 10), (1, 1_000), (4, 10)] * 20
    costs = FillCosts()
    for num_steps, num_tokens in fills:
        costs.add(num_steps, num_tokens, num_steps * STEP_S + num_tokens * TOKEN_S)
    step_s, token_s = costs.fit()
    assert step_s == pytest.approx(STEP_S, rel=0.1)
    assert token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_equal_fills_are_all_prompt() -> None:
    costs = FillCosts()
    assert costs.fit() == (0.0, 0.0)
    for _ in range(50):
        costs.add(1, 100, 0.015)
    step_s, token_s = costs.fit()
    assert step_s == pytest.approx(0.0, abs=1e-9)
    assert token_s == pytest.approx(0.00015)


def test_costs_are_never_negative() -> None:
    costs = FillCosts()
    for num_tokens, seconds in ((10, 0.3), (1_000, 0.1), (10, 0.3)):
        costs.add(1, num_tokens, seconds)
    assert costs.fit()[0] > 0
    assert costs.fit()[1] == 0.0


def test_the_costs_follow_an_engine_that_becomes_slower() -> None:
    costs = FillCosts()
    for factor in (1, 3):
        for number in range(1_500):
            num_tokens = 10 if number % 2 else 500
            costs.add(1, num_tokens, factor * (STEP_S + num_tokens * TOKEN_S))
    assert costs.fit() == pytest.approx((3 * STEP_S, 3 * TOKEN_S), rel=0.15)


def test_time_counts_while_a_prompt_can_be_filled() -> None:
    clock = EngineClock(num_rows=2)
    clock.begin_fill(0.0, 0)
    clock.begin_fill(1.0, 1)
    clock.begin_fill(1.0, 1)
    clock.end_fill(3.0, 4, 100)
    clock.begin_output(3.0, 4)
    assert clock.read(3.0, 4) == (3.0, 4)
    clock.end_fill(4.0, 5, 10)
    clock.begin_output(4.0, 5)
    assert clock.read(9.0, 25) == (4.0, 5), "both rows write outputs"
    clock.end_output(9.0, 25)
    assert clock.read(9.5, 26) == (4.5, 6)
    clock.end_fill(10.0, 27, None)
    assert clock.read(20.0, 90) == (5.0, 7), "nothing is filled"


class SimulatedEngine:
    """An engine with known costs that fills one prompt per step, and its clock."""

    def __init__(self, num_rows: int) -> None:
        self.clock = EngineClock(num_rows)
        self.num_steps = 0
        self.now = 0.0

    def step(self, num_prompt_tokens: int = 0) -> None:
        self.now += STEP_S + num_prompt_tokens * TOKEN_S
        self.num_steps += 1


class SimulatedCall:
    """A call whose prompt is filled in one step."""

    def __init__(self, engine: SimulatedEngine, num_prompt: int, num_computed: int) -> None:
        self.usage = NodeUsage()
        self.num_prompt, self.num_computed = num_prompt, num_computed
        self.num_left = 0
        state = NodeState(GenerateNode(id="call", prompt=[]))
        state.usage = self.usage
        self.timer = CallTimer(state)
        self.timer.begin(engine.clock, engine, engine.now)

    def fill(self, engine: SimulatedEngine, num_output: int) -> None:
        engine.step(self.num_computed)
        self.usage.computed += self.num_computed
        self.timer.filled(engine.now)
        self.num_left = num_output - 1


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(5, 400), st.integers(2, 30)), min_size=3))
def test_estimates_do_not_depend_on_sharing_and_rows(
    num_rows: int, calls: list[tuple[int, int]]
) -> None:
    """Prompts of 500 tokens share all but a few, and outputs wait for each other's prompts."""
    engine = SimulatedEngine(num_rows)
    for num_prompt in (700, 300, 20) * 20:  # from which the costs are known
        first = SimulatedCall(engine, num_prompt, num_prompt)
        first.fill(engine, 1)
        first.timer.finish(engine.now, num_prompt)
    waiting = [(SimulatedCall(engine, 500, own), length) for own, length in calls]
    running: list[SimulatedCall] = []
    ended: list[SimulatedCall] = []
    while waiting or running:
        if waiting and len(running) < num_rows:
            call, length = waiting.pop(0)
            for other in running:
                other.num_left -= 1
            call.fill(engine, length)
            running.append(call)
        else:
            engine.step()
            for other in running:
                other.num_left -= 1
        for call in [each for each in running if each.num_left <= 0]:
            call.timer.finish(engine.now, call.num_prompt)
            running.remove(call)
            ended.append(call)

    assert len(ended) == len(calls)
    for call in ended:
        assert call.usage.unshared_fill_s == pytest.approx(500 * TOKEN_S, rel=0.1)
    total_s = sum(call.usage.unpaused_decode_s for call in ended)
    assert total_s == pytest.approx(sum(length for _, length in calls) * STEP_S, rel=0.2)


def test_a_call_that_stops_leaves_the_clock_as_before() -> None:
    engine = SimulatedEngine(num_rows=1)
    filling, decoding = SimulatedCall(engine, 9, 9), SimulatedCall(engine, 9, 9)
    decoding.fill(engine, 5)
    for call in (filling, decoding, filling):
        call.timer.stop(engine.now)
    before = engine.clock.read(engine.now, engine.num_steps)
    engine.step()
    assert engine.clock.read(engine.now, engine.num_steps) == before
    filling.timer.begin(engine.clock, engine, engine.now)
    engine.step()
    assert engine.clock.read(engine.now, engine.num_steps) != before, "the row is free again"


async def test_calls_of_a_program_have_their_times(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(6)]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate(name, name * 40) for name in names], outputs=names)
        run = harness.executor.programs._live[program.id]
        await program.end()
        usages = [run.state.nodes[name].usage for name in names]
        assert all(usage.unshared_fill_s > 0 for usage in usages)
        assert all(usage.unpaused_decode_s >= 0 for usage in usages)
