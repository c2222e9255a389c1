"""The examples of the README print what it shows, its commands exist, and its links work on PyPI.

A fenced block after a line `<!-- tested -->` runs against a temporary server with the built-in
model and prints the next block. The blocks find the server through CONURE_URL, as in a reader's
shell.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"^<!-- tested -->\n```(\w+)\n(.*?)^```$\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\(([^)]+)\)")
INTERPRETERS = {"python": [sys.executable], "bash": ["bash", "-euo", "pipefail"]}


class Block(NamedTuple):
    language: str
    text: str
    printed: str = ""


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
    server = [sys.executable, "benchmarks/temporary_server.py", "--"]
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


@pytest.mark.parametrize("language", INTERPRETERS)
def test_example_prints_what_the_readme_shows(
    language: str, blocks: dict[str, Block], tmp_path: Path
) -> None:
    assert run_block(blocks[language], tmp_path).strip() == blocks[language].printed.strip()


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
    documents = [*ROOT.glob("C*.md"), *(ROOT / "docs").rglob("*.md")]
    dead = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8"))
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert dead == []


def test_links_of_the_readme_are_absolute_and_lead_to_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository = project["urls"]["Repository"]
    raw = repository.replace("https://github.com", "https://raw.githubusercontent.com") + "/main/"
    bases = (f"{repository}/blob/main/", f"{repository}/tree/main/", raw)
    targets = LINK.findall(README.read_text("utf-8"))
    assert targets
    for target in targets:
        base = next((base for base in bases if target.startswith(base)), None)
        assert base is not None, target
        path = ROOT / target.removeprefix(base).partition("#")[0]
        assert path.is_dir() if "/tree/" in base else path.is_file(), target
