"""What docs/programs.md shows is what a server does.

A fenced block after a line `<!-- tested: NAME -->` runs against one server process on the
fake engine, whose functions are the page's own; the table of operators is computed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conure.server.program.expression import _SPECIAL, evaluate
from conure.server.program.operators import OPERATORS

from .served import environment, served

PAGE = (Path(__file__).parents[1] / "docs" / "programs.md").read_text("utf-8")
BLOCK = re.compile(r"^<!-- tested: (\w+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS: dict[str, str] = dict(BLOCK.findall(PAGE))
ROWS = re.findall(r"^\| `(\w+)` \| `(\{.+?\})` \| `(.+?)`", PAGE, re.MULTILINE)
SHOP = {"goods": ["tea", "jam"], "open": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "shop.py").write_text(BLOCKS["functions"], "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with served("--engine", "fake", "--functions", "shop") as url:
            yield url


def run_block(name: str, url: str, folder: Path) -> str:
    """What `conure run` prints for a program, or bash for a script. Both must end with 0."""
    block = folder / name
    block.write_text(BLOCKS[name], "utf-8")
    commands = {
        "{": [sys.executable, "-m", "conure.server.cli", "run", str(block)],
        "u": ["bash", "-euo", "pipefail", str(block)],
    }
    # Files, not pipes: curl may still be reading events when its shell has ended.
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        done = subprocess.run(
            commands[BLOCKS[name][0]],
            env={**environment(), "CONURE_URL": url},
            stdout=out,
            stderr=err,
            timeout=50,
            check=False,
        )
    said, wrong = (folder / "out").read_text("utf-8"), (folder / "err").read_text("utf-8")
    assert done.returncode == 0, said + wrong
    return said


def output_of(said: str, name: str) -> str:
    """The text of one output that `conure run` printed."""
    return said.split(f"--- {name}\n", 1)[1].split("\n--- ", 1)[0]


@pytest.mark.parametrize(
    ("block", "outputs"),
    [("prompt", ["name", "slogan"]), ("messages", ["answer"]), ("race", ["winner"])],
)
def test_programs_of_calls_run_and_have_their_outputs(
    block: str, outputs: list[str], url: str, tmp_path: Path
) -> None:
    said = run_block(block, url, tmp_path)
    for output in outputs:
        text = output_of(said, output)
        assert text.strip()
        assert not text.startswith("(")  # as what has no value is printed


def test_a_forced_tool_call_is_of_the_tool_and_keeps_its_schema(url: str, tmp_path: Path) -> None:
    call = json.loads(output_of(run_block("tools", url, tmp_path), "call"))
    assert call["name"] == "weather"
    assert json.loads(call["arguments"])["in"] in ("Oslo", "Rome")


COMPUTED = [
    ("expr", "summary"),
    ("call", "amount"),
    ("map", "lines"),
    ("if", "answer"),
    ("loop", "size"),
    ("try", "found"),
]


@pytest.mark.parametrize(("block", "output"), COMPUTED)
def test_programs_that_compute_give_what_the_page_says(
    block: str, output: str, url: str, tmp_path: Path
) -> None:
    promised = PAGE.split(BLOCKS[block], 1)[1].split("gives `", 1)[1].split("`", 1)[0]
    said = run_block(block, url, tmp_path)
    assert json.loads(output_of(said, output)) == json.loads(promised)


def test_the_client_step_is_asked_for_and_answered(url: str, tmp_path: Path) -> None:
    question, *answers = run_block("client", url, tmp_path).replace("}{", "}\n{").splitlines()
    named = ("name", "args", "output", "request_id", "attempt", "expires_at", "node")
    asked = json.loads(question)
    assert set(named) <= asked.keys()
    assert (asked["name"], asked["args"]) == ("stock", {"of": "tea"})
    stock, ad = map(json.loads, answers)
    assert stock["value"] == {"boxes": 7}
    assert ad["status"] == "done"


def test_the_session_takes_a_node_and_answers(url: str, tmp_path: Path) -> None:
    assert json.loads(run_block("session", url, tmp_path))["status"] == "done"


def test_every_operator_is_in_the_table() -> None:
    assert {name for name, _, _ in ROWS} == {*OPERATORS, *_SPECIAL}


@pytest.mark.parametrize(("name", "example", "gives"), ROWS)
def test_an_operator_gives_what_the_table_says(name: str, example: str, gives: str) -> None:
    expression: dict[str, Any] = json.loads(example)
    assert list(expression) == [name]
    value = evaluate(expression, {"shop": SHOP, "reply": " Score: 7 "})
    assert json.dumps(value) == gives
    assert json.dumps(SHOP) in PAGE
