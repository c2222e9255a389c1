"""The paper's workloads in the paper's setting, simulated: Conure's ratios and the paper's.

    python benchmarks/paper.py [--seeds N] [--only WORKLOAD] [--results FOLDER] [--out FOLDER]

Prints a table for every workload; with --results, also the first table, the sensitivity table and
the ablations, from the folder that `python -m robustness` fills. With --out, writes the tables and
plots to a folder.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from apps import scenario
from apps.plot import Bar, bars
from apps.workloads import RECORDED, WORKLOADS, Point, Workload
from robustness import tables
from robustness.results import Results

HEAD = "| | baseline | ours | ratio | min | max | paper | |\n|---|--:|--:|--:|--:|--:|--:|---|"
BAR, BARS = "#", 4
"""Characters of a bar per unit of a ratio."""
LONGEST = 60
LEAST = "≥ "
"""Prefix of a value that is only a lower bound."""


def is_least(points: list[Point]) -> bool:
    """Return whether a comparison is only a lower bound."""
    return all(point.is_least for point in points)


def table(points: list[list[Point]]) -> list[str]:
    """Return the lines of a Markdown table; each inner list is one comparison for all seeds."""
    lines = [HEAD]
    for each in points:
        ratios = [point.ratio for point in each]
        middle = statistics.median(ratios)
        paper = "" if math.isnan(each[0].paper) else f"{each[0].paper:g}"
        least = LEAST if is_least(each) else ""
        spread = f"{least}{min(ratios):.2f} | {least}{max(ratios):.2f}"
        lines.append(
            f"| {each[0].label} "
            f"| {statistics.median(point.before for point in each):.4g} "
            f"| {least}{statistics.median(point.after for point in each):.4g} "
            f"| {least}{middle:.2f} | {spread} | {paper} "
            f"| `{BAR * min(round(BARS * middle), LONGEST)}` |"
        )
    return lines


def plotted(points: list[list[Point]]) -> list[Bar]:
    """Return the ratios of a table as bars."""
    rows = []
    for each in points:
        ratios = [point.ratio for point in each]
        paper = None if math.isnan(each[0].paper) else each[0].paper
        label = each[0].label + (f" ({LEAST.strip()})" if is_least(each) else "")
        rows.append(Bar(label, min(ratios), statistics.median(ratios), max(ratios), paper))
    return rows


def main() -> None:
    """Run the workloads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=(*WORKLOADS, *RECORDED), action="append")
    parser.add_argument("--results", type=Path, help="folder of the results of robustness")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []
    if arguments.results is not None:
        results = Results(arguments.results)
        for head, rows in (
            ("Head", tables.headlines(results)),
            ("Sensitivity", tables.sensitivity(results)),
            ("Ablations", tables.ablations()),
            ("Memory", tables.memories()),
        ):
            lines += [f"## {head}", "", *rows, ""]
        print("\n".join(lines), flush=True)
    every = {name: _at_head(run) for name, run in WORKLOADS.items()} | RECORDED
    for name in arguments.only or every:
        began = time.perf_counter()
        by_seed = [list(every[name](seed)) for seed in range(arguments.seeds)]
        points = [list(each) for each in zip(*by_seed, strict=True)]
        doc = ((WORKLOADS | RECORDED)[name].__doc__ or "").split("\n\n")[0]
        section = [f"## {name[0].upper()}{name[1:]}", "", doc, "", *table(points), ""]
        print("\n".join(section), flush=True)
        print(f"{time.perf_counter() - began:.1f} s", file=sys.stderr)
        lines += section
        if arguments.out is not None:
            plot = f"{name.replace(',', '').replace(' ', '-')}.svg"
            title = f"{name[0].upper()}{name[1:]}: how many times as fast"
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / plot).write_text(bars(title, plotted(points), mark="the paper's"))
            lines += [f"![{name}]({plot})", ""]
    if arguments.out is not None:
        (arguments.out / "tables.md").write_text("\n".join(lines))


def _at_head(run: Workload) -> Callable[[int], Iterator[Point]]:
    return lambda seed: run(seed, scenario.HEAD)


if __name__ == "__main__":
    main()
