"""Deadlines in random mixes of programs, in virtual time."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.deadline_mixes import Met, met, met_under, mix, profile, share_where
from apps.programs import single
from apps.setting import A100_13B
from simulation.simulation import Simulation, SimulationConfig

SEEDS = range(15)
"""A part of the hundred mixes that the page of results reports."""


def test_calls_meet_the_deadlines_that_an_oracle_meets() -> None:
    found = Met(*(list(chain(*each)) for each in zip(*(met(mix(s)) for s in SEEDS), strict=True)))
    assert len(found.oracle) > 50
    assert share_where(found.ours, found.oracle) >= 0.95
    assert share_where(found.ours, found.lone) >= 0.9, "even if no other call had run"


def test_order_of_arrival_misses_deadlines_that_the_policy_meets() -> None:
    ours = [sum(met_under(mix(seed), "conure")) for seed in SEEDS]
    in_order = [sum(met_under(mix(seed), "fcfs")) for seed in SEEDS]
    assert sum(ours) > 1.05 * sum(in_order)
    assert all(a >= b for a, b in zip(ours, in_order, strict=True))


def test_short_call_with_a_deadline_overtakes_the_programs_before_it() -> None:
    setting = SimulationConfig(policy="conure", cost=A100_13B, capacity=1_200)
    simulation = Simulation(setting)
    others = [
        simulation.submit(single("", 0, 1_000, 100, user).blueprint, 0.0) for user in range(14)
    ]
    urgent = simulation.submit(profile(single("", 0, 100, 10, 99), 3.0), 0.5)
    simulation.run()
    assert urgent.took_s < 3.0
    assert sum(urgent.ended_s < other.ended_s for other in others) >= 13
