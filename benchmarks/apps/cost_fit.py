"""Fit the simulator's cost model to a running server, and predict workloads with it.

A grid of programs with different numbers of calls, prompt tokens and output tokens is timed from
outside. The time of a program is a sum of five terms, one per number of a `LinearCosts`: per
prompt, per prompt token, per step, per call in a step, and per token held. The fit is a least-
squares fit of relative errors with non-negative terms. The server's own cost of a call (HTTP,
encoding, the journal) is included in the cost of a prompt.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import numpy as np

from apps.scaled_workloads import ScheduledProgram
from simulation.engine import LinearCosts
from simulation.simulation import Simulation, SimulationConfig

from .client import AppClient
from .programs import AppPlan, call


class Trial(NamedTuple):
    """Calls that start together."""

    num_calls: int
    num_prompt: int
    num_output: int

    def terms(self) -> list[float]:
        """Return the multiplicity of each number of a `LinearCosts`."""
        calls, prompt, steps = self
        held = calls * (prompt + steps / 2)
        return [calls, calls * prompt, steps, steps * calls, steps * held]

    def plan(self) -> AppPlan:
        """Return the trial as a program whose calls share nothing."""
        names = [f"c{i}" for i in range(self.num_calls)]
        nodes = [call(name, [f"own {name}"], self.num_output) for name in names]
        return AppPlan(nodes, names, {f"own {name}": self.num_prompt for name in names})


GRID = tuple(
    Trial(num_calls, num_prompt, num_output)
    for num_calls in (1, 4, 12)
    for num_prompt in (64, 384, 1_024)
    for num_output in (2, 24, 80)
)
"""The sizes that occur in the scaled workloads."""


def fit(times: Sequence[tuple[Trial, float]]) -> LinearCosts:
    """Return the costs with the smallest relative error."""
    terms = np.array([trial.terms() for trial, _ in times])
    terms /= np.array([seconds for _, seconds in times])[:, None]
    ones = np.ones(len(times))
    num_terms = terms.shape[1]
    best, least = np.zeros(num_terms), float("inf")
    # Five terms allow trying every subset, which needs no solver for the constraint.
    for mask in range(1, 2**num_terms):
        kept = [place for place in range(num_terms) if mask >> place & 1]
        found, *_ = np.linalg.lstsq(terms[:, kept], ones, rcond=None)
        missed = float(np.sum((terms[:, kept] @ found - 1) ** 2))
        if (found >= 0).all() and missed < least:
            best, least = np.zeros(num_terms), missed
            best[kept] = found
    return LinearCosts(*map(float, best))


def error(cost: LinearCosts, times: Sequence[tuple[Trial, float]]) -> float:
    """Return the median relative error of the costs on the times that they were fitted to."""
    return statistics.median(
        abs(float(np.dot(cost, trial.terms())) / seconds - 1) for trial, seconds in times
    )


async def measure_trials(url: str, rounds: int) -> list[tuple[Trial, float]]:
    """Time every trial: the median of several rounds, each with new texts."""
    found: dict[Trial, list[float]] = {}
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as http,
        AppClient(http, whole=True, round_trip_s=0.0) as client,
    ):
        for number in range(rounds + 1):
            for trial in GRID:
                # Each trial has its own texts, so that no trial finds another trial's cache.
                seed = "-".join(map(str, ("fit", number, *trial)))
                (answer,) = await client.run([ScheduledProgram(trial.plan(), 0.0)], seed)
                if number:
                    found.setdefault(trial, []).append(answer.took_s)
    return [(trial, statistics.median(seconds)) for trial, seconds in found.items()]


def fit_server(url: str, rounds: int = 3) -> tuple[LinearCosts, float]:
    """Return the costs of a server, and their median relative error."""
    times = asyncio.run(measure_trials(url, rounds))
    cost = fit(times)
    return cost, error(cost, times)


def predict_seconds(
    sent: Sequence[ScheduledProgram],
    cost: LinearCosts,
    *,
    whole: bool,
    capacity: int,
    round_trip_s: float,
) -> dict[str, float]:
    """Return the mean seconds of a workload's programs by kind, according to the simulator."""
    setting = SimulationConfig(
        policy="conure",
        cost=cost,
        capacity=capacity,
        whole_programs=whole,
        round_trip_s=lambda: round_trip_s,
    )
    simulation = Simulation(setting)
    outcomes = [simulation.submit(each.plan.blueprint, each.at_s) for each in sent]
    simulation.run()
    kinds = dict.fromkeys(each.kind for each in sent)
    return {
        kind: statistics.fmean(
            outcome.took_s
            for outcome, each in zip(outcomes, sent, strict=True)
            if each.kind == kind
        )
        for kind in kinds
    }
