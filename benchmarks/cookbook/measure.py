"""Gain of `accelerate` for thirty apps in the patterns of public cookbooks (`chains`).

    cd benchmarks; python -m cookbook.measure [--repeats N] [--round-trip S] [--only NAME ...]

Each app runs plain and accelerated in turns, with `invoke` and with `ainvoke`, on one server with
`--engine fake` whose calls take 20 ms, behind a proxy that adds the round trip. A row has the
median times in ms and their ratio, plain over accelerated; the last row has the geometric means,
the smallest ratios, and the share of calls that ran in the first program of their run. Nothing is
subtracted; the first pair is not counted. An app whose two results differ ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from conure.adapters.client import Client
from conure.adapters.langchain import Accelerated, ChatConure, accelerate
from conure.cli.delayed_connection import delayed
from temporary_server import served

from .chains import App, cookbook


class Pair(NamedTuple):
    """Times of one app, plain and accelerated."""

    plain_s: list[float]
    fast_s: list[float]

    @property
    def ratio(self) -> float:
        """Median of plain over accelerated, of the pairs."""
        return statistics.median(p / f for p, f in zip(self.plain_s, self.fast_s, strict=True))

    def text(self) -> str:
        """Return the medians in ms and the ratio."""
        plain, fast = (1000 * statistics.median(each) for each in self)
        return f"{plain:7.0f} {fast:7.0f} {self.ratio:6.2f}x"


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a run and its result."""
    start = time.perf_counter()
    made = run()
    return time.perf_counter() - start, made


async def atimed(run: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """`timed`, for coroutines."""
    start = time.perf_counter()
    made = await run()
    return time.perf_counter() - start, made


def compare(app: App, fast: Accelerated, repeats: int) -> Pair:
    """Return the times with `invoke`."""
    pair = Pair([], [])
    for index in range(repeats + 1):
        gc.collect()
        plain_s, plain = timed(lambda: app.chain.invoke(app.given))
        fast_s, made = timed(lambda: fast.invoke(app.given))
        check(plain, made)
        if index:
            pair.plain_s.append(plain_s)
            pair.fast_s.append(fast_s)
    return pair


async def acompare(app: App, fast: Accelerated, repeats: int) -> Pair:
    """Return the times with `ainvoke`."""
    pair = Pair([], [])
    for index in range(repeats + 1):
        gc.collect()
        plain_s, plain = await atimed(lambda: app.chain.ainvoke(app.given))
        fast_s, made = await atimed(lambda: fast.ainvoke(app.given))
        check(plain, made)
        if index:
            pair.plain_s.append(plain_s)
            pair.fast_s.append(fast_s)
    return pair


def check(plain: Any, made: Any) -> None:
    """End the benchmark if two results differ."""
    if plain != made:
        raise SystemExit(f"plain: {plain!r}\naccelerated: {made!r}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--round-trip", type=float, default=0.025)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    rows: list[tuple[Pair, Pair]] = []
    num_calls = num_in_first = 0
    with (
        served("--engine", "fake", "--time-per-call", "0.02") as url,
        delayed(url, options.round_trip) as far,
        Client(far) as client,
    ):
        llm = ChatConure(client=client, temperature=0, max_tokens=400)
        print(
            f"{'app':20} {'plain':>7} {'fast':>7} {'sync':>7} {'plain':>7} {'fast':>7} {'async':>7}"
        )
        for name, app in cookbook(llm).items():
            if options.only and name not in options.only:
                continue
            fast = accelerate(app.chain, model=llm)
            row = (
                compare(app, fast, options.repeats),
                asyncio.run(acompare(app, fast, options.repeats)),
            )
            rows.append(row)
            print(f"{name:20} {row[0].text()} {row[1].text()}", flush=True)
            for run in fast.explain().runs:
                num_calls += run.num_served + len(run.misses)
                num_in_first += run.num_in_first_program
    for label, pairs in zip(("sync", "async"), zip(*rows, strict=True), strict=True):
        ratios = [pair.ratio for pair in pairs]
        mean = statistics.geometric_mean(ratios)
        print(f"{label}: geometric mean {mean:.2f}x, smallest {min(ratios):.2f}x")
    print(f"{num_in_first} of {num_calls} calls ran in the first program of their run")


if __name__ == "__main__":
    main()
