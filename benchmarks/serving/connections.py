"""Memory of the server for clients that do not read, and for requests that never end.

    python benchmarks/serving/connections.py [--readers N] [--half-open N] [--json]

A program with 20 MB of yields and 20 MB of values runs first. Then `readers` clients request its
events and `readers` clients its status, and read nothing; `half-open` clients send half of a
request. Reported are the resident sizes of the server before, at the peak, and after all clients
have left, and how long `/healthz` takes meanwhile. A client that reads nothing is disconnected
after 30 s.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving.hostile import Heartbeat
from temporary_server import started

NUM_EVENTS, EVENT_CHARS = 200, 100_000
HOLD_S = 5.0


def program() -> dict[str, Any]:
    """Return a program with 20 MB of yields and 20 MB of values."""
    text = {"var": "text"}
    nodes: list[Any] = [
        {"id": f"y{i}", "op": "yield", "value": [i, text]} for i in range(NUM_EVENTS)
    ]
    nodes += [
        {"id": f"e{i}", "op": "expr", "output": f"v{i}", "expr": {"concat": [text, str(i)]}}
        for i in range(NUM_EVENTS)
    ]
    inputs = {"text": "a" * EVENT_CHARS}
    return {"program": {"variables": {"text": {}}, "nodes": nodes}, "inputs": inputs}


def rss_mb(pid: int) -> float:
    """Return the resident size of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no VmRSS")


def connect(port: int, sent: Sequence[bytes]) -> list[socket.socket]:
    """Open a connection for each text, and send the text."""
    opened = []
    for text in sent:
        client = socket.create_connection(("127.0.0.1", port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.sendall(text)
        opened.append(client)
    return opened


def watched(pid: int, seconds: float) -> float:
    """Return the largest resident size within some seconds."""
    largest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        largest = max(largest, rss_mb(pid))
        time.sleep(0.02)
    return largest


def measure(num_readers: int, num_half_open: int) -> dict[str, float]:
    """Run the clients against a new server."""
    with started("--engine", "fake") as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            answer = client.post("/v1/programs", json=program()).raise_for_status().json()
            url, port = answer["url"], client.base_url.port
            size = 0
            for _ in range(3):  # the code paths of a reader are warm
                size = len(client.get(f"{url}/events").content)
                client.get(url)
        assert port is not None
        heartbeat = Heartbeat(server.url)
        heartbeat.start()
        before = watched(server.pid, 1.0)
        host = f"Host: 127.0.0.1:{port}\r\n"
        asked = [f"GET {path} HTTP/1.1\r\n{host}\r\n".encode() for path in (f"{url}/events", url)]
        readers = connect(port, [text for text in asked for _ in range(num_readers)])
        with_readers = watched(server.pid, HOLD_S)
        head = f"POST /v1/programs HTTP/1.1\r\n{host}".encode()
        body = head + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        half_open = connect(port, [(head, body)[i % 2] for i in range(num_half_open)])
        peak = max(with_readers, watched(server.pid, HOLD_S))
        for each in readers + half_open:
            each.close()
        after = watched(server.pid, 1.0)
        heartbeat.is_stopped.set()
        heartbeat.join()
        return {
            "readers": 2 * num_readers,
            "half_open": num_half_open,
            "event_mb": size / 2**20,
            "before_mb": before,
            "with_readers_mb": with_readers,
            "peak_mb": peak,
            "after_mb": after,
            "cost_mb": peak - before,
            "healthz_worst_ms": 1e3 * heartbeat.worst_s,
        }


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--half-open", type=int, default=1_500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.readers, options.half_open)
    text = (
        json.dumps(figures)
        if options.json
        else "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
    )
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
