"""The examples run as documented, each on its version of core.

Answers of the built-in model are checked where it can be served: core 0.12 is tested without torch,
on the fake engine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ...served import environment

ROOT = Path(__file__).parents[3]
IS_OLD = version("llama-index-core").startswith("0.12.")


FINDINGS = ["Jonas Wenk", "nobody", "Ruth Sandberg", "Emil Hartson", "nobody"]


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run an example on a temporary server, or on the one at `CONURE_URL`."""
    return subprocess.run(
        [*options, sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        cwd=ROOT,
        env={**environment(), "CONURE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def printed(name: str, *options: str) -> str:
    """Return the output of an example on a temporary server with these options."""
    made = run(name, sys.executable, "benchmarks/temporary_server.py", *options, "--")
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.mark.skipif(IS_OLD, reason="synthesizers are planned on core 0.13 and 0.14")
def test_summary_example_is_planned_and_correct() -> None:
    said = printed("llamaindex_tree_summary.py", "--threads", "1")
    assert re.findall(r"^Report \d: (.*)$", said, re.MULTILINE) == FINDINGS
    assert "\nJonas Wenk, Ruth Sandberg and Emil Hartson.\n" in said
    assert re.search(r"^same +yes$", said, re.MULTILINE)
    assert "6 served from the plan; 6 calls" in said


@pytest.mark.skipif(not IS_OLD, reason="QueryPipeline went with core 0.13")
def test_query_pipeline_example_matches_in_three_modes() -> None:
    said = printed("llamaindex_query_pipeline.py", "--engine", "fake")
    made = re.findall(r"^(?:plain|ahead|whole) +(\S.*)$", said, re.MULTILINE)
    assert made == [made[0]] * 3
    assert "3 calls: 3 from the plan, 0 made by the app, 0 wasted" in said
    assert re.search(r"as one program: 3 calls, .*, 1 client step$", said, re.MULTILINE)


def test_example_without_server_explains_setup() -> None:
    made = run("llamaindex_query_pipeline.py" if IS_OLD else "llamaindex_tree_summary.py")
    assert made.returncode == 1
    assert "conure serve" in made.stderr.splitlines()[-1]
    assert "Traceback" not in made.stderr
