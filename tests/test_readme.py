"""The README's examples run as they stand, and the commands that it names exist.

A fenced block after a line `<!-- tested -->` is run against a server process of its own on
the fake engine. The blocks find the server as a reader's shell would: by CONURE_URL.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^<!-- tested -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INTERPRETERS = {"python": [sys.executable], "bash": ["bash", "-euo", "pipefail"]}


class Block(NamedTuple):
    language: str
    text: str


@pytest.fixture(scope="module")
def blocks() -> dict[str, Block]:
    """The tested blocks, one of each language."""
    found = [Block(*match.groups()) for match in BLOCK.finditer(README.read_text("utf-8"))]
    assert sorted(block.language for block in found) == ["bash", "python"]
    return {block.language: block for block in found}


def run_block(block: Block, folder: Path) -> str:
    """What the block prints. It must end with 0."""
    script = folder / "block"
    script.write_text(block.text, "utf-8")
    server = [sys.executable, "benchmarks/own_server.py", "--engine", "fake", "--"]
    done = subprocess.run(
        [*server, *INTERPRETERS[block.language], str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_langchain_example_runs_and_prints_its_answer_and_receipt(
    blocks: dict[str, Block], tmp_path: Path
) -> None:
    output = run_block(blocks["python"], tmp_path)
    answer, receipt = output.rstrip("\n").rsplit("\n", 1)
    assert answer.strip()
    found = re.fullmatch(r"(\d+) calls, (\d+) of (\d+) prompt tokens computed", receipt)
    assert found, output
    calls, computed, logical = map(int, found.groups())
    assert calls == 3
    # The two reviews start with the same text, which is computed once.
    assert 0 < computed < logical


def test_the_curl_example_runs_and_prints_the_value(
    blocks: dict[str, Block], tmp_path: Path
) -> None:
    output = run_block(blocks["bash"], tmp_path)
    assert re.search(r'"status":"done"', output), output
    assert re.search(r'"value":"[^"]+', output), output


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    block = Block(
        "bash", "curl -sSf $CONURE_URL/v1/programs/p_none > /dev/null 2>&1\necho unreachable"
    )
    with pytest.raises(AssertionError):
        run_block(block, tmp_path)


def test_every_make_command_in_the_documents_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text("utf-8")
        named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE))
        assert named, name
        assert {first or second for first, second in named} <= targets


def test_every_relative_link_in_the_documents_leads_somewhere() -> None:
    documents = [README, *ROOT.glob("C*.md"), *(ROOT / "docs").rglob("*.md")]
    dead = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8"))
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert dead == []
