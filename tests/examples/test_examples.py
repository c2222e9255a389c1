"""The examples, run as a reader would run them against a server process."""

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

FINDINGS = ["Jonas Wenk", "nobody", "Ruth Sandberg", "Emil Hartson", "nobody"]
JOINED = "Jonas Wenk, Ruth Sandberg and Emil Hartson."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """URL of a server with the built-in model."""
    with served("--threads", "1") as url:
        yield url


def run(url: str, *command: str) -> str:
    """Run a command and return its output."""
    made = subprocess.run(
        command,
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def example(url: str, name: str, *arguments: str) -> str:
    """Run a Python example and return its output."""
    return run(url, sys.executable, str(EXAMPLES / name), *arguments)


def answers(printed: str) -> dict[str, list[str]]:
    """Return the values that `show` prints by name, one per run."""
    values: dict[str, list[str]] = {}
    for name, value in re.findall(r"^  (\w+) = (.*)$", printed, re.MULTILINE):
        values.setdefault(name, []).append(value)
    return values


def test_hello_prints_each_output(url: str) -> None:
    printed = example(url, "hello.py")
    assert re.search(r"^model builtin: \S+", printed, re.MULTILINE)
    assert "guests: 'Mira Dolan, Jonas Wenk, Ruth Sandberg'" in printed
    assert "sentence: 'The guests were Mira Dolan, Jonas Wenk, Ruth Sandberg.'" in printed
    assert "2 calls in" in printed


def test_chain_passes_each_answer_on(url: str) -> None:
    assert answers(example(url, "chain.py")) == {
        "place": ["Tarnby"],
        "doctor": ["Emil Hartson"],
        "letter": ["Dear Emil Hartson, please come to Tarnby."],
    }


def test_router_follows_the_yes_or_no(url: str) -> None:
    assert answers(example(url, "router.py")) == {
        "is_hurt": ["yes", "no"],
        "answer": ["Jonas Wenk", "broken valve"],
    }


def test_critic_judges_both_answers(url: str) -> None:
    assert answers(example(url, "critic.py")) == {
        "guard": ["Tessa Brook"],
        "verdict": ["Tessa Brook, so yes."],
        "verdict_on_claim": ["Tessa Brook, so no."],
        "place": ["Kolvar"],
        "witnesses": ["Ruth Sandberg, Emil Hartson, Lena Moritz"],
    }


def test_extraction_returns_a_json_value(url: str) -> None:
    assert answers(example(url, "extraction.py")) == {
        "found": ['{"inspector": "Mira Dolan", "place": "Malbury"}'],
        "who": ["Mira Dolan"],
    }


def test_map_reduce_answers_every_report(url: str) -> None:
    printed = example(url, "map_reduce.py", "--url", url)
    assert re.findall(r"^   Who was hurt\? (.*)$", printed, re.MULTILINE) == FINDINGS
    assert f"answer: {JOINED}\n" in printed


def test_map_reduce_agrees_with_single_requests(url: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "program.json")
    printed = example(url, "map_reduce.py", "--url", url, "--save", saved)
    assert len(re.findall(r"^   Who was hurt\? ", printed, re.MULTILINE)) == 5
    assert "calls            6" in printed
    tokens = re.search(r"(\d+) logical = (\d+) computed \+ (\d+) shared", printed)
    assert tokens is not None
    logical, computed, shared = map(int, tokens.groups())
    assert logical == computed + shared
    assert shared > 0
    assert re.search(r"critical path +finding_\d+_call -> answer_call", printed)
    assert "blocks held      0" in printed
    table = example(url, "map_reduce.py", "--url", url, "--by-request", "--compare", saved)
    assert re.search(r"^answers equal +yes$", table, re.MULTILINE)
    assert re.search(r"^requests of the app +1 +6$", table, re.MULTILINE)


def test_hello_without_a_server_advises_the_user() -> None:
    made = subprocess.run(
        [sys.executable, str(EXAMPLES / "hello.py")],
        env={**environment(), "CONURE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert made.returncode == 1
    assert "conure serve" in made.stderr
    assert "Traceback" not in made.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_shell_example_shows_every_api(url: str) -> None:
    printed = run(url, "bash", str(EXAMPLES / "rest.sh"))
    for text in (
        '"object":"list"',
        '"status":"accepted"',
        "event: program.finished",
        '"receipt"',
        '"semantic_var_id"',
        '"content":"Tessa Brook"',
        '"chat.completion"',
    ):
        assert text in printed, printed


def test_shell_example_stops_at_the_first_error() -> None:
    made = subprocess.run(
        ["bash", str(EXAMPLES / "rest.sh")],
        env={**environment(), "CONURE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert made.returncode != 0
    assert "submit a program" not in made.stdout


def test_texts_name_their_source() -> None:
    texts = list((EXAMPLES / "texts").glob("*.txt"))
    assert texts
    for text in texts:
        content = text.read_text(encoding="utf-8")
        header = content.partition("\n\n")[0]
        assert "public domain" in header
        assert re.search(r"\b1[0-9]{3}\b", header)
        assert len(content) > 10_000


@pytest.mark.parametrize(
    "name", ["hello.py", "map_reduce.py", "chain.py", "router.py", "critic.py", "extraction.py"]
)
def test_importing_an_example_prints_nothing(name: str) -> None:
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"runpy.run_path({str(EXAMPLES / name)!r}, run_name='example')"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == ""
