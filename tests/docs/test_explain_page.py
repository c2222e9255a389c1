"""The example of docs/explain.md gives the output that the page shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..served import environment, served

PAGE = (Path(__file__).parents[2] / "docs" / "explain.md").read_text("utf-8")
BLOCK = re.compile(r"^<!-- tested: (\w+) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS: dict[str, str] = dict(BLOCK.findall(PAGE))
PAGES = 'pages:=["Tea is hot.", "Jam is sweet."]'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--engine", "fake") as url:
        yield url


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "review.json"
    file.write_text(BLOCKS["program"])
    return file


def conure(url: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "conure", *arguments, "--url", url],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_text_is_that_of_the_page(url: str, file: Path) -> None:
    assert conure(url, "explain", str(file), "-p", PAGES) == BLOCKS["text"]


def test_the_diagram_is_that_of_the_page(url: str, file: Path) -> None:
    printed = conure(url, "explain", str(file), "-p", PAGES, "--as", "mermaid")
    assert printed == BLOCKS["mermaid"]


def test_a_program_that_has_run_is_explained_with_its_figures(url: str, file: Path) -> None:
    status = json.loads(conure(url, "run", str(file), "-p", PAGES, "--json"))
    explained = json.loads(conure(url, "explain", status["id"], "--as", "json"))
    by_id = {node["id"]: node for node in explained["nodes"]}
    assert by_id["digest"]["actual_runs"] == 2
    assert explained["receipt"]["calls"] == 5
    actual = sum(node.get("actual_prompt", {}).get("logical", 0) for node in explained["nodes"])
    assert actual == explained["receipt"]["prompt_tokens"]["logical"]
