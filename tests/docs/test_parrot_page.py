"""The script of docs/parrot.md prints what the page shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ..served import environment, served

PAGE = (Path(__file__).parents[2] / "docs" / "parrot.md").read_text("utf-8")


def block(kind: str, name: str) -> str:
    """Return the fenced block after the page's mark of this kind and name."""
    found = re.search(rf"^<!-- {kind}: {name} -->\n```\w+\n(.*?)^```$", PAGE, re.M | re.S)
    assert found, f"docs/parrot.md has no {kind} block {name}"
    return found[1]


def test_the_papers_calls_print_what_the_page_shows(tmp_path: Path) -> None:
    script = tmp_path / "paper.sh"
    script.write_text(block("tested", "paper"), "utf-8")
    with served("--engine", "fake") as url:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", str(script)],
            env={**environment(), "CONURE_URL": url},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == block("printed", "paper").splitlines()
