"""The figures of the README and of docs/start/benchmarks.md are those of the records.

`python -m tests.docs.test_figures` writes the table of the engine from its record.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "benchmarks.md"
README = (ROOT / "README.md").read_text("utf-8")
RECORD = ROOT / "benchmarks" / "results" / "engine" / "cpu.json"
TABLE = re.compile(r"(?<=<!-- engine -->\n).*(?=<!-- end of engine -->)", re.DOTALL)
LINK = re.compile(r"\]\((?:https://.*?/blob/main/|\.\./\.\./)?(benchmarks/results/[^)]+)\)")


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))["cases"]
    return [case for case in found if "ratio" in case]


def table() -> str:
    """Return the rates of both engines and their ratio, the smallest first."""
    lines = [
        "| prompts | vLLM, tokens/s | Conure, tokens/s | Conure / vLLM (min to max) |",
        "| --- | --- | --- | --- |",
    ]
    for case in sorted(cases(), key=lambda case: case["ratio"]["median"]):
        rates = {name: side["tokens_per_s"]["median"] for name, side in case["sides"].items()}
        ratio = "{median:.2f} ({min:.2f} to {max:.2f})".format(**case["ratio"])
        row = (case["case"], f"{rates['vllm']:.0f}", f"{rates['conure']:.0f}", ratio)
        lines.append("| {} | {} | {} | {} |".format(*row))
    return "\n".join(lines) + "\n"


def test_the_table_of_the_engine_is_that_of_the_record() -> None:
    found = TABLE.search(PAGE.read_text("utf-8"))
    assert found is not None
    assert found[0] == table(), "run `python -m tests.docs.test_figures`"


def test_the_readme_has_the_range_of_the_record() -> None:
    medians = [case["ratio"]["median"] for case in cases()]
    row = next(line for line in README.splitlines() if "vLLM" in line and "engine.py" in line)
    assert f"{min(medians):.2f} to {max(medians):.2f}" in row


def rows_with_a_record() -> list[str]:
    lines = [*README.splitlines(), *PAGE.read_text("utf-8").splitlines()]
    return [line for line in lines if line.startswith("|") and LINK.search(line)]


@pytest.mark.parametrize("line", rows_with_a_record())
def test_the_figures_of_a_row_are_in_its_record(line: str) -> None:
    found = LINK.search(line)
    assert found is not None
    if not found[1].endswith(".json"):
        record = (ROOT / found[1]).read_text("utf-8")
        figures = re.findall(r"\d+\.\d+", LINK.sub("", line))
        assert figures
        assert [figure for figure in figures if figure not in record] == []


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text("utf-8")), "utf-8")
