"""What single mechanisms contribute: our system without each of them, on the page's workloads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from apps.programs import chain, logged_coding, map_reduce, single
from apps.scenario import HEAD
from apps.workloads import (
    COPILOT,
    COPILOT_SYSTEM,
    Sent,
    gpts_sent,
    many_chains_sent,
    mixed_sent,
)
from conure.server.scheduling.policy import ConurePolicy, FcfsPolicy, Rank
from conure.server.scheduling.request import PriorityInputs
from simulation.simulation import Simulation, SimulationConfig

from .memory import MemoryReport, measure


class _OrderOfArrival(ConurePolicy):
    """Our policy with calls ranked in order of arrival."""

    def rank(self, inputs: PriorityInputs) -> Rank:
        """See `FcfsPolicy.rank`."""
        return FcfsPolicy().rank(inputs)


GPTS_RATE = 4.0
"""Requests per second of the GPTs applications: neither idle nor overloaded without sharing."""
ABLATIONS: dict[str, dict[str, Any]] = {
    "dependent calls on the server": {"whole_programs": False},
    "order of programs": {"policy": _OrderOfArrival()},
    "deduction": {"deduces_objectives": False},
    "groups": {"has_groups": False},
    "remaining work": {"has_remaining_work": False},
    "holds": {"holds_programs": False},
    "sharing": {"has_prefix_cache": False, "reads_shared_once": False},
}
"""Changes to our system, by the mechanism that they remove."""


class AblatedWorkload(NamedTuple):
    """A workload on our system."""

    make: Callable[..., SimulationConfig]
    sent: Callable[[int], Sent]


def _shared_prompt(seed: int) -> Sent:
    lengths = [pair[:2] for pair in COPILOT for _ in range(pair[2])]
    return [
        (single("copilot", COPILOT_SYSTEM, prompt - COPILOT_SYSTEM, output, i), 0.0)
        for i, (prompt, output) in enumerate(lengths)
    ]


LOADS: dict[str, AblatedWorkload] = {
    "chain summary": AblatedWorkload(
        partial(HEAD.ours, HEAD.a100_13b, capacity=4_096),
        lambda seed: [(chain(60 + seed, 1_024, 25), 0.0)],
    ),
    "25 chain summaries at once": AblatedWorkload(
        partial(HEAD.ours, HEAD.a100_13b, capacity=10_000), lambda seed: many_chains_sent(seed, 25)
    ),
    "map-reduce summary": AblatedWorkload(
        partial(HEAD.limited, HEAD.a100_13b, capacity=45_000),
        lambda seed: [(map_reduce(60 + seed, 1_024, 100), 0.0)],
    ),
    "shared system prompt, 64 calls": AblatedWorkload(
        partial(HEAD.ours, HEAD.a100_7b, capacity=110_000), _shared_prompt
    ),
    f"GPTs applications, {GPTS_RATE:g} requests/s": AblatedWorkload(
        partial(HEAD.ours, HEAD.a6000_7b, capacity=48_000, num_engines=4, max_sequences=120),
        lambda seed: gpts_sent(seed, GPTS_RATE),
    ),
    "multi-agent coding, 16 files": AblatedWorkload(
        partial(HEAD.ours, HEAD.a100_13b, capacity=64_000),
        lambda seed: [(logged_coding(16), 0.0)],
    ),
    "mixed chat and map-reduce": AblatedWorkload(
        partial(HEAD.limited, HEAD.a6000_7b, capacity=53_000, num_engines=4),
        lambda seed: [*mixed_sent(seed)[0], *mixed_sent(seed)[1]],
    ),
}


def run(load: AblatedWorkload, seed: int, changes: dict[str, Any]) -> Simulation:
    """Simulate a workload on our system with changes."""
    simulation = Simulation(replace(load.make(seed=seed), **changes))
    for plan, at_s in load.sent(seed):
        simulation.submit(plan.blueprint, at_s)
    simulation.run()
    return simulation


def mean_s(simulation: Simulation) -> float:
    """Return the mean time of a program."""
    return statistics.fmean(outcome.took_s for outcome in simulation.outcomes)


def slowdowns(load: AblatedWorkload, seeds: Iterable[int]) -> dict[str, list[float]]:
    """Return, by mechanism, how many times as long programs take without it, for each seed."""
    found: dict[str, list[float]] = {name: [] for name in ABLATIONS}
    for seed in seeds:
        full_s = mean_s(run(load, seed, {}))
        for name, changes in ABLATIONS.items():
            found[name].append(mean_s(run(load, seed, changes)) / full_s)
    return found


def memory(load: AblatedWorkload, seeds: Iterable[int]) -> Iterator[MemoryReport]:
    """Yield the memory of our system for each seed."""
    for seed in seeds:
        yield measure(run(load, seed, {}))
