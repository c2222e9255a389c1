"""The kernel benchmark runs and is accurate, and `docs/engine/kernels.md` shows its roofline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOFLINE = """
from attention.rows import GPU_ROWS, DeviceRates, roofline
rows = [row for row in GPU_ROWS if row.regime != "crossover"]
print("\\n".join(roofline(rows, DeviceRates(4.3e12, 790e12))))
"""


def run_python(*arguments: str) -> str:
    """Run Python in the benchmarks folder; return its output."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT / "benchmarks",
        # Import this checkout, even if another one is installed.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_docs_show_the_roofline_of_every_row() -> None:
    lines = run_python("-c", ROOFLINE).splitlines()
    assert len(lines) == 24
    page = (ROOT / "docs" / "engine" / "kernels.md").read_text("utf-8")
    assert "\n".join(lines) in page


@pytest.mark.slow
def test_row_is_checked_and_timed_on_a_cpu(tmp_path: Path) -> None:
    output = run_python(
        "kernels.py",
        *("--device", "cpu", "--rows", "B2 P256", "--rounds", "1", "--processor-time"),
        *("--out", str(tmp_path)),
    )
    (path,) = tmp_path.glob("kernels-*.json")
    report = json.loads(path.read_text("utf-8"))
    assert {row["dtype"] for row in report["rows"]} == {"bfloat16", "float32"}
    for row in report["rows"]:
        assert set(row["contenders"]) == {"shared", "unshared", "forced"}
        for timed in row["contenders"].values():
            assert 0 < timed["min_us"] <= timed["median_us"] <= timed["max_us"]
            assert timed["relative_error"] <= (1e-2 if row["dtype"] == "bfloat16" else 1e-5)
        assert row["row"] in output
    assert path.with_suffix(".md").is_file()
