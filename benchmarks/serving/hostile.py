"""How long hostile requests keep the server from answering others, and what they cost it.

    python benchmarks/serving/hostile.py [NAME...] [--json]

Each request is sent to a new `conure serve --engine fake`. Meanwhile, a client requests `/healthz`
20 ms after each response; its longest wait is the longest pause of the event loop, and a wait
that has no response until the end counts, too. The request is followed until
its program has ended, or for `MAX_S` seconds. Memory and journal are the peak of the server
process and the size of its files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from temporary_server import started

MAX_S = 120.0
PAUSE_S = 0.02

Node = dict[str, Any]


class HostileRequest(NamedTuple):
    """A request, by its route and its body."""

    route: str
    body: bytes


class RequestEffect(NamedTuple):
    """The effect of a request on the server."""

    name: str
    status: int
    """HTTP status of the response; 0 if there was none."""
    end: str
    """Status of the program, or the code of the error."""
    seconds: float
    worst_ms: float
    rss_mb: float
    journal_mb: float

    def line(self) -> str:
        """Return the figures as one line of a table."""
        return (
            f"{self.name:12} {self.status} {self.end:28} {self.seconds:6.1f} s   healthz "
            f"worst {self.worst_ms:8.1f} ms   RSS {self.rss_mb:6.0f} MB   "
            f"journal {self.journal_mb:6.0f} MB"
        )


def expr(number: int, expression: Any, **fields: Any) -> Node:
    """Return an `expr` node."""
    return {"id": f"e{number}", "op": "expr", "output": f"v{number}", "expr": expression, **fields}


def generate(number: int, prompt: list[Any]) -> Node:
    """Return a `generate` node with one short output."""
    output = {"output": f"g{number}", "max_tokens": 1, "temperature": 0}
    return {"id": f"c{number}", "op": "generate", "prompt": [*prompt, output]}


def submission(nodes: list[Node], inputs: dict[str, Any] | None = None) -> HostileRequest:
    """Return a submission of nodes."""
    program = {"variables": {name: {} for name in inputs or {}}, "nodes": nodes}
    body = json.dumps({"program": program, "inputs": inputs or {}}).encode()
    return HostileRequest("/v1/programs", body)


def isolated(count: int, expression: Any) -> HostileRequest:
    """Return a program of many equal expressions."""
    return submission([expr(i, expression, on_error="isolate") for i in range(count)])


def growing(num_outputs: int) -> HostileRequest:
    """Return one prompt with many outputs."""
    outputs = [{"output": f"o{i}", "max_tokens": 1} for i in range(num_outputs)]
    return submission([{"id": "g", "op": "generate", "prompt": [{"text": "x"}, *outputs]}])


def nested_maps(width: int) -> HostileRequest:
    """Return a map in a map."""
    item = expr(0, {"var": "j"})
    ranged = {"items": {"range": [width]}}
    inner = {"id": "b", "op": "map", **ranged, "as": "j", "body": [item], "collect": {"w": "v0"}}
    outer = {"id": "a", "op": "map", **ranged, "as": "i", "body": [inner], "collect": {"z": "w"}}
    return submission([outer])


def unterminated_fence() -> HostileRequest:
    """Return an expression that parses a fence without an end."""
    parsed = {"first": [{"parse_json": {"var": "x"}}, 1]}
    return submission([expr(0, parsed)], {"x": "```" + "a" * 1_000_000})


def many_variables(is_valid: bool) -> HostileRequest:
    """Return 120,000 declarations; the last one is invalid unless `is_valid`."""
    variables: dict[str, Any] = {f"v{i}": {} for i in range(120_000)}
    if not is_valid:
        variables["v119999"] = {"typ": "int"}
    body = json.dumps({"program": {"variables": variables}}).encode()
    return HostileRequest("/v1/programs", body)


def long_prompt(is_text: bool) -> HostileRequest:
    """Return a call whose prompt has five million characters, as text or in a list."""
    value = {"var": "x"} if is_text else [{"var": "x"}]
    copy = {"id": "e0", "op": "expr", "output": "y", "expr": value}
    call = generate(0, [{"text": "a"}, {"input": "y"}])
    return submission([copy, call], {"x": LONG_TEXT})


def quotes() -> HostileRequest:
    """Return JSON that ends in a string of two million escaped quotes without an end."""
    return HostileRequest("/v1/programs", b'1234567890123456789 "' + b'\\"' * 2_000_000)


TURNS = {"len": {"each": [{"range": [0, 15_000]}, "i", {"add": [{"var": "i"}, 1]}]}}
SEARCHES = {"len": {"each": [{"range": [0, 4_500]}, "i", {"find": ["", "(a{0,30}){0,30}"]}]}}
LONG_TEXT = "word " * 1_000_000
COPY = {"concat": [{"var": "x"}, ""]}

REQUESTS: dict[str, Callable[[], HostileRequest]] = {
    "quotes": quotes,
    "fence": unterminated_fence,
    "searches": lambda: isolated(20, SEARCHES),
    "inputs": lambda: submission([generate(i, [{"input": SEARCHES}]) for i in range(20)]),
    "turns": lambda: isolated(1_000, TURNS),
    "when": lambda: submission([expr(i, i, when=TURNS) for i in range(1_000)]),
    "outputs": lambda: growing(9_999),
    "copies": lambda: submission([expr(i, COPY) for i in range(300)], {"x": "a" * 3_000_000}),
    "copies2000": lambda: submission([expr(i, COPY) for i in range(2_000)], {"x": "a" * 3_000_000}),
    "prompt": lambda: submission([generate(0, [{"text": "a"}, {"input": "x"}])], {"x": LONG_TEXT}),
    "text": lambda: long_prompt(is_text=True),
    "list": lambda: long_prompt(is_text=False),
    "invalid": lambda: many_variables(is_valid=False),
    "valid": lambda: many_variables(is_valid=True),
    "maps": lambda: nested_maps(300),
    "side": lambda: submission([generate(i, [{"text": "x"}]) for i in range(10_000)]),
    "chain": lambda: submission(
        [
            generate(i, [{"text": "x"}, *([{"input": f"g{i - 1}"}] if i else [])])
            for i in range(9_999)
        ]
    ),
    "twice": lambda: submission([expr(0, 1), expr(1, 2, after=["e0", "e0"])]),
}


def peak_mb(pid: int) -> float:
    """Return the largest resident size that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no VmHWM")


class Heartbeat(threading.Thread):
    """Requests `/healthz` repeatedly and records the longest wait for a response."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.worst_s = 0.0
        self.is_stopped = threading.Event()
        self._url = url

    def run(self) -> None:
        """Send requests until stopped. The end of the server ends the last wait."""
        with httpx.Client(base_url=self._url, timeout=None) as client:
            while not self.is_stopped.wait(PAUSE_S):
                start = time.perf_counter()
                with contextlib.suppress(httpx.HTTPError):
                    client.get("/healthz")
                self.worst_s = max(self.worst_s, time.perf_counter() - start)


def follow(client: httpx.Client, request: HostileRequest) -> tuple[int, str]:
    """Send a request and wait for the end of its program; return the status and the end."""
    headers = {"Content-Type": "application/json"}
    answer = client.post(request.route, content=request.body, headers=headers)
    if answer.status_code != 202:
        return answer.status_code, answer.json()["code"]
    deadline = time.monotonic() + MAX_S
    url = answer.json()["url"]
    with client.stream("GET", f"{url}/events", params={"types": "program.finished"}) as events:
        for line in events.iter_lines():
            if line.startswith("data:"):
                return 202, json.loads(line[5:])["status"]
            if time.monotonic() > deadline:
                break
    return 202, "did not end"


def measure(name: str) -> RequestEffect:
    """Send one request to a new server."""
    request = REQUESTS[name]()
    with started("--engine", "fake") as server:
        heartbeat = Heartbeat(server.url)
        heartbeat.start()
        start = time.perf_counter()
        with httpx.Client(base_url=server.url, timeout=MAX_S) as client:
            try:
                status, end = follow(client, request)
            except httpx.HTTPError as error:
                status, end = 0, type(error).__name__
        seconds = time.perf_counter() - start
        time.sleep(10 * PAUSE_S)
        heartbeat.is_stopped.set()
        journal = sum(file.stat().st_size for file in server.data.iterdir())
        rss_mb = peak_mb(server.pid)
    heartbeat.join()  # a last request ended with the server
    worst_ms = 1000 * heartbeat.worst_s
    return RequestEffect(name, status, end, seconds, worst_ms, rss_mb, journal / 2**20)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(REQUESTS))
    parser.add_argument("--json", action="store_true", help="print one JSON object per request")
    arguments = parser.parse_args()
    for name in arguments.names or REQUESTS:
        measured = measure(name)
        sys.stdout.write(
            (json.dumps(measured._asdict()) if arguments.json else measured.line()) + "\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
