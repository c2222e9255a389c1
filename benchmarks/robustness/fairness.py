"""Fairness between applications: who ends later than if calls ran in order of arrival.

The bound: a program ends at most its own duration alone after the time at which order of arrival
would have ended all programs that were there. Our policy only reorders waiting calls, an engine
with room never waits for a better call, and no program that arrives `patience_s` later is
preferred; so a program that waits, waits for work that order of arrival does as well (Graham's
bound for list scheduling).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from apps.programs import AppPlan, chain, map_reduce, single
from apps.scenario import HEAD
from apps.setting import A100_13B, baseline, ours
from apps.workloads import Sent, many_chains_sent, outcomes
from simulation.simulation import SimulationConfig


class Lateness(NamedTuple):
    """The end of one program under two orders, from a common start."""

    ours_s: float
    arrival_s: float
    """In order of arrival, request by request."""
    alone_s: float

    @property
    def ratio(self) -> float:
        """Return how late our order is; at most 1 if the program does not end later."""
        return self.ours_s / self.arrival_s


def figure_13(seed: int, number: int = 25) -> list[Lateness]:
    """Return the ends of the chains of figure 13, as clients see them."""
    return _compare(
        HEAD.ours(HEAD.a100_13b, seed, capacity=10_000),
        HEAD.baseline(HEAD.a100_13b, seed, capacity=10_000),
        many_chains_sent(seed, number),
    )


def random_programs(seed: int) -> list[Lateness]:
    """Return the ends of 5 to 30 random programs that arrive at once, without a network."""
    draw = random.Random(f"fairness {seed}")
    capacity = draw.choice([3_000, 6_000, 12_000])
    plans = [_random_plan(draw, number) for number in range(draw.randint(5, 30))]
    common = {"capacity": capacity, "round_trip_s": lambda: 0.0}
    return _compare(
        ours(A100_13B, seed, **common),
        baseline(A100_13B, seed, **common),
        [(plan, 0.0) for plan in plans],
    )


def excess(programs: Sequence[Lateness]) -> float:
    """Return the largest share of its own duration by which a program exceeds the time at which
    order of arrival ends all programs; at most 1 within the bound, negative if none does.
    """
    last_s = max(program.arrival_s for program in programs)
    return max((program.ours_s - last_s) / program.alone_s for program in programs)


def _compare(ours: SimulationConfig, arrival: SimulationConfig, sent: Sent) -> list[Lateness]:
    alone_s = [outcomes(ours, [each])[0].took_s for each in sent]
    first, second = outcomes(ours, sent), outcomes(arrival, sent)
    return [Lateness(a.took_s, b.took_s, c) for a, b, c in zip(first, second, alone_s, strict=True)]


def _random_plan(draw: random.Random, number: int) -> AppPlan:
    kind = draw.choice(["single", "chain", "map-reduce"])
    if kind == "single":
        return single("", 0, draw.randint(50, 1_500), draw.randint(10, 200), number)
    size, num_output = draw.randint(100, 1_000), draw.randint(10, 60)
    if kind == "chain":
        return chain(draw.randint(2, 20), size, num_output, number)
    return map_reduce(draw.randint(2, 8), size, num_output, number)
