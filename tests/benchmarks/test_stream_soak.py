"""Streamed calls of all clients leave no socket, thread, task, program or object open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_streams_leave_nothing_open() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "cookbook.stream_soak", "--calls", "400"],
        cwd=ROOT / "benchmarks",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    figures = json.loads(made.stdout)
    assert figures["calls"] == 400
    assert figures["after"] == figures["before"]
    assert figures["after"]["open_programs"] == figures["after"]["tasks"] == 0
