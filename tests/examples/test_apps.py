"""The LangChain and LangGraph examples keep their shapes, whatever the model says."""

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
    with served("--engine", "fake", "--engines", "2") as url:
        yield url


def run(name: str, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--url", url, *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def printed(name: str, url: str) -> str:
    made = run(name, url)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def runs(said: str) -> list[tuple[int, ...]]:
    """Calls planned, served, missed and wasted in every run that an explanation tells of."""
    line = r"(\d+) planned, (\d+) served, (\d+) missed, (\d+) wasted"
    return [tuple(map(int, found)) for found in re.findall(line, said)]


def test_both_calls_of_the_rag_chain_are_planned_in_every_turn(url: str) -> None:
    said = printed("langchain_rag.py", url)
    assert len(re.findall(r"^answer +\S", said, re.MULTILINE)) == 2
    assert runs(said) == [(2, 2, 0, 0)] * 2


def test_every_letter_is_sorted_and_answered(url: str) -> None:
    said = printed("langchain_router.py", url)
    kinds = re.findall(r"^kind +(\w+)$", said, re.MULTILINE)
    assert len(kinds) == 3
    assert set(kinds) <= {"repair", "sale", "complaint"}
    assert len(re.findall(r"^answer +\S", said, re.MULTILINE)) == 3
    assert runs(said) == [(2, 2, 0, 0)] * 3


def test_the_guide_has_as_many_parts_as_its_outline(url: str) -> None:
    said = printed("langchain_map.py", url)
    found = re.search(r"^headings +(\d)$", said, re.MULTILINE)
    assert found
    num_calls = 2 + int(found[1])
    assert 4 <= num_calls <= 6
    assert runs(said) == [(num_calls, num_calls, 0, 0)]


def test_the_agent_reads_before_it_answers_and_finds_what_it_knew(url: str) -> None:
    said = printed("langgraph_agent.py", url)
    turns = re.findall(r"^(human|ai|tool) ", said, re.MULTILINE)
    assert turns == ["human", "ai", "tool", "ai"] * 2
    known = re.findall(r"prompt (\d+) tokens, (\d+) of them known; engine (\S+)", said)
    assert len({engine for *_, engine in known}) == 1, "a thread stays where its KV is"
    lengths = [int(length) for length, *_ in known]
    for before, shared in zip(lengths, [int(shared) for _, shared, _ in known][1:], strict=False):
        assert shared > 0.8 * before


@pytest.mark.parametrize("name", NAMES)
def test_without_a_server_an_example_says_what_to_do(name: str) -> None:
    made = run(name, "http://127.0.0.1:9")
    assert made.returncode == 1
    assert "conure serve" in made.stderr
    assert "Traceback" not in made.stderr
