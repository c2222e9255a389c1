"""Gain of `accelerate` for apps in the patterns of public cookbooks.

    cd benchmarks; python -m cookbook.measure [--rounds N] [--round-trip S] [--scale N] [--out FILE]

Each app runs plain and accelerated in turns, with blocking calls and with coroutines, on one server
with `--engine fake` whose calls take 20 ms, behind a proxy that adds the round trip. A row has the
median times in ms and their ratio, plain over accelerated; the last rows have the geometric means,
the smallest ratios, and the share of calls that ran in the first program of their run. Nothing is
subtracted; the first round is not counted. `--scale` multiplies the times of calls and round
trips: the larger it is, the closer each ratio is to its ideal, which the numbers of consecutive
calls and round trips determine alone. Rounds of all apps follow each other, so that a busy
second of the machine meets one round of an app. An app whose results differ ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from conure.adapters.client import Client
from conure.cli.delayed_connection import delayed
from temporary_server import served

from .cases import AppCase, AsyncRun, Run, langchain_cases, llamaindex_cases
from .llamaindex_apps import SCRIPT

CALL_S = 0.02
T = TypeVar("T")
FRAMEWORKS = {"langchain": langchain_cases, "llamaindex": llamaindex_cases}


class Pairs(NamedTuple):
    """Seconds of one app in every round, plain and accelerated."""

    plain_s: list[float]
    fast_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Plain over accelerated, in every round."""
        return [p / f for p, f in zip(self.plain_s, self.fast_s, strict=True)]

    def text(self) -> str:
        """Return the medians in ms and the median of the ratios."""
        if not self.plain_s:
            return f"{'-':>7} {'-':>7} {'-':>6} "
        plain, fast = (1000 * statistics.median(each) for each in self)
        return f"{plain:7.0f} {fast:7.0f} {statistics.median(self.ratios):6.2f}x"


class Row(NamedTuple):
    """The measurements of one app."""

    case: AppCase
    blocking: Pairs
    awaited: Pairs


def run_round(row: Row, number: int, loop: asyncio.Runner) -> None:
    """Run an app once in all four ways; round 0 does not count, odd rounds run the plain app first.

    All rounds use one event loop, as a server does, so that connections stay open.
    """
    case = row.case
    gc.collect()
    is_counted, is_plain_first = number > 0, number % 2 == 1
    if case.run is not None:
        runs = (case.run, case.fast)
        found = [timed(run) for run in ordered(runs, is_plain_first)]
        add(row.blocking, *ordered(found, is_plain_first), is_counted=is_counted)
    aruns = ordered((case.arun, case.afast), is_plain_first)
    results = loop.run(atimed_pair(*aruns))
    add(row.awaited, *ordered(results, is_plain_first), is_counted=is_counted)


def ordered(pair: Sequence[T], is_as_given: bool) -> Sequence[T]:
    """Return a pair, or the pair reversed."""
    return pair if is_as_given else pair[::-1]


def add(
    pairs: Pairs, plain: tuple[float, Any], fast: tuple[float, Any], *, is_counted: bool
) -> None:
    """Compare two results and record their times."""
    if plain[1] != fast[1]:
        raise SystemExit(f"plain: {plain[1]!r}\naccelerated: {fast[1]!r}")
    if is_counted:
        pairs.plain_s.append(plain[0])
        pairs.fast_s.append(fast[0])


def timed(run: Run) -> tuple[float, Any]:
    """Return the seconds of a run and its result."""
    start = time.perf_counter()
    made = run()
    return time.perf_counter() - start, made


async def atimed_pair(*runs: AsyncRun) -> list[tuple[float, Any]]:
    """`timed` for two coroutines, one after the other."""
    results = []
    for run in runs:
        start = time.perf_counter()
        made = await run()
        results.append((time.perf_counter() - start, made))
    return results


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return the figures of the last lines."""
    figures: dict[str, Any] = {}
    for way in ("blocking", "awaited"):
        of_app = [getattr(row, way).ratios for row in rows]
        ratios = [statistics.median(each) for each in of_app if each]
        if ratios:
            figures[f"{way}_geometric_mean"] = round(statistics.geometric_mean(ratios), 3)
            figures[f"{way}_smallest"] = round(min(ratios), 3)
    counts = [row.case.counts() for row in rows]
    figures["calls"] = sum(each.num_calls for each in counts)
    figures["calls_planned"] = sum(each.num_planned for each in counts)
    figures["calls_in_first_program"] = sum(each.num_in_first for each in counts)
    return figures


def record(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the times of all rounds, in ms."""
    return [
        {
            "app": row.case.name,
            **{
                f"{way}_{kind}_ms": [round(1000 * each, 1) for each in getattr(pairs, f"{kind}_s")]
                for way, pairs in (("blocking", row.blocking), ("awaited", row.awaited))
                for kind in ("plain", "fast")
            },
            **row.case.counts()._asdict(),
        }
        for row in rows
    ]


@contextmanager
def far_server(round_trip_s: float, call_s: float = CALL_S) -> Iterator[Client]:
    """Yield a client of a temporary server behind the proxy, whose calls take `call_s`."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as script:
        json.dump(SCRIPT, script)
        script.flush()
        options = ("--engine", "fake", "--time-per-call", str(call_s), "--script", script.name)
        with (
            served(*options) as url,
            delayed(url, round_trip_s) as far,
            Client(far) as client,
        ):
            yield client


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-trip", type=float, default=0.025)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--frameworks", nargs="*", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    round_trip_s, call_s = options.scale * options.round_trip, options.scale * CALL_S
    made: dict[str, Any] = {"round_trip_s": round_trip_s, "call_s": call_s}
    with far_server(round_trip_s, call_s) as client, asyncio.Runner() as loop:
        for name in options.frameworks:
            rows = [
                Row(case, Pairs([], []), Pairs([], []))
                for case in FRAMEWORKS[name](client)
                if not options.only or case.name in options.only
            ]
            for number in range(options.rounds + 1):
                for row in rows:
                    run_round(row, number, loop)
            heads = 2 * f"{'plain':>7} {'fast':>7} {'ratio':>7} "
            print(f"{name:22} {heads}")
            for row in rows:
                print(f"{row.case.name:22} {row.blocking.text()} {row.awaited.text()}")
            made[name] = {"summary": summary(rows), "apps": record(rows)}
            print("".join(f"  {key}: {value}\n" for key, value in summary(rows).items()))
    if options.out:
        options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
