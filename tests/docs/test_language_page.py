"""The examples of docs/language.md run, with the outputs that the page shows.

A fenced block after `<!-- tested: NAME ARGUMENTS -->` runs on one server with the fake engine. The
block after it has the yields of the program, in any order, or what a script prints.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ..served import environment, served

PAGE = Path(__file__).parents[2] / "docs" / "language.md"
BLOCK = re.compile(
    r"^<!-- tested: (\w+)(.*?) -->\n```(\w*)\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


class Example(NamedTuple):
    """One example of the page."""

    name: str
    arguments: list[str]
    language: str
    text: str
    expected: str


EXAMPLES = {
    found[0]: Example(found[0], found[1].split(), *found[2:])
    for found in BLOCK.findall(PAGE.read_text("utf-8"))
}


def test_every_marked_block_is_tested() -> None:
    assert len(EXAMPLES) == PAGE.read_text("utf-8").count("<!-- tested") > 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--engine", "fake") as url:
        yield url


def run(example: Example, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example as the page describes."""
    suffix = {"python": ".py", "bash": ".sh", "": ".template"}[example.language]
    file = folder / (example.name + suffix)
    file.write_text(example.text.replace("conure.Client()", f"conure.Client({url!r})"), "utf-8")
    command = [sys.executable, "-m", "conure", "run", str(file), *example.arguments, "--url", url]
    if example.language == "bash":
        command = ["bash", "-euo", "pipefail", str(file)]
    elif "import conure" in example.text:
        command = [sys.executable, str(file)]
    return subprocess.run(
        command,
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the yields that `conure run` printed, or the output of a script."""
    yields = [line for line in done.stderr.splitlines() if line.startswith("yield ")]
    return [line.removeprefix("yield ") for line in yields] or done.stdout.splitlines()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ("http", "refused")])
def test_an_example_gives_what_the_page_shows(name: str, url: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    done = run(example, url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(printed(done)) == sorted(example.expected.splitlines())


def test_the_request_gets_a_yield(url: str, tmp_path: Path) -> None:
    done = run(EXAMPLES["http"], url, tmp_path)
    assert "event: yield" in done.stdout
    assert '"ad":' in done.stdout


def test_a_refusal_is_shown_as_the_page_shows_it(url: str, tmp_path: Path) -> None:
    done = run(EXAMPLES["refused"], url, tmp_path)
    assert done.returncode == 1
    assert EXAMPLES["refused"].expected.strip() in done.stderr
