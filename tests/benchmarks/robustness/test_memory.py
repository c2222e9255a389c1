"""Tests of the KV memory of a simulated run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.programs import AppPlan, chain, single
from apps.setting import A100_13B
from robustness.memory import MemoryReport, measure
from simulation.simulation import Simulation, SimulationConfig


def report(*plans: AppPlan) -> MemoryReport:
    """Run programs at once on one engine, and return their memory."""
    simulation = Simulation(SimulationConfig(policy="conure", cost=A100_13B))
    for plan in plans:
        simulation.submit(plan.blueprint, 0.0)
    simulation.run()
    return measure(simulation)


def test_shared_prompt_is_held_once() -> None:
    found = report(*(single("system", 1_000, 10, 20, user) for user in range(4)))
    assert found.shared.peak == 1_000 + 4 * 30
    assert found.unshared.peak == 4 * 1_030
    assert found.kept.peak == found.shared.peak, "programs of one call keep nothing"


def test_chain_without_lifetimes_keeps_every_call() -> None:
    found = report(chain(3, 200, 20))
    assert found.shared == found.unshared, "calls that follow each other share nothing at once"
    # Each call has its own chunk and summary; the instructions at the start are held once.
    assert found.kept.peak == pytest.approx(60 + 3 * 200 + 3 * 20 + 2 * 20)
    assert found.kept.token_seconds > 1.5 * found.shared.token_seconds
