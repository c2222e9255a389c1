"""Overload: ten times more programs than a server can run.

    python benchmarks/serving/overload.py --max-wait-s 4
    python benchmarks/serving/overload.py [--seconds S] [--factor N] [OPTION OF conure serve ...]

A program is a chain of four calls of 64 tokens on the fake engine at 20 ms per token, at most 16 at
once: 5.2 s alone, 3 programs per second. Programs arrive evenly, first at 0.8 of that rate and then
at `factor` times, each for `seconds`. Reports the time of accepted programs from the submission to
their end, and of refusals, with the share that names `Retry-After`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from temporary_server import served

NUM_CALLS = 4
NUM_TOKENS = 64
TOKEN_S = 0.02
MAX_SEQUENCES = 16
CAPACITY = MAX_SEQUENCES / (NUM_CALLS * NUM_TOKENS * TOKEN_S)
"""Programs per second."""


@dataclass
class LoadPhase:
    """What happened at one rate of arrival."""

    factor: float
    accepted_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    num_without_retry_after: int = 0
    num_failed: int = 0

    def record(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            "factor": self.factor,
            "accepted": len(self.accepted_s),
            "refused": len(self.refused_s),
            "failed": self.num_failed,
            "refused_without_retry_after": self.num_without_retry_after,
            "accepted_p50_s": percentile(self.accepted_s, 50),
            "accepted_p99_s": percentile(self.accepted_s, 99),
            "refused_p50_ms": 1e3 * percentile(self.refused_s, 50),
            "refused_p99_ms": 1e3 * percentile(self.refused_s, 99),
        }


def percentile(values: list[float], share: float) -> float:
    """Return a percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] if ordered else 0.0


def chain() -> dict[str, Any]:
    """Return the program."""
    nodes = []
    for number in range(NUM_CALLS):
        source = [{"input": f"v{number - 1}"}] if number else []
        output = {"output": f"v{number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        prompt = [{"text": "Go on: "}, *source, output]
        nodes.append({"id": f"c{number}", "op": "generate", "prompt": prompt})
    return {"program": {"nodes": nodes, "outputs": [f"v{NUM_CALLS - 1}"]}}


async def run_program(client: httpx.AsyncClient, phase: LoadPhase) -> None:
    """Submit one program and wait for its last value, or note the refusal."""
    started = time.perf_counter()
    answer = await client.post("/v1/programs", json=chain())
    if answer.status_code == 429:
        phase.refused_s.append(time.perf_counter() - started)
        phase.num_without_retry_after += "Retry-After" not in answer.headers
        return
    url = f"{answer.json()['url']}/variables/v{NUM_CALLS - 1}"
    status = 202
    while status == 202:
        status = (await client.get(url, params={"wait_s": 30})).status_code
    if status == 200:
        phase.accepted_s.append(time.perf_counter() - started)
    else:
        phase.num_failed += 1


async def offer(url: str, factor: float, seconds: float) -> LoadPhase:
    """Offer programs at `factor` times the capacity."""
    phase = LoadPhase(factor)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=500)
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client,
        asyncio.TaskGroup() as tasks,
    ):
        start = time.perf_counter()
        for number in range(int(seconds * factor * CAPACITY)):
            due = start + number / (factor * CAPACITY)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(run_program(client, phase))
    return phase


def main() -> None:
    """Run both phases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--factor", type=float, default=10)
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args()
    fake = ["--engine", "fake", "--time-per-output-token", str(TOKEN_S)]
    with served(*fake, "--max-sequences", str(MAX_SEQUENCES), *rest) as url:
        phases = [
            asyncio.run(offer(url, factor, options.seconds)) for factor in (0.8, options.factor)
        ]
    for phase in phases:
        figures = phase.record()
        text = (
            json.dumps(figures)
            if options.json
            else "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
        )
        sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
