"""Tables from the records of `run`, written into the page between their marks.

    python benchmarks/matrix/page.py [FOLDER]

The folder has the records (`*.json`) and the page (`README.md`); default: `results/matrix`. A
record whose engine is simulated goes into the last table, marked as such. Without a
FOLDER, the compact table in the README of the project is written, too.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "results" / "matrix"
README = Path(__file__).parents[2] / "README.md"
COLUMNS = ((100, 0.0), (100, 25.0), (100, 5.0), (66, 5.0), (40, 5.0))
"""Pool in percent and round trip in ms of the columns of the compact table."""
MARK = re.compile(r"(<!-- (\w+) -->\n)(.*?)(?=<!-- end of \2 -->)", re.DOTALL)
PAIR_HEAD = (
    "| workload | programs | pool | trip | {before}, s | {after}, s | ratio (min to max) "
    "| wall ratio (min to max) | steps | computed | recomputed |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)
CELL_HEAD = (
    "| workload | programs | pool | trip | system | kind | mean s (min to max) | p50 | p99 "
    "| wall s (min to max) | steps | computed | recomputed |\n"
    "|---|--:|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|"
)
Cell = dict[str, Any]
"""One setting of a record, with the figures of its systems."""


class Place(NamedTuple):
    """What determines a cell."""

    workload: str
    programs: int
    pool: int
    """In percent of the working set."""
    round_trip_ms: float


def cells_of(folder: Path) -> list[Cell]:
    """Return the cells of all records of a folder."""
    found: list[Cell] = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text("utf-8"))
        is_simulated = "fake" in record["engine"]
        found += (cell | {"is_simulated": is_simulated} for cell in record["cells"])
    return sorted(found, key=lambda cell: (cell["is_simulated"], cell["workload"]))


def ratios(before: dict[str, Any], after: dict[str, Any], kind: str = "all") -> list[float]:
    """Return by round the ratio of the mean times of the programs of a kind."""
    pairs = zip(before["programs"][kind]["means"], after["programs"][kind]["means"], strict=True)
    return [old / new for old, new in pairs]


def wall_ratios(before: dict[str, Any], after: dict[str, Any]) -> list[float]:
    """Return by round the ratio of the times until the last program ends."""
    return [old / new for old, new in zip(before["walls"], after["walls"], strict=True)]


def pair_table(cells: Sequence[Cell], before: str, after: str) -> str:
    """Return a table of two systems, with a row for each cell and kind of program."""
    lines = [PAIR_HEAD.format(before=before, after=after)]
    for cell in cells:
        systems = cell["systems"]
        if before in systems and after in systems and not cell["is_simulated"]:
            lines += _pair_rows(cell, systems[before], systems[after])
    return "\n".join(lines) + "\n"


def _pair_rows(cell: Cell, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for kind in _kinds(before):
        texts = [
            *_place(cell, kind),
            *(f"{side['programs'][kind]['mean_s']['median']:.2f}" for side in (before, after)),
            _format_ratios(ratios(before, after, kind)),
        ]
        if kind == "all":
            texts.append(_format_ratios(wall_ratios(before, after)))
            names = ("steps", "computed", "recomputed")
            counts = ([_format_count(side[name]) for side in (before, after)] for name in names)
            texts += map(" / ".join, counts)
        else:
            texts += [""] * 4
        yield f"| {' | '.join(texts)} |"


def least_ratios(cells: Sequence[Cell], before: str, after: str) -> dict[Place, list[float]]:
    """Return the ratios of the cells that have both systems and were not simulated.

    If a cell was measured several times, these are of the measurement with the smallest median.
    """
    found: dict[Place, list[float]] = {}
    for cell in cells:
        systems = cell["systems"]
        if {before, after} <= systems.keys() and not cell["is_simulated"]:
            place = Place(cell["workload"], cell["programs"], cell["pool"], cell["round_trip_ms"])
            measured = ratios(systems[before], systems[after])
            found[place] = min(measured, found.get(place, measured), key=statistics.median)
    return found


def compact_table(cells: Sequence[Cell]) -> str:
    """Return the least ratios of `requests` to `whole`, a row for each workload, least first."""
    rows: dict[tuple[str, int], dict[tuple[int, float], list[float]]] = {}
    for place, measured in least_ratios(cells, "requests", "whole").items():
        column = (place.pool, place.round_trip_ms)
        if column in COLUMNS:
            rows.setdefault((place.workload, place.programs), {})[column] = measured
    names = [f"{pool} %" + (f", {trip:g} ms" if trip else "") for pool, trip in COLUMNS]
    lines = [f"| workload, number at once | {' | '.join(names)} |", f"|---|{'--:|' * len(COLUMNS)}"]

    def least(name: tuple[str, int]) -> float:
        return min(statistics.median(each) for each in rows[name].values())

    for name in sorted(rows, key=least):
        texts = [_format_ratios(rows[name][c]) if c in rows[name] else "" for c in COLUMNS]
        workload, programs = name
        lines.append(f"| {workload}, {programs} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def means_table(cells: Sequence[Cell], befores: Sequence[str], afters: Sequence[str]) -> str:
    """Return the geometric means of median ratios over workloads, by setting and pair."""
    lines = ["| programs | pool | trip | compared | workloads | geometric mean | least |"]
    lines.append("|--:|--:|--:|---|--:|--:|--:|")
    found: dict[Place, dict[str, list[float]]] = {}
    for before, after in itertools.product(befores, afters):
        for place, measured in least_ratios(cells, before, after).items():
            pairs = found.setdefault(place._replace(workload=""), {})
            pairs.setdefault(f"{before} / {after}", []).append(statistics.median(measured))
    for place in sorted(found, key=lambda each: (each.programs, -each.pool, each.round_trip_ms)):
        for pair, medians in found[place].items():
            mean = statistics.geometric_mean(medians)
            texts = [f"{place.programs}", f"{place.pool} %", f"{place.round_trip_ms:g} ms", pair]
            texts += [f"{len(medians)}", f"{mean:.2f}", f"{min(medians):.2f}"]
            lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def cell_table(cells: Sequence[Cell]) -> str:
    """Return a table with a row for every system and kind of program."""
    lines = [CELL_HEAD]
    for cell in cells:
        for name, system in cell["systems"].items():
            for kind in _kinds(system):
                taken = system["programs"][kind]
                label = f"{name}, simulated" if cell["is_simulated"] else name
                texts = [
                    *(*_place(cell, "all"), label, kind),
                    _format_spread(taken["mean_s"]),
                    *(f"{taken[key]:.2f}" for key in ("p50_s", "p99_s")),
                    _format_spread(system["wall_s"]),
                    *(_format_count(system[key]) for key in ("steps", "computed", "recomputed")),
                ]
                lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _kinds(system: dict[str, Any]) -> list[str]:
    """Return the kinds of programs and `all`; only `all` if there is one kind."""
    kinds = list(system["programs"])
    return kinds if len(kinds) > 2 else ["all"]


def _place(cell: Cell, kind: str) -> list[str]:
    workload = cell["workload"] if kind == "all" else f"{cell['workload']}: {kind}"
    pool = f"{cell['pool']} %, {cell['blocks']}" if cell["pool"] < 100 else "100 %"
    return [workload, f"{cell['programs']}", pool, f"{cell['round_trip_ms']:g} ms"]


def _format_count(counted: float | None) -> str:
    return "unknown" if counted is None else f"{counted:g}"


def _format_ratios(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def _format_spread(spread: dict[str, float]) -> str:
    return "{median:.2f} ({min:.2f} to {max:.2f})".format(**spread)


def tables(folder: Path) -> dict[str, str]:
    """Return the tables of a folder of records by mark."""
    cells = cells_of(folder)
    others = ("openai", "langchain", "accelerated", "program")
    return {
        "whole": pair_table(cells, "requests", "whole"),
        "program": pair_table(cells, "langchain", "program"),
        "accelerated": pair_table(cells, "langchain", "accelerated"),
        "peer": pair_table(cells, "peer", "program"),
        "means": means_table(cells, ("peer", "langchain"), others),
        "cells": cell_table(cells),
        "compact": compact_table(cells),
    }


def main(arguments: Sequence[str]) -> int:
    """Write the tables into the page of a folder."""
    folder = Path(arguments[0]) if arguments else FOLDER
    found = tables(folder)
    for page in (folder / "README.md", *([] if arguments else [README])):
        text = page.read_text("utf-8")
        page.write_text(MARK.sub(lambda match: match[1] + found[match[2]], text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
