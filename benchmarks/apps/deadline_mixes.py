"""Random mixes of programs, some with deadlines, and the deadlines that each order meets.

A mix is 10 to 30 single calls, chains and map-reduce programs that arrive at random times on one or
two engines. Three in ten have a deadline: a multiple of the time that the program takes alone.

The oracle has the durations of all calls. It runs calls with a deadline before all others, either
by latest start or in order of arrival, whichever meets more deadlines of the mix. A *lone* order
has no other calls at all, so no scheduler meets more than that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import msgspec

from conure.server.program.ir import Deadline, Program
from conure.server.scheduling.policy import ConurePolicy, Policy, Rank
from conure.server.scheduling.request import PriorityInputs
from simulation.simulation import Simulation, SimulationConfig
from simulation.workload_profile import WorkloadProfile

from .programs import AppPlan, chain, map_reduce, single
from .setting import A100_13B

DEADLINE_SHARE = 0.3
"""Share of programs with a deadline."""
AFTER_ALL_S = 1e6
"""Delay of calls without a deadline in the oracle's orders."""


class TimedProgram(NamedTuple):
    """A program of a mix."""

    profile: WorkloadProfile
    at_s: float
    deadline_s: float | None


class Mix(NamedTuple):
    """Programs and the engines that they share."""

    setting: SimulationConfig
    programs: Sequence[TimedProgram]


class Met(NamedTuple):
    """For each deadline of a mix, whether it was met."""

    ours: list[bool]
    oracle: list[bool]
    lone: list[bool]


class _OraclePolicy(ConurePolicy):
    """Ranks calls by a key."""

    name = "oracle"

    def __init__(self, key: Callable[[PriorityInputs], float]) -> None:
        self._key = key

    def rank(self, inputs: PriorityInputs) -> Rank:
        """Rank by the key; calls without a deadline follow all others."""
        if inputs.latest_start_s is None:
            return Rank(AFTER_ALL_S + inputs.program_started_at_s, "after all deadlines")
        return Rank(self._key(inputs), "by deadline")


def _latest_start(inputs: PriorityInputs) -> float:
    assert inputs.latest_start_s is not None
    return inputs.latest_start_s


ORDERS = (_OraclePolicy(_latest_start), _OraclePolicy(lambda inputs: inputs.program_started_at_s))
"""The orders among which the oracle chooses."""


def mix(seed: int, slack: tuple[float, float] = (1.5, 8.0)) -> Mix:
    """Return a random mix.

    Args:
        seed: determines the mix.
        slack: smallest and largest deadline, as a multiple of the time that the program takes
            alone.
    """
    draw = random.Random(f"deadlines {seed}")
    setting = SimulationConfig(
        policy="conure",
        cost=A100_13B,
        num_engines=draw.choice([1, 1, 2]),
        capacity=draw.choice([3_000, 6_000, 12_000]),
    )
    rate = draw.uniform(1.0, 4.0) * setting.num_engines
    programs, at_s = [], 0.0
    for number in range(draw.randint(10, 30)):
        plan = _random_plan(draw, number)
        deadline_s = None
        if draw.random() < DEADLINE_SHARE:
            deadline_s = _alone_s(plan, setting.capacity) * draw.uniform(*slack)
        programs.append(TimedProgram(profile(plan, deadline_s), at_s, deadline_s))
        at_s += draw.expovariate(rate)
    return Mix(setting, programs)


def met(mix: Mix) -> Met:
    """Return the deadlines that our policy and the oracle meet."""
    orders = [met_under(mix, order) for order in ORDERS]
    only = mix._replace(programs=[each for each in mix.programs if each.deadline_s is not None])
    return Met(
        ours=met_under(mix, "conure"),
        oracle=max(orders, key=sum),
        lone=met_under(only, ORDERS[0]),
    )


def met_under(mix: Mix, policy: str | Policy) -> list[bool]:
    """Return, for each deadline of a mix, whether it is met under a policy."""
    simulation = Simulation(replace(mix.setting, policy=policy))
    outcomes = [simulation.submit(each.profile, each.at_s) for each in mix.programs]
    simulation.run()
    return [
        outcome.took_s <= each.deadline_s
        for outcome, each in zip(outcomes, mix.programs, strict=True)
        if each.deadline_s is not None
    ]


def share_where(ours: Sequence[bool], other: Sequence[bool]) -> float:
    """Return the share of the deadlines met by another order that our order meets."""
    return sum(a for a, b in zip(ours, other, strict=True) if b) / max(sum(other), 1)


def _random_plan(draw: random.Random, number: int) -> AppPlan:
    kind = draw.choice(["single", "single", "chain", "map-reduce"])
    if kind == "single":
        return single("", 0, draw.randint(50, 1_500), draw.randint(10, 200), number)
    size, num_output = draw.randint(100, 1_000), draw.randint(10, 60)
    if kind == "chain":
        return chain(draw.randint(2, 6), size, num_output, number)
    return map_reduce(draw.randint(2, 8), size, num_output, number)


def profile(plan: AppPlan, deadline_s: float | None) -> WorkloadProfile:
    """Return the profile of an application whose outputs have a deadline."""
    if deadline_s is None:
        return plan.blueprint
    program = msgspec.convert({"nodes": plan.nodes, "outputs": plan.outputs}, Program)
    objectives = dict.fromkeys(plan.outputs, Deadline(deadline_s))
    return WorkloadProfile.of(program, plan.lengths, objectives)


@cache
def _alone_s(plan: AppPlan, capacity: int) -> float:
    simulation = Simulation(SimulationConfig(policy="fcfs", cost=A100_13B, capacity=capacity))
    outcome = simulation.submit(plan.blueprint, 0.0)
    simulation.run()
    return outcome.took_s
