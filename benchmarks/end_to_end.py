"""The six workloads on a real engine: whole programs and request by request.

Both systems run on identical servers (model, KV memory, prefix cache on), get the same prompts
and write the same number of tokens. Only the information that the server receives differs.

Seconds depend on the machine and its other load; engine steps and computed tokens do not.
`--simulated` uses the fake engine, whose steps sleep as long as the steps of the real engine, so
that other load matters little. `--predict` fits the simulator's cost model to the server and
predicts the times of both systems.

    python benchmarks/end_to_end.py [--rounds N] [--only WORKLOAD] [--setting NAME] [--simulated]
        [--predict] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from apps.client import AppAnswer, AppClient
from apps.cost_fit import fit_server, predict_seconds
from apps.plot import Bar, bars
from apps.scaled_workloads import CONTEXT_LEN, SCALED, workload
from simulation.engine import LinearCosts
from temporary_server import served

BLOCK = 16
REAL = ("seeded", "--engine", "local", "--dtype", "float32", "--threads", "1")
SIMULATED = (
    *("--engine", "fake", "--time-per-prompt-token", "1e-4"),
    *("--time-per-output-token", "5e-3"),
)
"""Approximate speed of the real engine: a prompt token and a step."""
ROOMY = 4_096
"""Blocks of an engine whose memory is never full."""
HEAD = (
    "| | request by request | whole programs | ratio | min | max | steps | computed | simulated |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


class SystemResult(NamedTuple):
    """The result of one system in one round."""

    by_kind: dict[str, float]
    """Mean seconds of the programs of each kind."""
    num_steps: int
    num_computed: int
    """Prompt tokens that were computed, including recomputed ones."""


class Pair(NamedTuple):
    """Seconds of one kind of program in one round, and the work of all kinds, for both systems."""

    before_s: float
    after_s: float
    before: SystemResult
    after: SystemResult


@contextlib.contextmanager
def two_servers(
    engine: tuple[str, ...], num_blocks: int, context_len: int
) -> Iterator[tuple[str, str]]:
    """Yield two identical servers.

    The systems swap servers each round, so that neither finds the other's cache.
    """
    options = (*engine, "--num-blocks", str(num_blocks), "--context-len", str(context_len))
    with served(*options) as one, served(*options) as other:
        yield one, other


async def run_system(
    url: str, name: str, seed: int, *, whole: bool, round_trip_s: float
) -> tuple[list[AppAnswer], SystemResult]:
    """Run one workload by one system."""
    async with (
        httpx.AsyncClient(
            base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)
        ) as http,
        AppClient(http, whole=whole, round_trip_s=round_trip_s) as client,
    ):
        began = await _counters(http)
        # Each setting has its own texts, because the previous setting's prompts are in the cache.
        texts = f"{seed}.{name}.{round_trip_s}".replace(" ", "-")
        answers = await client.run(workload(name, seed), texts)
        work = [after - before for before, after in zip(began, await _counters(http), strict=True)]
        return answers, SystemResult(by_kind(answers), *work)


async def _counters(http: httpx.AsyncClient) -> tuple[int, int]:
    """Return the steps and the computed prompt tokens of all engines since their start."""
    engines = (await http.get("/v1/engines")).json()["engines"]
    counters = [engine["counters"] for engine in engines]
    num_computed = sum(c["num_computed_tokens"] + c["num_recomputed_tokens"] for c in counters)
    return sum(c["num_steps"] for c in counters), num_computed


def by_kind(answers: Sequence[AppAnswer]) -> dict[str, float]:
    """Return the mean seconds of the programs of each kind."""
    kinds = dict.fromkeys(answer.kind for answer in answers)
    return {kind: statistics.fmean(a.took_s for a in answers if a.kind == kind) for kind in kinds}


async def peak_held(url: str, name: str, seed: int) -> int:
    """Return the maximum number of blocks that running contexts hold when memory is unlimited."""
    running = asyncio.create_task(run_system(url, name, seed, whole=True, round_trip_s=0.0))
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
) -> dict[str, list[Pair]]:
    """Run both systems round by round and return pairs by kind; the first round is not counted."""
    found: dict[str, list[Pair]] = {}
    for seed in range(rounds + 1):
        sides: dict[bool, SystemResult] = {}
        for whole in (False, True) if seed % 2 else (True, False):
            url = urls[(whole + seed) % 2]
            _, sides[whole] = asyncio.run(
                run_system(url, name, seed, whole=whole, round_trip_s=round_trip_s)
            )
        before, after = sides[False], sides[True]
        for kind in before.by_kind if seed else ():
            pair = Pair(before.by_kind[kind], after.by_kind[kind], before, after)
            found.setdefault(kind, []).append(pair)
    return found


def ratios_of(pairs: Sequence[Pair]) -> list[float]:
    """Return the speedups of whole programs."""
    return [pair.before_s / pair.after_s for pair in pairs]


def line_of(label: str, pairs: Sequence[Pair], forecast: Forecast | None) -> str:
    """Return a row of a table."""
    ratios = ratios_of(pairs)
    cells = [
        label,
        f"{statistics.median(pair.before_s for pair in pairs):.3f}",
        f"{statistics.median(pair.after_s for pair in pairs):.3f}",
        *(f"{each:.2f}" for each in (statistics.median(ratios), min(ratios), max(ratios))),
        _both(pairs, lambda side: side.num_steps),
        _both(pairs, lambda side: side.num_computed),
        "" if forecast is None else f"{forecast[0]:.3f} / {forecast[1]:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _both(pairs: Sequence[Pair], number: Callable[[SystemResult], int]) -> str:
    before = statistics.median(number(pair.before) for pair in pairs)
    after = statistics.median(number(pair.after) for pair in pairs)
    return f"{before:.0f} / {after:.0f}"


Forecast = tuple[float, float]
"""Predicted seconds of both systems."""


class WorkloadReport:
    """Rows and bars of workloads, printed as they are added."""

    def __init__(self, cost: LinearCosts | None) -> None:
        self._cost = cost
        self._lines: dict[str, list[str]] = {}
        self._bars: dict[str, list[Bar]] = {}

    def add(
        self,
        name: str,
        label: str,
        found: dict[str, list[Pair]],
        *,
        num_blocks: int,
        round_trip_s: float,
    ) -> None:
        """Add the result of one setting of a workload."""
        forecasts = self._forecasts(name, len(next(iter(found.values()))), num_blocks, round_trip_s)
        for kind, pairs in found.items():
            full = label if kind == "app" else f"{label}, {kind}"
            forecast = forecasts.get(kind)
            line = line_of(full, pairs, forecast)
            self._lines.setdefault(name, []).append(line)
            print(f"{name}: {line}", flush=True)
            ratios = ratios_of(pairs)
            predicted = None if forecast is None else forecast[0] / forecast[1]
            bar = Bar(full, min(ratios), statistics.median(ratios), max(ratios), predicted)
            self._bars.setdefault(name, []).append(bar)

    def _forecasts(
        self, name: str, rounds: int, num_blocks: int, round_trip_s: float
    ) -> dict[str, Forecast]:
        if self._cost is None:
            return {}
        sides: list[dict[str, list[float]]] = []
        for whole in (False, True):
            by_round: dict[str, list[float]] = {}
            for seed in range(1, rounds + 1):
                predicted = predict_seconds(
                    workload(name, seed),
                    self._cost,
                    whole=whole,
                    capacity=num_blocks * BLOCK,
                    round_trip_s=round_trip_s,
                )
                for kind, seconds in predicted.items():
                    by_round.setdefault(kind, []).append(seconds)
            sides.append(by_round)
        before, after = sides
        return {
            kind: (statistics.median(before[kind]), statistics.median(after[kind]))
            for kind in before
        }

    def write(self, folder: Path) -> None:
        """Write one page of tables, and a plot for every workload."""
        folder.mkdir(parents=True, exist_ok=True)
        sections = []
        mark = "" if self._cost is None else "simulated"
        for name, lines in self._lines.items():
            title, plot = name[0].upper() + name[1:], f"{name.replace(' ', '-')}.svg"
            (folder / plot).write_text(bars(title, self._bars[name], mark=mark))
            table = "\n".join([HEAD, *lines])
            sections.append(
                f"## {title}\n\n{SCALED[name].__doc__}\n\n{table}\n\n![{title}]({plot})\n"
            )
        (folder / "tables.md").write_text("\n".join(sections))


def main() -> None:
    """Run the workloads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=tuple(SCALED), action="append")
    parser.add_argument("--setting", choices=("0", "25", "tenth", "pressure"), action="append")
    parser.add_argument("--simulated", action="store_true", help="a simulated engine")
    parser.add_argument(
        "--predict", action="store_true", help="fit the simulator and predict the times"
    )
    parser.add_argument("--out", type=Path, help="folder for tables and plots")
    arguments = parser.parse_args()
    engine = SIMULATED if arguments.simulated else REAL
    names = arguments.only or list(SCALED)
    settings = arguments.setting or ["0", "25", "tenth", "pressure"]
    peaks: dict[str, int] = {}
    with two_servers(engine, ROOMY, CONTEXT_LEN) as urls:
        cost = None
        if arguments.predict:
            cost, missed_by = fit_server(urls[0])
            print(f"{cost}\nmisses what it was fitted to by {missed_by:.0%} (median)", flush=True)
        report = WorkloadReport(cost)
        for name in names:
            began = time.perf_counter()
            if "pressure" in settings:
                peaks[name] = asyncio.run(peak_held(urls[1], name, 0))
            for setting in settings:
                if setting == "pressure" or (setting == "tenth" and "summary" not in name):
                    continue
                trip_s = 0.0 if setting == "0" else 0.025
                if setting == "tenth":
                    trip_s = call_s(urls[0], name) / 10
                found = compare(urls, name, arguments.rounds, trip_s)
                label = f"round trip {trip_s * 1e3:.0f} ms"
                report.add(name, label, found, num_blocks=ROOMY, round_trip_s=trip_s)
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    for name, peak in peaks.items():
        context_len = longest(name)
        num_blocks = max(math.ceil(peak * 2 / 3), context_len // BLOCK)
        with two_servers(engine, num_blocks, context_len) as urls:
            found = compare(urls, name, arguments.rounds, 0.0)
        label = f"{num_blocks} blocks for {peak}"
        report.add(name, label, found, num_blocks=num_blocks, round_trip_s=0.0)
    if arguments.out is not None:
        report.write(arguments.out)


def longest(name: str) -> int:
    """Return the tokens of the longest call of a workload, in whole blocks."""
    calls = [
        call.num_prompt + call.num_output + 1
        for sent in workload(name, 0)
        for call in sent.plan.blueprint.calls.values()
    ]
    return math.ceil(max(calls) * 1.1 / BLOCK) * BLOCK


def call_s(url: str, name: str) -> float:
    """Return the mean seconds of one call of a workload, request by request, without other load."""
    sent = workload(name, 99)[0]
    num_calls = len(sent.plan.nodes)
    answers, _ = asyncio.run(run_system(url, name, 99, whole=False, round_trip_s=0.0))
    return answers[0].took_s / (num_calls if "chain" in name else 2)


if __name__ == "__main__":
    main()
