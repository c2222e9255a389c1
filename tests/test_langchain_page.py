"""What docs/langchain.md shows runs, and its table says what the tests of chains count.

A fenced block after a line `<!-- tested: NAME -->` runs against a server on the fake engine.
`python -m tests.test_langchain_page` writes the table anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conure.adapters.langchain import ChatConure, accelerate, to_program

from .adapters.shapes import Shape, shapes
from .served import environment, served

PATH = Path(__file__).parents[1] / "docs" / "langchain.md"
PAGE = PATH.read_text("utf-8")
BLOCK = re.compile(r"^<!-- tested: (\w+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS: dict[str, str] = dict(BLOCK.findall(PAGE))
TABLE = re.compile(r"(?<=<!-- shapes -->\n).*(?=<!-- end of shapes -->)", re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--engine", "fake") as url:
        yield url


@pytest.mark.parametrize("name", BLOCKS)
def test_an_example_runs(name: str, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[name]],
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    promised = {
        "tools": "weather {'city'",
        "values": "boxes=",
        "agent": "4 messages\np_",
        "errors": "prompt.too_long - ",
        "accelerate": "3 served, 0 missed",
    }
    assert promised.get(name, "") in done.stdout
    assert done.stdout.strip()


def compiled(shape: Shape) -> str:
    """What `to_program` makes of a chain."""
    if shape.refused:
        return f"refused: {shape.refused}"
    num_steps = len(to_program(shape.chain).functions)
    return f"{num_steps} client step{'s' * (num_steps > 1)}" if num_steps else "whole"


def table() -> str:
    """Every shape: its calls, those that the plan has, what the chain makes itself, and what it
    is as a program.
    """
    lines = [
        "| chain | calls | from the plan | made by the chain, and waited for | `to_program` |",
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


def test_the_table_of_shapes_is_what_the_tests_count() -> None:
    found = TABLE.search(PAGE)
    assert found is not None
    assert found.group() == table(), "run `python -m tests.test_langchain_page`"


if __name__ == "__main__":
    PATH.write_text(TABLE.sub(lambda _: table(), PAGE), "utf-8")
