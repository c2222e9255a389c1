"""The examples of docs/langchain.md run, and its table matches the tests of chains.

A fenced block after a line `<!-- tested: NAME -->` runs against a server with the built-in model;
the block `scripted` against the fake engine with the script of the page. It prints the fenced block
after it, if there is one, apart from the ids of programs.
`python -m tests.docs.test_langchain_page` rewrites the table.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conure.adapters.langchain import ChatConure, accelerate, to_program

from ..adapters.langchain.shapes import Shape, shapes
from ..served import environment, served

PATH = Path(__file__).parents[2] / "docs" / "langchain.md"
PAGE = PATH.read_text("utf-8")
BLOCK = re.compile(
    r"^<!-- tested: (\w+) -->\n```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
BLOCKS: dict[str, str] = {name: block for name, block, _ in BLOCK.findall(PAGE)}
OUTPUTS: dict[str, str] = {name: shown for name, _, shown in BLOCK.findall(PAGE) if shown}
PROGRAM_ID = re.compile(r"\bp_[0-9a-f]{24}\b")
TABLE = re.compile(r"(?<=<!-- shapes -->\n).*(?=<!-- end of shapes -->)", re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


@pytest.fixture(scope="module")
def scripted_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script = tmp_path_factory.mktemp("script") / "answers.json"
    (text,) = re.findall(r"^<!-- script: answers -->\n```json\n(.*?)^```$", PAGE, re.M | re.S)
    script.write_text(text, "utf-8")
    with served("--engine", "fake", "--script", str(script)) as url:
        yield url


@pytest.mark.parametrize("name", BLOCKS)
def test_example_runs(name: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("scripted_url" if name == "scripted" else "url")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[name]],
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if name in OUTPUTS:
        assert without_ids(done.stdout) == without_ids(OUTPUTS[name])
    else:
        assert {"agent": "4 messages\np_", "errors": "prompt.too_long - "}[name] in done.stdout


def without_ids(printed: str) -> str:
    return PROGRAM_ID.sub("p_...", printed.strip())


def compiled(shape: Shape) -> str:
    """Return the kind of program that `to_program` compiles a chain to."""
    if shape.refused:
        return f"refused: {shape.refused}"
    num_steps = len(to_program(shape.chain).functions)
    return f"{num_steps} client step{'s' * (num_steps > 1)}" if num_steps else "whole"


def table() -> str:
    """Return the table of all shapes.

    Columns: calls, planned calls, values that the chain computes itself, and the compiled program.
    """
    lines = [
        "| chain | calls | from the plan | values computed by the chain | `to_program` |",
        "|---|---|---|---|---|",
    ]
    for name, shape in shapes(ChatConure()).items():
        awaited = accelerate(shape.chain, model=ChatConure()).explain().plan.awaited.values()
        needed = [each.what for each in awaited if each.source.views]
        waited = ", ".join(dict.fromkeys(needed))
        num_calls = shape.served + shape.missed
        cells = (name, num_calls, shape.served, waited, compiled(shape))
        lines.append("| {} | {} | {} | {} | {} |".format(*cells))
    return "\n".join(lines) + "\n"


def test_table_of_shapes_is_current() -> None:
    found = TABLE.search(PAGE)
    assert found is not None
    assert found.group() == table(), "run `python -m tests.docs.test_langchain_page`"


if __name__ == "__main__":
    PATH.write_text(TABLE.sub(lambda _: table(), PAGE), "utf-8")
