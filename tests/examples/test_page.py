"""examples/README.md shows what the examples print, apart from ids and times."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..served import environment, served

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```console\n\$ python ([^\n]*)\n(.*?)^```$", PAGE, re.M | re.S)
VARYING = re.compile(r"\bp_[0-9a-f]{24}\b|\b\d+\.\d\d s\b|\d+ of (?=\d+ prompt tokens)")


def test_examples_print_what_the_page_shows() -> None:
    assert len(BLOCKS) == PAGE.count("```console")
    with served("--threads", "1") as url:
        for command, expected in BLOCKS:
            done = subprocess.run(
                [sys.executable, *shlex.split(command)],
                cwd=ROOT,
                env={**environment(), "CONURE_URL": url},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert VARYING.sub("_", done.stdout.strip()) == VARYING.sub("_", expected.strip())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.*")), ids=lambda path: path.name
)
def test_every_example_is_listed(path: Path) -> None:
    assert path.name in ("README.md", "show.py") or f"]({path.name})" in PAGE
