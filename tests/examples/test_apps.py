"""The LangChain and LangGraph examples give the right answers with the built-in model."""

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
    """URL of a server with the built-in model."""
    with served("--threads", "1") as url:
        yield url


def run(name: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def printed(name: str, url: str) -> str:
    made = run(name, url)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def lines_of(output: str, label: str) -> list[str]:
    """Return the texts after a label, one per line."""
    return re.findall(rf"^{label} +(.*)$", output, re.MULTILINE)


def calls(output: str) -> list[tuple[int, int]]:
    """Return (calls served from the plan, all calls) of each run, sorted."""
    line = r"(\d+) served from the plan; (\d+) calls"
    return sorted((int(served), int(total)) for served, total in re.findall(line, output))


def test_rag_keeps_the_place_of_the_first_question(url: str) -> None:
    output = printed("langchain_rag.py", url)
    assert lines_of(output, "place") == ["Tarnby"] * 3
    assert all("Tessa Brook" in report for report in lines_of(output, "found"))
    assert lines_of(output, "answer") == ["Tessa Brook", "yes", "Jonas Wenk"]
    assert calls(output) == [(2, 2)] * 3


def test_router_follows_the_yes_or_no(url: str) -> None:
    output = printed("langchain_router.py", url)
    assert lines_of(output, "is hurt") == ["yes", "no", "yes"]
    assert lines_of(output, "who") == ["Jonas Wenk", "Ruth Sandberg"]
    assert lines_of(output, "cause") == ["broken valve"]
    assert calls(output) == [(2, 2)] * 3


def test_map_makes_one_call_per_village(url: str) -> None:
    output = printed("langchain_map.py", url)
    assert lines_of(output, "doctor") == [
        "Kolvar: Pavel Orlin",
        "Tarnby: Emil Hartson",
        "Malbury: Ruth Sandberg",
        "Gresfell: Lena Moritz",
        "Ostwick: Jonas Wenk",
    ]
    assert lines_of(output, "joined") == [
        "Pavel Orlin, Emil Hartson and Ruth Sandberg.",
        "Lena Moritz and Jonas Wenk.",
    ]
    assert calls(output) == [(4, 4), (5, 5)]


def test_agent_reads_until_a_report_answers(url: str) -> None:
    output = printed("langgraph_agent.py", url)
    assert [line.rpartition("? ")[2] for line in lines_of(output, "answer")] == [
        "nobody",
        "nobody",
        "Jonas Wenk",
    ]
    assert [line.rpartition("? ")[2] for line in lines_of(output, "check")] == ["no", "no", "yes"]
    made = re.search(r"one program: 6 calls, (\d+) of (\d+) prompt tokens computed", output)
    assert made is not None
    assert int(made[1]) < 0.6 * int(made[2]), "a check reuses the KV cache of its answer"


@pytest.mark.parametrize("name", NAMES)
def test_examples_without_a_server_advise_the_user(name: str) -> None:
    made = run(name, "http://127.0.0.1:9")
    assert made.returncode == 1
    assert "conure serve" in made.stderr
    assert len(made.stderr.splitlines()) == 1
