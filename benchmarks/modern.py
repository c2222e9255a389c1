"""The six workloads on a real engine: whole programs against request by request.

Both sides run on servers alike (model, KV memory, prefix cache on), get the same prompts
and write as many tokens; they differ in what the server is told.

    python benchmarks/modern.py [--rounds N] [--only WORKLOAD] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from apps.client import Answer, Client
from apps.scaled import CONTEXT_LEN, SCALED, workload
from own_server import served

BLOCK = 16
OPTIONS = ("--engine", "local", "--dtype", "float32", "--threads", "1")
ROOMY = 4_096
"""Blocks of an engine that nobody fills."""
HEAD = "| | request by request | whole | ratio | min | max |\n|---|--:|--:|--:|--:|--:|"


@contextlib.contextmanager
def two_servers(num_blocks: int, context_len: int) -> Iterator[tuple[str, str]]:
    """Two servers alike, which the sides exchange round by round: neither side finds what the
    other one has cached.
    """
    options = (*OPTIONS, "--num-blocks", str(num_blocks), "--context-len", str(context_len))
    with served(*options) as one, served(*options) as other:
        yield one, other


async def run_side(
    url: str, name: str, seed: int, *, whole: bool, round_trip_s: float
) -> list[Answer]:
    """One workload by one side."""
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as http:
        client = Client(http, whole=whole, round_trip_s=round_trip_s)
        return await client.run(workload(name, seed), f"{seed}.{name}".replace(" ", "-"))


def by_kind(answers: Sequence[Answer]) -> dict[str, float]:
    """Mean seconds of the programs of each kind."""
    kinds = dict.fromkeys(answer.kind for answer in answers)
    return {kind: statistics.fmean(a.took_s for a in answers if a.kind == kind) for kind in kinds}


async def peak_held(url: str, name: str, seed: int) -> int:
    """Blocks that running contexts hold at most, with room for everything."""
    running = asyncio.create_task(run_side(url, name, seed, whole=True, round_trip_s=0.0))
    peak = 0
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while not running.done():
            engines = (await http.get("/v1/engines")).json()["engines"]
            peak = max([peak, *(engine["counters"]["num_held"] for engine in engines)])
            await asyncio.sleep(0.01)
    await running
    return peak


def compare(
    urls: tuple[str, str], name: str, rounds: int, round_trip_s: float
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of both sides by kind of program, round by round; the first is not counted."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(rounds + 1):
        seconds = []
        order = (0, 1) if seed % 2 else (1, 0)
        sides: dict[int, dict[str, float]] = {}
        for side in order:
            answers = asyncio.run(
                run_side(
                    urls[(side + seed) % 2], name, seed, whole=side == 1, round_trip_s=round_trip_s
                )
            )
            sides[side] = by_kind(answers)
        seconds = [(kind, sides[0][kind], sides[1][kind]) for kind in sides[0]]
        if seed:
            for kind, before, after in seconds:
                found.setdefault(kind, []).append((before, after))
    return found


def lines_of(label: str, found: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Rows of a table."""
    lines = []
    for kind, pairs in found.items():
        ratios = [before / after for before, after in pairs]
        whole = label if kind == "app" else f"{label}, {kind}"
        lines.append(
            f"| {whole} | {statistics.median(p[0] for p in pairs):.3f} "
            f"| {statistics.median(p[1] for p in pairs):.3f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} | {max(ratios):.2f} |"
        )
    return lines


def main() -> None:
    """Run the workloads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=tuple(SCALED), action="append")
    parser.add_argument("--setting", choices=("0", "25", "tenth", "pressure"), action="append")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.only or list(SCALED)
    settings = arguments.setting or ["0", "25", "tenth", "pressure"]
    lines: dict[str, list[str]] = {name: [] for name in names}
    peaks: dict[str, int] = {}
    with two_servers(ROOMY, CONTEXT_LEN) as urls:
        for name in names:
            began = time.perf_counter()
            peaks[name] = asyncio.run(peak_held(urls[1], name, 0))
            for setting in settings:
                if setting == "pressure" or (
                    setting == "tenth" and len(SCALED) and "summary" not in name
                ):
                    continue
                trip_s = 0.0 if setting == "0" else 0.025
                if setting == "tenth":
                    trip_s = call_s(urls[0], name) / 10
                found = compare(urls, name, arguments.rounds, trip_s)
                lines[name] += lines_of(f"round trip {trip_s * 1e3:.0f} ms", found)
                print(name, *lines[name][-len(found) :], sep="\n", flush=True)
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    if "pressure" in settings:
        for name in names:
            context_len = longest(name)
            num_blocks = max(math.ceil(peaks[name] * 2 / 3), context_len // BLOCK)
            with two_servers(num_blocks, context_len) as urls:
                found = compare(urls, name, arguments.rounds, 0.0)
            lines[name] += lines_of(f"{num_blocks} blocks for {peaks[name]}", found)
            print(name, *lines[name][-len(found) :], sep="\n", flush=True)
    if arguments.out is not None:
        text = [
            f"\n## {n[0].upper()}{n[1:]}\n\n{SCALED[n].__doc__}\n\n{HEAD}\n" + "\n".join(rows)
            for n, rows in lines.items()
        ]
        arguments.out.write_text("\n".join(text))


def longest(name: str) -> int:
    """Tokens of the longest call of a workload, in whole blocks."""
    calls = [
        call.num_prompt + call.num_output + 1
        for sent in workload(name, 0)
        for call in sent.plan.blueprint.calls.values()
    ]
    return math.ceil(max(calls) * 1.1 / BLOCK) * BLOCK


def call_s(url: str, name: str) -> float:
    """How long one call of a workload takes on average, request by request, alone."""
    sent = workload(name, 99)[0]
    num_calls = len(sent.plan.nodes)
    answers = asyncio.run(run_side(url, name, 99, whole=False, round_trip_s=0.0))
    return answers[0].took_s / (num_calls if "chain" in name else 2)


if __name__ == "__main__":
    main()
