"""Overload: ten times more programs than a server can run.

    python benchmarks/serving/overload.py --max-wait-s 4
    python benchmarks/serving/overload.py [--seconds S] [--factor N] [OPTION OF conure serve ...]

A program is a chain of four calls of 64 tokens on the fake engine at 20 ms per token, at most 16 at
once: 5.1 s alone, 3 programs per second. Programs arrive evenly, first at 0.8 of that rate and then
at `factor` times, each for `seconds`. Reports the time of accepted programs from the submission to
their end, and of refusals, with the number of refusals without `Retry-After`. Other answers and
lost connections count as failed. With `--json`, prints one JSON object per phase.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from temporary_server import served

NUM_CALLS = 4
NUM_TOKENS = 64
TOKEN_S = 0.02
MAX_SEQUENCES = 16
CAPACITY = MAX_SEQUENCES / (NUM_CALLS * NUM_TOKENS * TOKEN_S)
"""Programs per second."""
MAX_THREADS = 500
"""Programs that the client follows at once; far more than a server accepts."""


@dataclass
class LoadPhase:
    """What happened at one rate of arrival."""

    factor: float
    accepted_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    without_retry_after: list[int] = field(default_factory=list)
    """Statuses of refusals without the header."""
    failed: list[str] = field(default_factory=list)
    """Why programs failed."""

    def record(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            "factor": self.factor,
            "accepted": len(self.accepted_s),
            "refused": len(self.refused_s),
            "failed": len(self.failed),
            "refused_without_retry_after": len(self.without_retry_after),
            "accepted_p50_s": percentile(self.accepted_s, 50),
            "accepted_p99_s": percentile(self.accepted_s, 99),
            "refused_p50_ms": 1e3 * percentile(self.refused_s, 50),
            "refused_p99_ms": 1e3 * percentile(self.refused_s, 99),
        }


def percentile(values: list[float], share: float) -> float:
    """Return a percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] if ordered else 0.0


def chain() -> dict[str, Any]:
    """Return the program."""
    nodes = []
    for number in range(NUM_CALLS):
        source = [{"input": f"v{number - 1}"}] if number else []
        output = {"output": f"v{number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        prompt = [{"text": "Go on: "}, *source, output]
        nodes.append({"id": f"c{number}", "op": "generate", "prompt": prompt})
    return {"program": {"nodes": nodes, "outputs": [f"v{NUM_CALLS - 1}"]}}


BODY = json.dumps(chain()).encode()


class LoadClient:
    """Sends requests from any thread, over one connection per thread.

    The standard library's client: others take several milliseconds of processor time per request,
    of the same cores that the server is measured on.
    """

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._threads = threading.local()

    def request(self, method: str, path: str, body: bytes | None = None) -> HttpAnswer:
        """Return the answer to a request."""
        connection = getattr(self._threads, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._address, timeout=120)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._threads.connection = connection
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return HttpAnswer(response.status, response.headers, response.read())


class HttpAnswer(NamedTuple):
    """The answer to a request."""

    status: int
    headers: Message
    body: bytes


def run_program(client: LoadClient, phase: LoadPhase) -> None:
    """Submit one program and wait for its last value, or note the refusal."""
    started = time.perf_counter()
    answer = client.request("POST", "/v1/programs", BODY)
    if answer.status == 429:
        phase.refused_s.append(time.perf_counter() - started)
        if "Retry-After" not in answer.headers:
            phase.without_retry_after.append(answer.status)
        return
    if answer.status != 202:
        phase.failed.append(f"status {answer.status}")
        return
    path = f"{json.loads(answer.body)['url']}/variables/v{NUM_CALLS - 1}?wait_s=30"
    status = 202
    while status == 202:
        status = client.request("GET", path).status
    if status == 200:
        phase.accepted_s.append(time.perf_counter() - started)
    else:
        phase.failed.append(f"status {status}")


def _run(client: LoadClient, phase: LoadPhase) -> None:
    try:
        run_program(client, phase)
    except (OSError, http.client.HTTPException) as problem:
        phase.failed.append(f"{type(problem).__name__}: {problem}")


def offer(url: str, factor: float, seconds: float) -> LoadPhase:
    """Offer programs at `factor` times the capacity."""
    phase = LoadPhase(factor)
    client = LoadClient(url)
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        start = time.perf_counter()
        programs = []
        for number in range(int(seconds * factor * CAPACITY)):
            due = start + number / (factor * CAPACITY)
            time.sleep(max(0.0, due - time.perf_counter()))
            programs.append(threads.submit(_run, client, phase))
        for program in programs:
            program.result()
    return phase


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def main() -> None:
    """Run both phases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--factor", type=float, default=10)
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args()
    fake = ["--engine", "fake", "--time-per-output-token", str(TOKEN_S)]
    with served(*fake, "--max-sequences", str(MAX_SEQUENCES), *rest) as url:
        phases = [offer(url, factor, options.seconds) for factor in (0.8, options.factor)]
    for phase in phases:
        figures = phase.record()
        text = (
            json.dumps(figures)
            if options.json
            else "  ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        )
        sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
