"""Values that a branch yields are values of the program, and in its critical path."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..inprocess import server_harness

SOURCE = """a: str
with job():
    if a == "1":
        fixed = gen("x", max_tokens=9)
        yield {"fixed": fixed}
yield {"a": a}
"""
RACE = """a = gen("A", max_tokens=400, ignore_eos=True)
b = gen("B", max_tokens=3)
winner = race(a, b)
yield {"winner": winner}
"""


@pytest.mark.parametrize(("taken", "status"), [("1", "done"), ("2", "skipped")])
async def test_what_a_branch_yields_has_a_value_if_it_was_taken(
    tmp_path: Path, taken: str, status: str
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit_source(SOURCE, inputs={"a": taken})
        ended = await program.end()
        assert ended.status == "done", ended.error
        assert (await program.get("fixed")).status == status


async def test_the_critical_path_of_a_race_goes_through_its_winner(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.005) as harness:
        program = await harness.submit_source(RACE)
        receipt = (await program.end()).receipt
        assert receipt
        assert receipt.critical_path == ["b", "race", "losers", "winner", "yield"]
