"""Random mixes of chats and larger programs, for rules that must not be fitted to one mix."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from apps.programs import AppPlan, chain, coding, map_reduce, single
from apps.scaled_workloads import ScheduledProgram
from simulation.engine import LinearCosts

from .sides import BLOCK, SimulatedMachine, requests, whole

POOLS = (100, 66, 40)
"""Percent of the most memory that single requests need at once."""
ROOMY = 8_192


class Gain(NamedTuple):
    """Whole programs against single requests in one mix."""

    mean: float
    """Ratio of the mean durations."""
    slowest_kind: float
    """The same of the kind of programs that gains least."""


def random_mix(seed: int) -> list[ScheduledProgram]:
    """Return 4 to 24 chats that arrive one after another, and 1 to 5 larger programs."""
    draw = random.Random(f"mix {seed}")
    gap_s = draw.choice([0.03, 0.06, 0.1, 0.2])
    sent = []
    for user in range(draw.randint(4, 24)):
        plan = single("", 0, draw.randint(40, 300), draw.randint(20, 120), user)
        sent.append(ScheduledProgram(plan, user * gap_s * draw.uniform(0.5, 1.5), "chat"))
    kind = draw.choice(["map-reduce", "map-reduce", "chain", "coding"])
    began_s, gap_s = draw.uniform(0.0, 0.5), draw.choice([0.02, 0.05, 0.3])
    for number in range(draw.randint(1, 5)):
        plan = _larger(draw, kind, number)
        sent.append(ScheduledProgram(plan, began_s + number * gap_s, kind))
    return sent


def _larger(draw: random.Random, kind: str, number: int) -> AppPlan:
    if kind == "coding":
        return coding(draw.randint(2, 4), 1, scale=8).copy(number)
    if kind == "chain":
        return chain(draw.randint(3, 10), draw.randint(100, 400), draw.randint(12, 48), number)
    return map_reduce(draw.randint(3, 12), draw.randint(100, 500), draw.randint(12, 48), number)


def blocks_of(sent: Sequence[ScheduledProgram], cost: LinearCosts, pool: int) -> int:
    """Return the blocks of a pool: a share of what requests need, at least the longest call."""
    if pool == 100:
        return ROOMY
    longest = max(
        call.num_prompt + call.num_output + 1
        for each in sent
        for call in each.plan.blueprint.calls.values()
    )
    peak = requests(sent, SimulatedMachine(cost, ROOMY)).peak_tokens
    return max(math.ceil(peak * pool / 100 / BLOCK), math.ceil(longest * 1.15 / BLOCK))


def gain(sent: Sequence[ScheduledProgram], machine: SimulatedMachine) -> Gain:
    """Run both ways of sending."""
    before, after = requests(sent, machine).took_s, whole(sent, machine).took_s

    def ratio(kinds: set[str]) -> float:
        numbers = [number for number, each in enumerate(sent) if each.kind in kinds]
        return statistics.fmean(before[n] for n in numbers) / statistics.fmean(
            after[n] for n in numbers
        )

    kinds = {each.kind for each in sent}
    return Gain(ratio(kinds), min(ratio({kind}) for kind in kinds))
