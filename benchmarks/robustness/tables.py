"""The Markdown tables of the page: headlines, sensitivity, ablations and memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from apps.workloads import Point

from .ablations import ABLATIONS, LOADS, memory, slowdowns
from .cells import CELLS
from .headlines import HEADLINES, Headline
from .results import Results

FIRST = "first table"
ABLATION_SEEDS = range(5)
LEAST = "≥ "
"""Prefix of a value that is only a lower bound."""


def _points(results: Results, cell: str, headline: Headline) -> list[Point]:
    return list(results.points(cell, headline.run, headline.label))


def _median(points: Sequence[Point]) -> float:
    return statistics.median(point.ratio for point in points)


def _shown(points: Sequence[Point], value: float) -> str:
    return f"{LEAST if all(point.is_least for point in points) else ''}{value:.2f}"


def _span(low: str, high: str) -> str:
    return f"{low} to {high}"


def headlines(results: Results) -> list[str]:
    """Return the first table: medians and ranges over the seeds, and over all cells."""
    lines = [
        "| | ours | over seeds | seeds | paper | claim | medians of all cells | claim holds in |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for headline in HEADLINES:
        points = _points(results, FIRST, headline)
        if not points:
            lines.append(f"| {headline.title} | not run | | 0 | | | | |")
            continue
        ratios = [point.ratio for point in points]
        cells = [found for cell in CELLS if (found := _points(results, cell, headline))]
        medians = sorted((_median(found), found) for found in cells)
        spread = "-"
        if len(medians) > 1:
            spread = _span(
                _shown(medians[0][1], medians[0][0]), _shown(medians[-1][1], medians[-1][0])
            )
        claim, holds = "-", "-"
        if headline.claim is not None:
            num_held = sum(value >= headline.claim for value, _ in medians)
            claim, holds = f"{headline.claim:g}", f"{num_held} of {len(medians)}"
            if _median(points) < headline.claim:
                claim += " **missed**"
        lines.append(
            f"| {headline.title} | {_shown(points, _median(points))} "
            f"| {_span(_shown(points, min(ratios)), _shown(points, max(ratios)))} | {len(points)} "
            f"| {points[0].paper:g} | {claim} | {spread} | {holds} |"
        )
    return lines


def sensitivity(results: Results) -> list[str]:
    """Return the median ratio of every claim in every cell; a ratio below its claim is bold."""
    claimed = [headline for headline in HEADLINES if headline.claim is not None]
    lines = [
        "| | " + " | ".join(headline.title for headline in claimed) + " |",
        "|---|" + "--:|" * len(claimed),
        "| *claim* | " + " | ".join(f"*{headline.claim:g}*" for headline in claimed) + " |",
    ]
    for cell in CELLS:
        row = []
        for headline in claimed:
            points = _points(results, cell, headline)
            if not points:
                row.append("")
                continue
            value = _shown(points, _median(points))
            assert headline.claim is not None
            row.append(value if _median(points) >= headline.claim else f"**{value}**")
        lines.append(f"| {cell} | " + " | ".join(row) + " |")
    return lines


def _across(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ablations() -> Iterator[str]:
    """Yield how many times as long programs take without each mechanism."""
    yield "| | " + " | ".join(f"without {name}" for name in ABLATIONS) + " |"
    yield "|---|" + "--:|" * len(ABLATIONS)
    for name, load in LOADS.items():
        found = slowdowns(load, ABLATION_SEEDS)
        yield f"| {name} | " + " | ".join(_across(found[each]) for each in ABLATIONS) + " |"


def memories() -> Iterator[str]:
    """Yield the KV memory of our system, and what sharing and lifetimes save of it."""
    yield (
        "| | peak, tokens | saved by sharing: peak | over time | saved by lifetimes: peak "
        "| over time |"
    )
    yield "|---|--:|--:|--:|--:|--:|"
    for name, load in LOADS.items():
        reports = list(memory(load, ABLATION_SEEDS))
        columns = [f"{statistics.median(report.shared.peak for report in reports):,.0f}"]
        for other in ("unshared", "kept"):
            for place in range(2):
                saved = statistics.median(
                    1 - report.shared[place] / getattr(report, other)[place] for report in reports
                )
                columns.append(f"{max(saved, 0):.0%}")
        yield f"| {name} | " + " | ".join(columns) + " |"
