"""The examples of docs/traces.md give the outputs that the page shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..served import environment, served

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "traces.md").read_text("utf-8")
BLOCK = re.compile(
    r"^<!-- tested: (\w+) -->\n```\w*\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
BLOCKS: dict[str, tuple[str, str]] = {
    name: (text, output) for name, text, output in BLOCK.findall(PAGE)
}
TEA = re.search(
    r"^<!-- tested: tea .*?```python\n(.*?)^```$",
    (DOCS / "language.md").read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--engine", "fake") as url:
        yield url


def test_the_commands_print_the_example(url: str, tmp_path: Path) -> None:
    assert TEA is not None
    (tmp_path / "tea.py").write_text(TEA.group(1), "utf-8")
    (tmp_path / "commands.sh").write_text(
        f'conure() {{ "{sys.executable}" -m conure "$@"; }}\n{BLOCKS["record"][0]}', "utf-8"
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "commands.sh"],
        cwd=tmp_path,
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert BLOCKS["examples"][0] in done.stdout
    spans = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [span["attributes"]["openinference.span.kind"] for span in spans] == [
        "CHAIN",
        "LLM",
        "LLM",
    ]


def test_the_script_prints_what_the_page_shows(url: str, tmp_path: Path) -> None:
    text, expected = BLOCKS["python"]
    file = tmp_path / "script.py"
    file.write_text(text, "utf-8")
    done = subprocess.run(
        [sys.executable, str(file)],
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
