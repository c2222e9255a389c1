"""The scenarios of the sensitivity table: one thing differs from the first table in each."""

from __future__ import annotations

from dataclasses import replace

from apps.scenario import HEAD, Scenario
from apps.setting import (
    A100,
    A6000,
    CALL_S,
    LLAMA_7B,
    LLAMA_13B,
    RECORDED_A100_13B,
    RECORDED_A6000_7B,
    SHARE,
    roofline,
)

TOKENS_SHARE, TOKENS_SLOWDOWN = 0.8426, 5.683
"""The fit of figure 10 with all cost on tokens: share of the data sheet's rates for weights, and
how many times as long the KV takes as at that share."""


def with_costs(share: float, call_s: float, kv_slowdown: float = 1.0) -> Scenario:
    """Return a scenario with other parameters of the cost model."""
    costs = [
        roofline(accelerator, model, share, call_s)
        for accelerator, model in ((A100, LLAMA_13B), (A100, LLAMA_7B), (A6000, LLAMA_7B))
    ]
    costs = [cost._replace(held_token_s=cost.held_token_s * kv_slowdown) for cost in costs]
    return replace(HEAD, a100_13b=costs[0], a100_7b=costs[1], a6000_7b=costs[2])


BURSTS = {
    "bursts from 0 s": replace(HEAD, burst_start_s=0.0),
    "bursts from 5 s": replace(HEAD, burst_start_s=5.0),
    "bursts from 30 s": replace(HEAD, burst_start_s=30.0),
    "bursts 5 s apart": replace(HEAD, burst_gap_s=5.0),
    "bursts 20 s apart": replace(HEAD, burst_gap_s=20.0),
}
"""Scenarios of the mixed workload only."""

CELLS: dict[str, Scenario] = {
    "first table": HEAD,
    "capacity x 0.6": replace(HEAD, capacity=0.6),
    "capacity x 0.8": replace(HEAD, capacity=0.8),
    "capacity x 1.25": replace(HEAD, capacity=1.25),
    "capacity x 1.6": replace(HEAD, capacity=1.6),
    "lengths x 0.75": replace(HEAD, lengths=0.75),
    "lengths x 1.25": replace(HEAD, lengths=1.25),
    "figure 10 at all rates": with_costs(0.968, 1.435e-3),
    "figure 10, all cost on tokens": with_costs(TOKENS_SHARE, 0.0, TOKENS_SLOWDOWN),
    "data sheet alone": with_costs(1.0, 0.0),
    "share 0.6": with_costs(0.6, CALL_S),
    "half the time per call": with_costs(SHARE, CALL_S / 2),
    "twice the time per call": with_costs(SHARE, CALL_S * 2),
    "recorded line": replace(HEAD, a100_13b=RECORDED_A100_13B, a6000_7b=RECORDED_A6000_7B),
    "round trips x 0.5": replace(HEAD, round_trips=0.5),
    "no round trips": replace(HEAD, round_trips=0.0),
    **BURSTS,
}
"""Scenarios by name. The recorded line has no figures for the A100 with 7B."""
