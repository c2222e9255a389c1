"""Draw when each call of a LangChain app ran: request by request, and planned by `accelerate`.

    python benchmarks/timeline.py [--round-trip S] [--out docs/images/timeline.svg]

The app is the chain of `conure demo`, on the built-in model: five reports are read in parallel, the
findings are joined, and the joined sentence is read. Both ways run on one server, which has run the
chain before, so that neither profits from a cold cache. A proxy adds the round trip. Of `--rounds`
runs of each way, in turns, the one with the median time is drawn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from conure import Client
from conure.adapters.langchain import accelerate
from conure.cli.commands.demo import REPORTS, build_chain
from conure.cli.delayed_connection import delayed
from temporary_server import served

OUT = Path(__file__).parents[1] / "docs" / "images" / "timeline.svg"
WIDTH, LEFT, BAR, GAP, HEAD = 860, 120, 14, 6, 46


class CallSpan(NamedTuple):
    """One call: seconds since the start of the run."""

    name: str
    start_s: float
    end_s: float


class Timeline(NamedTuple):
    """One run of the app."""

    wall_s: float
    bars: list[CallSpan]
    num_programs: int


def main(arguments: Sequence[str]) -> int:
    """Measure both ways and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--round-trip", type=float, default=0.025, metavar="S")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    with served() as url, delayed(url, options.round_trip) as far, Client(url) as client:
        plain = build_chain(far)
        ways: dict[str, Callable[[Any], Any]] = {
            "chain.invoke(...)": plain.invoke,
            "accelerate(chain).invoke(...)": accelerate(plain).invoke,
        }
        runs: dict[str, list[Timeline]] = {name: [] for name in ways}
        for number in range(-1, options.rounds):
            for name, invoke in ways.items():
                run = measure(client, invoke)
                if number >= 0:
                    runs[name].append(run)
    medians = {name: sorted(found)[len(found) // 2] for name, found in runs.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(medians, options.round_trip), "utf-8")
    for name, run in medians.items():
        print(f"{name:<32} {1000 * run.wall_s:6.0f} ms  {run.num_programs} programs")
    return 0


def measure(client: Client, invoke: Callable[[Any], Any]) -> Timeline:
    """Run the app once; read from the server when its calls ran."""
    newest = [program.id for program in client.programs(limit=1).programs]
    started_at = time.time()
    invoke({f"report_{n}": report for n, report in enumerate(REPORTS, 1)})
    wall_s = time.time() - started_at
    bars = []
    programs = []
    for program in client.programs(limit=50).programs:
        if program.id in newest:
            break
        programs.append(program.id)
    for program_id in programs:
        bars += _bars(client, program_id, started_at)
    return Timeline(wall_s, sorted(bars, key=lambda bar: bar.start_s), len(programs))


def _bars(client: Client, program_id: str, started_at: float) -> list[CallSpan]:
    starts: dict[str, float] = {}
    bars = []
    for event in client.attach(program_id).events():
        if event.type not in ("node.started", "node.finished"):
            continue
        node = str(event.data["node"])
        at_s = datetime.fromisoformat(str(event.data["at"])).timestamp() - started_at
        if event.type == "node.started":
            starts[node] = at_s
        elif node in starts:
            bars.append(CallSpan(node, starts[node], at_s))
    return bars


def draw(runs: dict[str, Timeline], round_trip_s: float) -> str:
    """Return both runs as an SVG with one time scale. Colours suit light and dark pages."""
    scale = (WIDTH - LEFT - 20) / max(run.wall_s for run in runs.values())
    parts: list[str] = []
    top = 10
    for name, run in runs.items():
        parts.append(
            f'<text x="10" y="{top + 18}" class="title">{escape(name)}</text>'
            f'<text x="{WIDTH - 10}" y="{top + 18}" class="figure" text-anchor="end">'
            f"{1000 * run.wall_s:.0f} ms · {run.num_programs} "
            f"{'request' if run.num_programs == 1 else 'requests'}</text>"
        )
        top += HEAD - 16
        end = LEFT + scale * run.wall_s
        height = len(run.bars) * (BAR + GAP)
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{height}" class="run"/>'
        )
        for number, bar in enumerate(run.bars):
            y = top + number * (BAR + GAP) + GAP // 2
            x, width = LEFT + scale * bar.start_s, max(2.0, scale * (bar.end_s - bar.start_s))
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 11}" class="node" text-anchor="end">'
                f"call {number + 1}</text>"
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" class="call"/>'
            )
        top += height + 22
    note = f"{len(REPORTS)} reports read in parallel, the findings joined, the sentence read; "
    note += f"round trip {1000 * round_trip_s:.0f} ms. Grey: the application waits."
    parts.append(f'<text x="10" y="{top + 4}" class="node">{escape(note)}</text>')
    style = (
        "text{font:12px system-ui,sans-serif;fill:#808890}.title{font-weight:600;font-size:14px;"
        "font-family:ui-monospace,monospace}.figure{font-weight:600;font-size:14px}"
        ".run{fill:#80889030}.call{fill:#2f81f7}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 16}" role="img" '
        f'aria-label="When the calls of an app ran, with and without accelerate">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
