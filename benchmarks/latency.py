"""Overhead of the server: three programs on an engine that needs no time.

    chain    50 calls, each reading the one before: the cost of one dependent step
    wide     2,000 independent calls: the cost of a large program
    map      the same 2,000 calls as one map over a list in the submission

    python benchmarks/latency.py [--repeats N] [--json] [--url URL | --against CHECKOUT]

Starts `conure serve --engine fake` (0 s per token) and uses HTTP only, so the figures include
accepting, journaling with fsync, scheduling, engine frames, committing and events. The clock runs
from before the submission until the response that shows the end. One warm-up run of each program is
not counted.

`--against` compares this checkout with another one: both servers run, each run of a program on one
is followed by a run on the other, in alternating order, and the ratio of each pair is taken. The
speed of a machine changes less between the two runs of a pair than between two benchmarks.

A run that did not decode every token is an error.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from temporary_server import ROOT, served

CHAIN_CALLS = 50
WIDE_CALLS = 2_000
MAX_TOKENS = 8
WAIT_S = 60


class LatencyResult(NamedTuple):
    """Durations of one program over its repeats, in `unit`, and its target."""

    name: str
    calls: int
    unit: str
    target: float
    runs: list[float]

    @property
    def median(self) -> float:
        """Return the figure that is compared with the target."""
        return statistics.median(self.runs)

    def record(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        spread = {"min": min(self.runs), "median": self.median, "max": max(self.runs)}
        return {**self._asdict(), **spread}

    def line(self) -> str:
        """Return the figures as one line of a table."""
        verdict = "met" if self.median <= self.target else "MISSED"
        return (
            f"{self.name:6} {self.calls:6} calls   min {min(self.runs):8.3f}   "
            f"median {self.median:8.3f}   max {max(self.runs):8.3f} {self.unit:8} "
            f"target {self.target:g}: {verdict}"
        )


def call(name: str, variable: str, prompt: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return a `generate` node that writes a few greedy tokens into one variable."""
    output = {"output": variable, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"id": name, "op": "generate", "prompt": [*prompt, output]}


def chain(length: int) -> dict[str, Any]:
    """Return a program in which every call reads the output of the one before."""
    first = call("call_0", "v_0", [{"text": "Begin:"}])
    later = [
        call(f"call_{i}", f"v_{i}", [{"text": "Go on:"}, {"input": f"v_{i - 1}"}])
        for i in range(1, length)
    ]
    return {"name": "chain", "nodes": [first, *later], "outputs": [f"v_{length - 1}"]}


def wide(width: int) -> dict[str, Any]:
    """Return a program of independent calls."""
    nodes = [call(f"call_{i}", f"v_{i}", [{"text": f"Item {i}:"}]) for i in range(width)]
    return {"name": "wide", "nodes": nodes, "outputs": [f"v_{i}" for i in range(width)]}


def mapped(width: int) -> dict[str, Any]:
    """Return the calls of `wide` as the items of one map."""
    body = call("call", "v", [{"text": "Item "}, {"input": "i"}, {"text": ":"}])
    node = {"id": "all", "op": "map", "items": {"range": [width]}, "as": "i", "body": [body]}
    return {"name": "map", "nodes": [{**node, "collect": {"vs": "v"}}], "outputs": ["vs"]}


def submit(client: httpx.Client, program: dict[str, Any]) -> str:
    """Submit a program; return its URL."""
    answer = client.post("/v1/programs", json={"program": program})
    if answer.status_code != 202:
        raise SystemExit(f"the program was not accepted: {answer.status_code} {answer.text}")
    url: str = answer.json()["url"]
    return url


def check(client: httpx.Client, url: str, calls: int) -> None:
    """Exit if a program did not do all of its work."""
    status = client.get(url).json()
    decoded = status["receipt"]["output_tokens"]["decoded"] if status["status"] == "done" else 0
    if decoded != calls * MAX_TOKENS:
        raise SystemExit(
            f"{decoded} of {calls * MAX_TOKENS} tokens decoded; status {status['status']}"
        )


def run_chain(client: httpx.Client) -> float:
    """Return milliseconds per call, from the submission to the last value."""
    program = chain(CHAIN_CALLS)
    start = time.perf_counter()
    url = submit(client, program)
    answer = client.get(f"{url}/variables/v_{CHAIN_CALLS - 1}", params={"wait_s": WAIT_S})
    took_s = time.perf_counter() - start
    if answer.status_code != 200 or answer.json()["status"] != "done":
        raise SystemExit(f"the chain did not end: {answer.status_code} {answer.text}")
    with client.stream("GET", f"{url}/events") as events:
        events.read()
    check(client, url, CHAIN_CALLS)
    return took_s * 1000 / CHAIN_CALLS


def run_wide(client: httpx.Client) -> float:
    """Return the duration of `wide` in seconds."""
    return run_whole(client, wide(WIDE_CALLS))


def run_map(client: httpx.Client) -> float:
    """Return the duration of `map` in seconds."""
    return run_whole(client, mapped(WIDE_CALLS))


def run_whole(client: httpx.Client, program: dict[str, Any]) -> float:
    """Return the seconds from the submission to the `program.finished` event."""
    start = time.perf_counter()
    url = submit(client, program)
    with client.stream("GET", f"{url}/events") as events:
        if "event: program.finished" not in events.iter_lines():
            raise SystemExit("the event stream ended before the program")
    took_s = time.perf_counter() - start
    check(client, url, WIDE_CALLS)
    return took_s


RUNS: dict[str, Callable[[httpx.Client], float]] = {
    "chain": run_chain,
    "wide": run_wide,
    "map": run_map,
}
PAIRS = {"chain": 20, "wide": 2, "map": 2}
"""Pairs for each repeat: a run of the chain is short."""


def compare(url: str, other_url: str, repeats: int) -> dict[str, list[float]]:
    """Return the ratios of the durations on two servers, by program."""
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(httpx.Client(base_url=each, timeout=WAIT_S + 10))
            for each in (url, other_url)
        )
        return {
            name: [
                _ratio(run, ours, theirs, swapped=bool(index % 2))
                for index in range(-1, repeats * PAIRS[name])
            ][1:]
            for name, run in RUNS.items()
        }


def _ratio(
    run: Callable[[httpx.Client], float],
    ours: httpx.Client,
    theirs: httpx.Client,
    *,
    swapped: bool,
) -> float:
    if swapped:
        other = run(theirs)
        return run(ours) / other
    own = run(ours)
    return own / run(theirs)


def print_ratios(ratios: dict[str, list[float]]) -> None:
    """Print the median and the spread of the ratios of each program."""
    for name, pairs in ratios.items():
        low, _, high = statistics.quantiles(pairs, n=4)
        print(
            f"{name:6} {len(pairs):4} pairs   duration / other: median "
            f"{statistics.median(pairs):.3f}   quartiles {low:.3f} to {high:.3f}   "
            f"min {min(pairs):.3f}   max {max(pairs):.3f}"
        )


def measure(url: str, repeats: int) -> list[LatencyResult]:
    """Run each program `repeats` times after a warm-up run."""

    def repeat(run: Callable[[httpx.Client], float]) -> list[float]:
        run(client)
        return [run(client) for _ in range(repeats)]

    with httpx.Client(base_url=url, timeout=WAIT_S + 10) as client:
        return [
            LatencyResult("chain", CHAIN_CALLS, "ms/call", 5.0, repeat(run_chain)),
            LatencyResult("wide", WIDE_CALLS, "s", 4.0, repeat(run_wide)),
            LatencyResult("map", WIDE_CALLS, "s", 4.0, repeat(run_map)),
        ]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, print the figures, and return 0 if all medians meet their targets."""
    parser = argparse.ArgumentParser(description="Latency of the server on a fake engine.")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs (5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", help="use a running server instead of starting one")
    source.add_argument("--against", type=Path, help="compare with the server of a checkout")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.against and options.json:
        parser.error("--json cannot be combined with --against")
    if options.against and not (options.against / "conure").is_dir():
        parser.error(f"--against {options.against}: not a checkout of Conure")
    with ExitStack() as stack:
        if options.against:
            url, other_url = (
                stack.enter_context(served("--engine", "fake", root=root))
                for root in (ROOT, options.against.resolve())
            )
            print_ratios(compare(url, other_url, options.repeats))
            return 0
        url = options.url or stack.enter_context(served("--engine", "fake"))
        results = measure(url, options.repeats)
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.platform()}
        print(json.dumps({**machine, "results": [result.record() for result in results]}))
    else:
        for result in results:
            print(result.line())
    return int(any(result.median > result.target for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
