"""A scenario: everything that the paper leaves open and that a ratio may depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from simulation.engine import CostModel, LinearCosts
from simulation.simulation import SimulationConfig

from .programs import AppPlan
from .setting import A100_7B, A100_13B, A6000_7B, baseline, latency_tokens, ours

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Costs of the machines, and factors on the paper's setting."""

    a100_13b: LinearCosts = A100_13B
    a100_7b: LinearCosts = A100_7B
    a6000_7b: LinearCosts = A6000_7B
    capacity: float = 1.0
    """Factor on the KV memory of every engine of every system."""
    lengths: float = 1.0
    """Factor on the length of every text and output."""
    round_trips: float = 1.0
    """Factor on the time of a round trip."""
    burst_start_s: float = 15.0
    """Start of the first burst of figure 19 after the first chat."""
    burst_gap_s: float = 10.0
    """Time between the last program of a burst and the first of the next."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changed fields of our system's `SimulationConfig`, for ablations."""

    def baseline(self, cost: CostModel, seed: int, **changes: Any) -> SimulationConfig:
        """Return a system that works request by request."""
        return self._scaled(baseline(cost, seed, **changes))

    def ours(self, cost: CostModel, seed: int, **changes: Any) -> SimulationConfig:
        """Return our system, with the scenario's changes to it."""
        setting = self._scaled(ours(cost, seed, **changes))
        return replace(setting, **self.changes)

    def limited(self, cost: LinearCosts, seed: int, **changes: Any) -> SimulationConfig:
        """Return our system, with short steps while a latency-critical call runs."""
        return self.ours(cost, seed, latency_tokens=latency_tokens(cost), **changes)

    def plan(self, plan: AppPlan) -> AppPlan:
        """Return an application with its lengths in this scenario."""
        return plan if self.lengths == 1.0 else _with_lengths(plan, self.lengths)

    def _scaled(self, setting: SimulationConfig) -> SimulationConfig:
        network, factor = setting.round_trip_s, self.round_trips
        return replace(
            setting,
            capacity=round(setting.capacity * self.capacity),
            round_trip_s=lambda: factor * network(),
        )


HEAD = Scenario()
"""The scenario of the page's first table."""


@cache
def _with_lengths(plan: AppPlan, factor: float) -> AppPlan:
    def scaled(num_tokens: int) -> int:
        return max(round(num_tokens * factor), 1) if num_tokens else 0

    nodes = [
        node
        | {
            "prompt": [
                part | {"max_tokens": scaled(part["max_tokens"])} if "output" in part else part
                for part in node["prompt"]
            ]
        }
        for node in plan.nodes
    ]
    return AppPlan(nodes, plan.outputs, {name: scaled(n) for name, n in plan.lengths.items()})
