"""Tables from the records of `run.py`.

python benchmarks/pressure/page.py RECORD.json ... > TABLE.md
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HEAD = (
    "| workload | programs | pool | trip | system | kind | mean s | p50 | p99 | ratio | min | max "
    "| wall s | steps | computed | recomputed |\n"
    "|---|--:|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def rows(record: dict[str, Any]) -> Iterator[str]:
    """Yield a row for every system and kind of program of a cell.

    The ratio is that of the first system's mean seconds to this system's, in the same round.
    """
    systems = record["systems"]
    first = next(iter(systems.values()))
    pool = f"{record['pool']} %, {record['blocks']}" if record["pool"] < 100 else "100 %"
    place = [record["workload"], f"{record['programs']}", pool, f"{record['round_trip_ms']:g} ms"]
    for name, system in systems.items():
        kinds = {
            k: v for k, v in system["programs"].items() if len(system["programs"]) > 2 or k == "all"
        }
        for kind, taken in kinds.items():
            before = first["programs"][kind]["means"]
            ratios = [a / b for a, b in zip(before, taken["means"], strict=True)]
            shown = [statistics.median(ratios), min(ratios), max(ratios)]
            cells = [
                *place,
                name,
                kind,
                f"{taken['mean_s']['median']:.2f}",
                f"{taken['p50_s']:.2f}",
                f"{taken['p99_s']:.2f}",
                *(("", "", "") if system is first else (f"{each:.2f}" for each in shown)),
                f"{system['wall_s']['median']:.2f}",
                f"{system['steps']:g}",
                f"{system['computed']:g}",
                f"{system['recomputed']:g}",
            ]
            yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    """Print one table of all records."""
    print(HEAD)
    for path in arguments:
        for record in json.loads(Path(path).read_text()):
            for row in rows(record):
                print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
