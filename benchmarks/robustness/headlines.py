"""The rows of the first table of `results/paper/README.md`, and the claim that each row is checked
against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from apps.scenario import Scenario
from apps.workloads import (
    LASTING,
    Point,
    chain_summary,
    chain_with_background,
    gpts,
    many_chains,
    map_reduce_summary,
    mixed,
    multi_agent_coding,
    shared_system_prompt,
)

SUSTAINED = "GPTs for ten minutes"
RUNS: dict[str, Callable[[int, Scenario], Iterator[Point]]] = {
    "chain": partial(chain_summary, sweep=[(25, 1_024)]),
    "many chains": partial(many_chains, numbers=[25]),
    "map-reduce": partial(map_reduce_summary, sweep=[(100, 1_024)]),
    "shared prompt": partial(shared_system_prompt, batches=[16, 64]),
    "coding": partial(multi_agent_coding, numbers=[16]),
    "mixed": mixed,
    "background": partial(chain_with_background, rates=[3.5]),
    "GPTs": partial(gpts, lasting=LASTING[:1]),
    SUSTAINED: partial(gpts, lasting=LASTING[1:]),
}
"""Simulations by name, cheapest first; each yields the points of one workload."""


class Headline(NamedTuple):
    """One row."""

    title: str
    run: str
    label: str
    """Label of the point."""
    claim: float | None
    """Smallest ratio that the project claims; None without a claim."""


HEADLINES = (
    Headline("chain summary", "chain", "output 25, chunk 1024", 1.3),
    Headline(
        "chain summary, 3.5 background requests/s", "background", "3.5 background requests/s", 2.2
    ),
    Headline("25 chain summaries at once", "many chains", "25 apps", 1.6),
    Headline("map-reduce summary", "map-reduce", "output 100, chunk 1024", 2.2),
    Headline(
        "shared system prompt, 64 calls, prefix stored once",
        "shared prompt",
        "batch 64, prefix stored once",
        None,
    ),
    Headline(
        "shared system prompt, 16 calls, nothing shared",
        "shared prompt",
        "batch 16, nothing shared",
        None,
    ),
    Headline("GPTs, rate of 500 requests", "GPTs", "rate at 300 ms a token, 500 requests", 12.0),
    Headline(
        "GPTs, rate for ten minutes", SUSTAINED, "rate at 300 ms a token, for ten minutes", None
    ),
    Headline("coding, latency baseline", "coding", "16 files, latency baseline", 7.0),
    Headline("coding, throughput baseline", "coding", "16 files, throughput baseline", 2.4),
    Headline("mixed: chats, latency baseline", "mixed", "chat, latency baseline", 4.0),
    Headline("mixed: map-reduce, latency baseline", "mixed", "map-reduce, latency baseline", 3.3),
    Headline("mixed: chats, throughput baseline", "mixed", "chat, throughput baseline", None),
    Headline(
        "mixed: map-reduce, throughput baseline", "mixed", "map-reduce, throughput baseline", None
    ),
)
