"""The examples run as a reader would run them, against a server in a process of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..served import environment, served

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on the scripted engine, at a port of the system's choice."""
    with served("--engine", "fake") as url:
        yield url


def run(url: str, *command: str) -> str:
    """Run an example and return what it prints."""
    made = subprocess.run(
        command,
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_hello_prints_what_each_call_wrote(url: str) -> None:
    printed = run(url, sys.executable, str(EXAMPLES / "hello.py"))
    assert re.search(r"^model \S+: \S+", printed, re.MULTILINE)
    assert re.search(r"^code: '.+'$", printed, re.MULTILINE)
    assert re.search(r"^test: '.+'$", printed, re.MULTILINE)
    assert "2 calls in" in printed


def test_the_map_reduce_prints_every_answer_and_the_receipt(url: str) -> None:
    script = str(EXAMPLES / "map_reduce.py")
    printed = run(url, sys.executable, script, "--url", url, "--max-tokens", "24")
    num_sections = len(re.findall(r"^section \d+\n  \S", printed, re.MULTILINE))
    assert 8 <= num_sections <= 12
    assert re.search(r"^answer\n  \S", printed, re.MULTILINE)
    assert f"calls            {num_sections + 1}" in printed
    tokens = re.search(r"(\d+) logical = (\d+) computed \+ (\d+) shared", printed)
    assert tokens is not None
    logical, computed, shared = map(int, tokens.groups())
    assert logical == computed + shared
    assert shared > 0
    assert re.search(r"critical path +notes_\d+_call -> answer_call", printed)
    assert "blocks held      0" in printed


def test_an_example_without_a_server_says_what_to_do() -> None:
    made = subprocess.run(
        [sys.executable, str(EXAMPLES / "hello.py")],
        env={**environment(), "CONURE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert made.returncode == 1
    assert "conure serve" in made.stderr
    assert "Traceback" not in made.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_shell_example_shows_every_dialect(url: str) -> None:
    printed = run(url, "bash", str(EXAMPLES / "rest.sh"))
    for said in (
        '"object":"list"',
        '"status":"accepted"',
        "event: program.finished",
        '"receipt"',
        '"semantic_var_id"',
        '"content"',
        '"chat.completion"',
    ):
        assert said in printed, printed


def test_the_shell_example_stops_at_the_first_error() -> None:
    made = subprocess.run(
        ["bash", str(EXAMPLES / "rest.sh")],
        env={**environment(), "CONURE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert made.returncode != 0
    assert "whole program" not in made.stdout


def test_the_text_is_several_pages_and_says_where_it_comes_from() -> None:
    for text in (EXAMPLES / "texts").glob("*.txt"):
        content = text.read_text(encoding="utf-8")
        header = content.partition("\n\n")[0]
        assert "public domain" in header
        assert re.search(r"\b1[0-9]{3}\b", header)
        assert len(content) > 10_000


@pytest.mark.parametrize("name", ["hello.py", "map_reduce.py"])
def test_importing_an_example_does_nothing(name: str) -> None:
    code = f"import runpy; runpy.run_path({str(EXAMPLES / name)!r}, run_name='example')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == ""
