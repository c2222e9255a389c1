"""The figures of the README and of docs/start/benchmarks.md are those of the records.

`python -m tests.docs.test_figures` writes the tables of the engine from their records.
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
RECORDS = ROOT / "benchmarks" / "results" / "engine"
TABLE = re.compile(r"(<!-- (engine|small) -->\n)(.*?)(?=<!-- end of \2 -->)", re.DOTALL)
LINK = re.compile(r"\]\((?:https://.*?/blob/main/|\.\./\.\./)?(benchmarks/results/[^)]+)\)")


def cases(name: str) -> list[dict[str, Any]]:
    """Return the cases of a record, the smallest ratio to vLLM first."""
    found: list[dict[str, Any]] = json.loads((RECORDS / name).read_text("utf-8"))["cases"]
    return sorted(found, key=lambda case: case["ratios"]["vllm"]["median"])


def spread(case: dict[str, Any], peer: str) -> str:
    return "{median:.2f} ({min:.2f} to {max:.2f})".format(**case["ratios"][peer])


def engine_table() -> str:
    lines = [
        "| prompts | vLLM, tokens/s | Conure, tokens/s | Conure / vLLM (range) | % of the floor |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in cases("cpu.json"):
        vllm, conure = case["sides"]["vllm"], case["sides"]["conure"]
        rates = (f"{side['tokens_per_s']['median']:.0f}" for side in (vllm, conure))
        floors = " and ".join(f"{side['percent_of_floor']:.0f}" for side in (vllm, conure))
        lines.append("| " + " | ".join([case["case"], *rates, spread(case, "vllm"), floors]) + " |")
    return "\n".join(lines) + "\n"


def small_table() -> str:
    lines = [
        "| computation | Conure / vLLM (min to max) | Conure / llama.cpp (min to max) |",
        "| --- | --- | --- |",
    ]
    for case in cases("cpu-small.json"):
        ratios = (spread(case, "vllm"), spread(case, "llama.cpp"))
        lines.append("| " + " | ".join([case["case"], *ratios]) + " |")
    return "\n".join(lines) + "\n"


TABLES = {"engine": engine_table, "small": small_table}


def test_the_tables_of_the_engine_are_those_of_the_records() -> None:
    found = {match[2]: match[3] for match in TABLE.finditer(PAGE.read_text("utf-8"))}
    tables = {name: table() for name, table in TABLES.items()}
    assert found == tables, "run `python -m tests.docs.test_figures`"


def test_the_readme_has_the_range_of_the_record() -> None:
    medians = [case["ratios"]["vllm"]["median"] for case in cases("cpu.json")]
    row = next(line for line in README.splitlines() if "vLLM" in line and "cpu.json" in line)
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
    text = PAGE.read_text("utf-8")
    PAGE.write_text(TABLE.sub(lambda match: match[1] + TABLES[match[2]](), text), "utf-8")
