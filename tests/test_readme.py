"""The examples of the README run, and the commands that it names exist.

A fenced block after a line `<!-- tested -->` runs against a temporary server with the fake engine.
The blocks find the server through CONURE_URL, as in a reader's shell.
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
    """Return the tested blocks, one per language."""
    found = [Block(*match.groups()) for match in BLOCK.finditer(README.read_text("utf-8"))]
    assert sorted(block.language for block in found) == ["bash", "python"]
    return {block.language: block for block in found}


def run_block(block: Block, folder: Path) -> str:
    """Run the block, which must exit with 0, and return its output."""
    script = folder / "block"
    script.write_text(block.text, "utf-8")
    server = [sys.executable, "benchmarks/temporary_server.py", "--engine", "fake", "--"]
    done = subprocess.run(
        [*server, *INTERPRETERS[block.language], str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_langchain_example_prints_answer_and_receipt(
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


def test_curl_example_prints_the_value(blocks: dict[str, Block], tmp_path: Path) -> None:
    output = run_block(blocks["bash"], tmp_path)
    assert re.search(r'"status":"done"', output), output
    assert re.search(r'"value":"[^"]+', output), output


def test_failing_example_is_detected(tmp_path: Path) -> None:
    block = Block(
        "bash", "curl -sSf $CONURE_URL/v1/programs/p_none > /dev/null 2>&1\necho unreachable"
    )
    with pytest.raises(AssertionError):
        run_block(block, tmp_path)


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text("utf-8")
        named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE))
        assert named, name
        assert {first or second for first, second in named} <= targets


def test_relative_links_resolve() -> None:
    documents = [README, *ROOT.glob("C*.md"), *(ROOT / "docs").rglob("*.md")]
    dead = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8"))
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert dead == []
