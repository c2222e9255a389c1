"""Tabulated costs at the table's sizes, between them and beyond them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.tabulated_cost import TabulatedCost

COSTS = TabulatedCost(1e-3, {8: 0.02, 16: 0.03, 64: 0.09})


@pytest.mark.parametrize(
    ("num_calls", "step_s"), [(8, 0.02), (12, 0.025), (16, 0.03), (40, 0.06), (1, 0.02), (99, 0.09)]
)
def test_step_time_is_interpolated_between_sizes(num_calls: int, step_s: float) -> None:
    assert COSTS.steps_s(10, num_calls, 5_000) == pytest.approx(10 * step_s)


def test_prefill_time_is_proportional_to_tokens() -> None:
    assert COSTS.prefill_s(250) == pytest.approx(0.25)


@given(st.integers(1, 1_000), st.integers(1, 100))
def test_num_steps_in_inverts_steps_s(num_steps: int, num_calls: int) -> None:
    seconds = COSTS.steps_s(num_steps, num_calls, 0)
    assert COSTS.num_steps_in(seconds - 1e-6, num_calls, 0) == num_steps
