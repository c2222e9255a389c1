"""Tests of the bound on how much later a program ends than in order of arrival."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from robustness.fairness import Lateness, excess, figure_13, random_programs


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_a_program_ends_within_its_own_duration_of_order_of_arrival(seed: int) -> None:
    assert excess(random_programs(seed)) <= 1


def test_few_chains_of_figure_13_end_later_than_in_order_of_arrival() -> None:
    chains = figure_13(0)
    assert sum(chain.ratio > 1 for chain in chains) <= 2
    assert max(chain.ratio for chain in chains) < 1.05
    assert excess(chains) <= 1


def test_excess_is_relative_to_the_own_duration() -> None:
    assert excess([Lateness(12.0, 10.0, 4.0), Lateness(5.0, 9.0, 1.0)]) == 0.5
