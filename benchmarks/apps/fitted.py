"""The simulator's costs, fitted to a server that runs, and what they foretell for a workload.

A grid of programs, so many calls at once with prompts and outputs of so many tokens, is timed
from outside. What one of them takes is a sum of five terms, one for every number of a `Cost`:
so much for each prompt, each of its tokens, each step, each call in it, and each token held.
Least squares of relative errors, with no term below 0. What the server itself costs a call
(HTTP, encoding, the journal) is thereby in the price of a prompt.

Knows programs and their times. Refuses to know workloads beyond what a caller hands in.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import numpy as np

from conure.server.simulation.engine import Cost
from conure.server.simulation.simulation import Setting, Simulation

from .client import Client
from .programs import Plan, call
from .scaled import Sent


class Trial(NamedTuple):
    """Calls that start together."""

    num_calls: int
    num_prompt: int
    num_output: int

    def terms(self) -> list[float]:
        """How often each number of a `Cost` is paid."""
        calls, prompt, steps = self
        held = calls * (prompt + steps / 2)
        return [calls, calls * prompt, steps, steps * calls, steps * held]

    def plan(self) -> Plan:
        """As a program; its calls share nothing."""
        names = [f"c{i}" for i in range(self.num_calls)]
        nodes = [call(name, [f"own {name}"], self.num_output) for name in names]
        return Plan(nodes, names, {f"own {name}": self.num_prompt for name in names})


GRID = tuple(
    Trial(num_calls, num_prompt, num_output)
    for num_calls in (1, 4, 12)
    for num_prompt in (64, 384, 1_024)
    for num_output in (2, 24, 80)
)
"""What the scaled workloads consist of."""


def fit(times: Sequence[tuple[Trial, float]]) -> Cost:
    """Costs that explain seconds best."""
    terms = np.array([trial.terms() for trial, _ in times])
    terms /= np.array([seconds for _, seconds in times])[:, None]
    ones = np.ones(len(times))
    num_terms = terms.shape[1]
    best, least = np.zeros(num_terms), float("inf")
    # With five terms, trying every subset of them is the least that can go wrong.
    for mask in range(1, 2**num_terms):
        kept = [place for place in range(num_terms) if mask >> place & 1]
        found, *_ = np.linalg.lstsq(terms[:, kept], ones, rcond=None)
        missed = float(np.sum((terms[:, kept] @ found - 1) ** 2))
        if (found >= 0).all() and missed < least:
            best, least = np.zeros(num_terms), missed
            best[kept] = found
    return Cost(*map(float, best))


def error(cost: Cost, times: Sequence[tuple[Trial, float]]) -> float:
    """By how much costs miss the times that they were fitted to: median of relative errors."""
    return statistics.median(
        abs(float(np.dot(cost, trial.terms())) / seconds - 1) for trial, seconds in times
    )


async def times_of(url: str, rounds: int) -> list[tuple[Trial, float]]:
    """Seconds of every trial: the median of several rounds, each with texts of its own."""
    found: dict[Trial, list[float]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        client = Client(http, whole=True, round_trip_s=0.0)
        for number in range(rounds + 1):
            for trial in GRID:
                # Nobody may find in the cache what another trial has left there.
                seed = "-".join(map(str, ("fit", number, *trial)))
                (answer,) = await client.run([Sent(trial.plan(), 0.0)], seed)
                if number:
                    found.setdefault(trial, []).append(answer.took_s)
    return [(trial, statistics.median(seconds)) for trial, seconds in found.items()]


def fitted(url: str, rounds: int = 3) -> tuple[Cost, float]:
    """The costs of a server, and how well they explain it."""
    times = asyncio.run(times_of(url, rounds))
    cost = fit(times)
    return cost, error(cost, times)


def foretold(
    sent: Sequence[Sent], cost: Cost, *, whole: bool, capacity: int, round_trip_s: float
) -> dict[str, float]:
    """Mean seconds of a workload's programs by kind, in the simulator."""
    setting = Setting(
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
