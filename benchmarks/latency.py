"""What the server itself costs: three programs on an engine that needs no time.

    chain    50 calls, each reading the one before: the price of one dependent step
    wide     2,000 calls that read nothing of each other: the price of a big program
    map      the same 2,000 calls as one node over a list that comes with the submission

    python benchmarks/latency.py [--repeats N] [--json] [--url URL]

Starts `conure serve --engine fake` (0 s per token) and speaks to it over HTTP alone, so
that accepting, journaling with fsync, scheduling, engine frames, committing and telling are
all in the figures. The clock runs from before the submission to the answer that shows the
end. Nothing is subtracted; one run of each before the first is not counted.

Kept true: a run that did not decode every token is an error and not a figure.
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
from typing import Any, NamedTuple

import httpx

from own_server import served

CHAIN_CALLS = 50
WIDE_CALLS = 2_000
MAX_TOKENS = 8
WAIT_S = 60


class Result(NamedTuple):
    """Figures of one program over its repeats, in `unit`; `target` is what we promise."""

    name: str
    calls: int
    unit: str
    target: float
    runs: list[float]

    @property
    def median(self) -> float:
        """What is held against the target."""
        return statistics.median(self.runs)

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        spread = {"min": min(self.runs), "median": self.median, "max": max(self.runs)}
        return {**self._asdict(), **spread}

    def line(self) -> str:
        """The figures as one line of a table."""
        verdict = "met" if self.median <= self.target else "MISSED"
        return (
            f"{self.name:6} {self.calls:6} calls   min {min(self.runs):8.3f}   "
            f"median {self.median:8.3f}   max {max(self.runs):8.3f} {self.unit:8} "
            f"target {self.target:g}: {verdict}"
        )


def call(name: str, variable: str, prompt: Sequence[dict[str, str]]) -> dict[str, Any]:
    """A `generate` node that writes a few greedy tokens into one variable."""
    output = {"output": variable, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"id": name, "op": "generate", "prompt": [*prompt, output]}


def chain(length: int) -> dict[str, Any]:
    """A program in which every call reads what the one before it wrote."""
    first = call("call_0", "v_0", [{"text": "Begin:"}])
    later = [
        call(f"call_{i}", f"v_{i}", [{"text": "Go on:"}, {"input": f"v_{i - 1}"}])
        for i in range(1, length)
    ]
    return {"name": "chain", "nodes": [first, *later], "outputs": [f"v_{length - 1}"]}


def wide(width: int) -> dict[str, Any]:
    """A program of calls that do not read each other."""
    nodes = [call(f"call_{i}", f"v_{i}", [{"text": f"Item {i}:"}]) for i in range(width)]
    return {"name": "wide", "nodes": nodes, "outputs": [f"v_{i}" for i in range(width)]}


def mapped(width: int) -> dict[str, Any]:
    """The calls of `wide`, as the items of one map."""
    body = call("call", "v", [{"text": "Item "}, {"input": "i"}, {"text": ":"}])
    node = {"id": "all", "op": "map", "items": {"range": [width]}, "as": "i", "body": [body]}
    return {"name": "map", "nodes": [{**node, "collect": {"vs": "v"}}], "outputs": ["vs"]}


def submit(client: httpx.Client, program: dict[str, Any]) -> str:
    """Submits a program; returns its URL."""
    answer = client.post("/v1/programs", json={"program": program})
    if answer.status_code != 202:
        raise SystemExit(f"the program was not accepted: {answer.status_code} {answer.text}")
    url: str = answer.json()["url"]
    return url


def check(client: httpx.Client, url: str, calls: int) -> None:
    """Ends the benchmark if a program did not do all of its work."""
    status = client.get(url).json()
    decoded = status["receipt"]["output_tokens"]["decoded"] if status["status"] == "done" else 0
    if decoded != calls * MAX_TOKENS:
        raise SystemExit(
            f"{decoded} of {calls * MAX_TOKENS} tokens decoded; status {status['status']}"
        )


def run_chain(client: httpx.Client) -> float:
    """Milliseconds a call, from the submission to the value of the last one."""
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
    """Seconds of `wide`."""
    return run_whole(client, wide(WIDE_CALLS))


def run_map(client: httpx.Client) -> float:
    """Seconds of `map`."""
    return run_whole(client, mapped(WIDE_CALLS))


def run_whole(client: httpx.Client, program: dict[str, Any]) -> float:
    """Seconds from the submission to the event that says that the program is finished."""
    start = time.perf_counter()
    url = submit(client, program)
    with client.stream("GET", f"{url}/events") as events:
        if "event: program.finished" not in events.iter_lines():
            raise SystemExit("the event stream ended before the program")
    took_s = time.perf_counter() - start
    check(client, url, WIDE_CALLS)
    return took_s


def measure(url: str, repeats: int) -> list[Result]:
    """Runs each program `repeats` times, after one run that is not counted."""

    def repeat(run: Callable[[httpx.Client], float]) -> list[float]:
        run(client)
        return [run(client) for _ in range(repeats)]

    with httpx.Client(base_url=url, timeout=WAIT_S + 10) as client:
        return [
            Result("chain", CHAIN_CALLS, "ms/call", 5.0, repeat(run_chain)),
            Result("wide", WIDE_CALLS, "s", 4.0, repeat(run_wide)),
            Result("map", WIDE_CALLS, "s", 4.0, repeat(run_map)),
        ]


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if all medians meet their targets."""
    parser = argparse.ArgumentParser(description="Latency of the server on a fake engine.")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs (5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--url", help="a running server instead of one of our own")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    with ExitStack() as stack:
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
