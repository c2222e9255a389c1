"""Tests of the costs of an engine's steps."""

from __future__ import annotations

import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.engine.protocol import StepReport
from conure.server.engines.step_costs import (
    KEEP,
    MIN_INTERVAL_S,
    StepAmounts,
    StepCostFit,
    StepCostMeter,
    StepCosts,
)

COSTS = StepCosts(step_s=0.005, token_s=0.0001, held_token_s=1e-6)
NUM_BLOCKS, BLOCK_SIZE = 1_000, 16


class SimulatedEngine:
    """An engine with known costs, and its clock."""

    def __init__(self, costs: StepCosts = COSTS) -> None:
        self.costs = costs
        self.clock = StepCostMeter(NUM_BLOCKS, BLOCK_SIZE)
        self.now = 100.0
        self.num_steps = 0
        self.num_tokens = 0

    def step(
        self, num_tokens: int, num_held: int, *, jitter_s: float = 0.0, is_idle: bool = False
    ) -> None:
        """Run a step and report it; the report arrives late by a jitter."""
        costs = self.costs
        self.clock.start(self.now)
        held_s = num_held * BLOCK_SIZE * costs.held_token_s
        self.now += costs.step_s + num_tokens * costs.token_s + held_s
        self.num_steps += 1
        self.num_tokens += num_tokens
        num_cached = (NUM_BLOCKS - num_held) // 3
        report = StepReport(
            epoch=1,
            number=self.num_steps,
            num_free=NUM_BLOCKS - num_held - num_cached,
            num_cached=num_cached,
            num_tokens=self.num_tokens,
            is_idle=is_idle,
            reports=[],
        )
        self.clock.observe(report, self.now + jitter_s)

    def run(self, seed: int, num_steps: int = 1_000) -> None:
        """Run phases of different batches, most of which only decode."""
        draw = random.Random(seed)
        while num_steps > 0:
            num_tokens = draw.choice([1, 4, 16, 16, 64, 256, 512])
            num_held = draw.randint(10, NUM_BLOCKS)
            for _ in range(draw.randint(5, 40)):
                self.step(num_tokens, num_held, jitter_s=draw.uniform(0, 0.002))
                num_steps -= 1


@given(st.integers(0, 1_000))
def test_steps_of_different_sizes_tell_all_costs(seed: int) -> None:
    engine = SimulatedEngine()
    engine.run(seed)
    found = engine.clock.costs
    assert found is not None
    assert found.step_s == pytest.approx(COSTS.step_s, rel=0.15)
    assert found.token_s == pytest.approx(COSTS.token_s, rel=0.15)
    assert found.held_token_s == pytest.approx(COSTS.held_token_s, rel=0.15)


@given(st.integers(1, 512), st.integers(1, NUM_BLOCKS))
def test_equal_steps_are_explained(num_tokens: int, num_held: int) -> None:
    engine = SimulatedEngine()
    for _ in range(100):
        engine.step(num_tokens, num_held)
    found = engine.clock.costs
    assert found is not None
    assert min(found) >= 0
    held_tokens = num_held * BLOCK_SIZE
    step_s = found.step_s + num_tokens * found.token_s + held_tokens * found.held_token_s
    expected_s = COSTS.step_s + num_tokens * COSTS.token_s + held_tokens * COSTS.held_token_s
    assert step_s == pytest.approx(expected_s, rel=0.01)


@given(st.integers(0, 1_000))
def test_decoding_alone_tells_all_costs(seed: int) -> None:
    """The tokens and the held tokens of an interval are both about proportional to its steps."""
    draw = random.Random(seed)
    fit = StepCostFit()
    for _ in range(400):
        num_steps, batch = draw.randint(3, 6), draw.randint(6, 16)
        num_tokens = num_steps * batch
        amounts = StepAmounts(num_steps, num_tokens, num_tokens * draw.randint(600, 1_200))
        fit.add(amounts, sum(cost * amount for cost, amount in zip(COSTS, amounts, strict=True)))
    assert fit.fit() == pytest.approx(COSTS, rel=1e-6)


AMOUNTS = st.builds(StepAmounts, st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))


@given(st.lists(st.tuples(AMOUNTS, st.sampled_from([0.1, 1.0, 3.0])), min_size=1))
def test_no_other_costs_explain_the_intervals_better(
    intervals: list[tuple[StepAmounts, float]],
) -> None:
    def error(costs: list[float]) -> float:
        total = 0.0
        for amounts, seconds in intervals:
            excess_s = sum(map(operator.mul, costs, amounts)) - seconds
            total = KEEP * total + excess_s**2 / seconds
        return total

    fit = StepCostFit()
    assert fit.fit() is None
    for amounts, seconds in intervals:
        fit.add(amounts, seconds)
    found = list(fit.fit() or ())
    assert min(found) >= 0
    for column, cost in enumerate(found):
        for change in (-0.01 * cost, 0.001):
            changed = [*found[:column], cost + change, *found[column + 1 :]]
            assert error(changed) >= error(found) - 1e-9


def test_the_costs_follow_an_engine_that_becomes_slower() -> None:
    engine = SimulatedEngine()
    engine.run(seed=1)
    slower = StepCosts(*(3 * cost for cost in COSTS))
    engine.costs = slower
    engine.run(seed=2, num_steps=10_000)
    assert engine.clock.costs == pytest.approx(slower, rel=0.2)


def test_time_without_work_does_not_count() -> None:
    busy, interrupted = SimulatedEngine(), SimulatedEngine()
    for number in range(200):
        num_tokens = 16 if number % 3 else 256
        busy.step(num_tokens, 100)
        interrupted.step(num_tokens, 100, is_idle=number % 10 == 9)
        if number % 10 == 9:
            interrupted.now += 5.0
    assert busy.clock.costs is not None
    assert interrupted.clock.costs == pytest.approx(busy.clock.costs, rel=0.05)


def test_an_engine_has_no_costs_before_it_has_computed_long_enough() -> None:
    engine = SimulatedEngine()
    while engine.now < 100 + MIN_INTERVAL_S:
        assert engine.clock.costs is None
        engine.step(1, 1)
    assert engine.clock.costs is not None


def test_the_first_step_after_a_pause_counts_from_its_command() -> None:
    engine = SimulatedEngine()
    for _ in range(50):  # a chain: each prompt is filled by an engine that was idle
        engine.now += 1.0
        engine.step(200, 20)
        for number in range(20):
            engine.step(1, 20, is_idle=number == 19)
    found = engine.clock.costs
    assert found is not None
    chain_s = 21 * found.step_s + 220 * found.token_s + 21 * 320 * found.held_token_s
    expected_s = 21 * COSTS.step_s + 220 * COSTS.token_s + 21 * 320 * COSTS.held_token_s
    assert chain_s == pytest.approx(expected_s, rel=0.02)
