"""The LangChain and LangGraph examples, right about every report on the built-in model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..served import environment, served

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["langchain_rag.py", "langchain_router.py", "langchain_map.py", "langgraph_agent.py"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on the built-in model, at a port of the system's choice."""
    with served("--threads", "1") as url:
        yield url


def run(name: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def printed(name: str, url: str) -> str:
    made = run(name, url)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def told(said: str, label: str) -> list[str]:
    """What is printed behind a label, line by line."""
    return re.findall(rf"^{label} +(.*)$", said, re.MULTILINE)


def calls(said: str) -> list[tuple[int, int]]:
    """Calls served from the plan and calls in all, of every run, the least first."""
    line = r"(\d+) served from the plan; (\d+) calls"
    return sorted((int(served), int(made)) for served, made in re.findall(line, said))


def test_the_rag_chain_remembers_where_it_happened(url: str) -> None:
    said = printed("langchain_rag.py", url)
    assert told(said, "place") == ["Tarnby"] * 3
    assert all("Tessa Brook" in report for report in told(said, "found"))
    assert told(said, "answer") == ["Tessa Brook", "yes", "Jonas Wenk"]
    assert calls(said) == [(2, 2)] * 3


def test_the_router_asks_what_the_yes_or_no_decides(url: str) -> None:
    said = printed("langchain_router.py", url)
    assert told(said, "is hurt") == ["yes", "no", "yes"]
    assert told(said, "who") == ["Jonas Wenk", "Ruth Sandberg"]
    assert told(said, "cause") == ["broken valve"]
    assert calls(said) == [(2, 2)] * 3


def test_the_map_asks_once_for_each_village_that_the_model_lists(url: str) -> None:
    said = printed("langchain_map.py", url)
    assert told(said, "doctor") == [
        "Kolvar: Pavel Orlin",
        "Tarnby: Emil Hartson",
        "Malbury: Ruth Sandberg",
        "Gresfell: Lena Moritz",
        "Ostwick: Jonas Wenk",
    ]
    assert told(said, "joined") == [
        "Pavel Orlin, Emil Hartson and Ruth Sandberg.",
        "Lena Moritz and Jonas Wenk.",
    ]
    assert calls(said) == [(4, 4), (5, 5)]


def test_the_agent_reads_on_until_a_report_answers_its_question(url: str) -> None:
    said = printed("langgraph_agent.py", url)
    assert [line.rpartition("? ")[2] for line in told(said, "answer")] == [
        "nobody",
        "nobody",
        "Jonas Wenk",
    ]
    assert [line.rpartition("? ")[2] for line in told(said, "check")] == ["no", "no", "yes"]
    made = re.search(r"one program: 6 calls, (\d+) of (\d+) prompt tokens computed", said)
    assert made is not None
    assert int(made[1]) < 0.6 * int(made[2]), "a check finds the KV of its answer"


@pytest.mark.parametrize("name", NAMES)
def test_without_a_server_an_example_says_what_to_do(name: str) -> None:
    made = run(name, "http://127.0.0.1:9")
    assert made.returncode == 1
    assert "conure serve" in made.stderr
    assert len(made.stderr.splitlines()) == 1
