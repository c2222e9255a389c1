"""How long a start takes with many programs that have not ended.

    python benchmarks/serving/recovery.py [--programs N] [--repeats N] [--json]

A server accepts `programs` chains of ten calls that cannot end in time, and is killed (-9). Each
repetition starts it on the same folder, and measures the time from the start of the process until
`/readyz` answers 200, with the processor time and the resident size at that moment. Then the server
is killed again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from temporary_server import ROOT

NUM_NODES = 10
NUM_CLIENTS = 8
PORT = 8_391
URL = f"http://127.0.0.1:{PORT}"
START_S = 300.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def program() -> dict[str, Any]:
    """Return a chain of calls."""
    nodes = []
    for number in range(NUM_NODES):
        source = [{"input": f"v{number - 1}"}] if number else []
        prompt = [{"text": "Go on: "}, *source, {"output": f"v{number}", "max_tokens": 64}]
        nodes.append({"id": f"c{number}", "op": "generate", "prompt": prompt})
    return {"program": {"nodes": nodes, "outputs": [f"v{NUM_NODES - 1}"]}}


def spawn(data: str) -> subprocess.Popen[bytes]:
    """Start a server whose calls take an hour."""
    options = ["--engine", "fake", "--time-per-call", "3600", "--max-wait-s", "0"]
    command = [sys.executable, "-m", "conure.cli.main", "serve", "--port", str(PORT), *options]
    return subprocess.Popen(
        [*command, "--max-programs", "1000000", "--max-queued-calls", "10000000", "--data", data],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_ready(client: httpx.Client, since: float) -> float:
    """Return the seconds until the server is ready."""
    while time.monotonic() - since < START_S:
        try:
            if client.get("/readyz").status_code == 200:
                return time.monotonic() - since
        except httpx.TransportError:
            pass
        time.sleep(0.01)
    raise SystemExit(f"the server is not ready after {START_S:.0f} s")


def fill(num_programs: int) -> None:
    """Submit programs."""
    body = json.dumps(program()).encode()

    def submit(count: int) -> None:
        headers = {"Content-Type": "application/json"}
        with httpx.Client(base_url=URL, timeout=60, headers=headers) as client:
            for _ in range(count):
                client.post("/v1/programs", content=body).raise_for_status()

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        list(threads.map(submit, [num_programs // NUM_CLIENTS] * NUM_CLIENTS))


def process_figures(pid: int) -> tuple[float, float]:
    """Return the processor seconds and the resident megabytes of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return cpu_s, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(num_programs: int, repeats: int) -> list[dict[str, float]]:
    """Fill a folder, then start the server on it again and again."""
    runs = []
    with (
        tempfile.TemporaryDirectory(prefix="conure-") as data,
        httpx.Client(base_url=URL, timeout=60) as client,
    ):
        for number in range(repeats + 1):
            began = time.monotonic()
            server = spawn(data)
            try:
                ready_s = wait_ready(client, began)
                if number == 0:
                    fill(num_programs)
                    continue
                cpu_s, rss_mb = process_figures(server.pid)
                activity: Any = client.get("/v1/activity").json()
                runs.append({"ready_s": ready_s, "cpu_s": cpu_s, "rss_mb": rss_mb})
                assert activity["num_programs"] >= num_programs - NUM_CLIENTS, activity
            finally:
                server.kill()
                server.wait()
    return runs


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for run in measure(options.programs, options.repeats):
        text = (
            json.dumps(run)
            if options.json
            else "  ".join(f"{name} {value:.3g}" for name, value in run.items())
        )
        sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
