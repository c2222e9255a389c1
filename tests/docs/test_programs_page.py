"""The examples of docs/programs.md run, with the outputs that the page shows.

A fenced block after a line `<!-- tested: NAME -->` runs against one server process with the
built-in model and the page's functions. The table of operators is evaluated.
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

from conure.server.program.errors import ExpressionError
from conure.server.program.expressions.evaluate import SPECIAL_OPERATORS, evaluate
from conure.server.program.expressions.operators import OPERATORS

from ..served import environment, served

PAGE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text("utf-8")
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
        with served("--functions", "shop") as url:
            yield url


def run_block(name: str, url: str, folder: Path) -> str:
    """Return what `conure run` prints for a program, or bash for a script."""
    block = folder / name
    block.write_text(BLOCKS[name], "utf-8")
    commands = {
        "{": [sys.executable, "-m", "conure", "run", "--json", str(block)],
        "u": ["bash", "-euo", "pipefail", str(block)],
    }
    # Files, not pipes: curl may still read events after its shell has ended.
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        done = subprocess.run(
            commands[BLOCKS[name][0]],
            env={**environment(), "CONURE_URL": url},
            stdout=out,
            stderr=err,
            timeout=200,
            check=False,
        )
    printed, errors = (folder / "out").read_text("utf-8"), (folder / "err").read_text("utf-8")
    assert done.returncode == 0, printed + errors
    return printed


def output_of(printed: str, name: str) -> str:
    """Return one output of the status that `conure run --json` printed; JSON unless it is text."""
    value = json.loads(printed)["variables"][name]["value"]
    return value if isinstance(value, str) else json.dumps(value)


def shown(block: str) -> str:
    """Return the result of a block according to the page."""
    return re.split(r"gives `", PAGE.split(BLOCKS[block], 1)[1], maxsplit=1)[1].split("`", 1)[0]


@pytest.mark.parametrize("block", ["prompt", "text_prompt", "messages", "tools", "race"])
def test_outputs_of_the_model_match_the_page(block: str, url: str, tmp_path: Path) -> None:
    printed = run_block(block, url, tmp_path)
    expected = json.loads(shown(block))
    status = json.loads(printed)["variables"]
    assert {name: status[name]["value"] for name in expected} == expected


COMPUTED = [
    ("expr", "summary"),
    ("call", "amount"),
    ("builtin", "double"),
    ("map", "lines"),
    ("if", "answer"),
    ("loop", "size"),
    ("try", "found"),
]


@pytest.mark.parametrize(("block", "output"), COMPUTED)
def test_computed_outputs_match_the_page(block: str, output: str, url: str, tmp_path: Path) -> None:
    printed = run_block(block, url, tmp_path)
    assert json.loads(output_of(printed, output)) == json.loads(shown(block))


def test_the_procedure_is_called_in_both_ways(url: str, tmp_path: Path) -> None:
    printed = run_block("procedure", url, tmp_path).replace("}{", "}\n{").splitlines()
    stored, called, run = map(json.loads, printed)
    assert stored["aliases"] == ["prod"]
    assert (called["value"], run["value"]) == ("Hello Ada!", "Hello Bob!")


def test_the_client_step_is_requested_and_answered(url: str, tmp_path: Path) -> None:
    question, *answers = run_block("client", url, tmp_path).replace("}{", "}\n{").splitlines()
    named = ("name", "args", "output", "request_id", "attempt", "expires_at", "node")
    requested = json.loads(question)
    assert set(named) <= requested.keys()
    assert (requested["name"], requested["args"]) == ("archive", {"of": "12 May"})
    report, guard = map(json.loads, answers)
    assert report["value"].endswith("Tessa Brook.")
    assert guard == json.loads(shown("client"))


def test_the_session_accepts_a_node(url: str, tmp_path: Path) -> None:
    assert json.loads(run_block("session", url, tmp_path)) == json.loads(shown("session"))


def test_the_table_has_every_operator() -> None:
    assert {name for name, _, _ in ROWS} == {*OPERATORS, *SPECIAL_OPERATORS}


@pytest.mark.parametrize(("name", "example", "gives"), ROWS)
def test_operators_match_the_table(name: str, example: str, gives: str) -> None:
    expression: dict[str, Any] = json.loads(example)
    assert list(expression) == [name]
    scope = {"shop": SHOP, "reply": " Score: 7 "}
    if name == "fail":
        with pytest.raises(ExpressionError) as caught:
            evaluate(expression, scope)
        assert caught.value.code == gives
    else:
        assert json.dumps(evaluate(expression, scope)) == gives
    assert json.dumps(SHOP) in PAGE
