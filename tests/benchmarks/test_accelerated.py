"""The benchmark of accelerated chains runs. The figures of such a short run mean nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_benchmark_measures_a_chain_with_latency() -> None:
    command = ["--only", "chain", "--repeats", "3", "--round-trip", "0.02"]
    made = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "accelerated.py"), *command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = re.search(r"chain +[\d.]+ x as fast +>= 2 +\w+ +([\d.]+) ms", made.stdout)
    assert found, made.stdout + made.stderr
    assert float(found[1]) > 8 * 20 + 20, "eight calls and one round trip, at the least"
