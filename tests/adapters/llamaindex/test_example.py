"""The examples run as a reader would run them, each on the core that it is for."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IS_OLD = version("llama-index-core").startswith("0.12.")


def run(name: str) -> str:
    """What an example prints, on a server of its own."""
    server = [sys.executable, "benchmarks/own_server.py", "--engine", "fake", "--"]
    done = subprocess.run(
        [*server, sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(IS_OLD, reason="synthesizers are planned on core 0.13 and 0.14")
def test_the_tree_summary_is_the_same_and_planned() -> None:
    printed = run("llamaindex_tree_summary.py")
    assert "same answer  yes" in printed
    found = re.search(r"calls +(\d+), (\d+) from the plan", printed)
    assert found is not None
    assert int(found[1]) == int(found[2]) >= 4
    assert re.search(r"prompt +\d+ tokens, \d+ computed", printed)


@pytest.mark.skipif(not IS_OLD, reason="QueryPipeline went with core 0.13")
def test_the_query_pipeline_is_the_same_in_all_three_ways() -> None:
    printed = run("llamaindex_query_pipeline.py")
    assert "same answer  yes" in printed
    assert "3 calls: 3 from the plan, 0 made when asked for, 0 wasted" in printed
    assert "as a program 3 calls, 1 client step" in printed
