"""`if`: which branch runs, and what the branch that is not taken leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ...inprocess import answer, client, expr, generate, insert, server_harness, var
from .control_nodes import if_, map_, phases

Json = Any


@pytest.mark.parametrize("cond", [True, False])
async def test_untaken_branch_never_starts(tmp_path: Path, cond: bool) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            if_(
                var("flag"),
                [generate("yes", "Y", writes="y")],
                [generate("no", "N", writes="n")],
                out=["y", "n"],
            ),
            generate("end", insert("out")),
        ]
        program = await harness.submit(nodes, inputs={"flag": cond}, outputs=["end"])
        assert await program.value("out") == answer("Y" if cond else "N")
        other = "no" if cond else "yes"
        events = [e.type for e in await program.events() if e.data.get("node") == other]
        assert events == ["node.skipped"]
        status = await program.end()
        assert (status.nodes[other].status, status.nodes[other].attempt) == ("skipped", 0)
        error = status.variables["n" if cond else "y"].error
        assert error
        assert error.code == "if.not_taken"
        assert status.variables["c.taken"].value == ("then" if cond else "else")


async def test_only_the_taken_branch_is_awaited(tmp_path: Path) -> None:
    """`merge` must not wait for a variable of the branch that is not taken."""
    async with server_harness(tmp_path) as harness:
        nodes = [
            client("ask", "later"),
            if_(True, [expr("e", 1, "o")], [], out=["o", "later"]),
            client("go", "gone", args={"out": var("out")}),
        ]
        program = await harness.submit(nodes, outputs=["out"])
        assert await program.value("out") == 1
        await program.cancel()


async def test_if_in_a_map_decides_per_item(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        choice = if_(
            {"gt": [var("x"), 1]},
            [generate("big", "B", insert("x"), writes="b")],
            [expr("small", {"concat": ["s", {"json": var("x")}]}, "s")],
            o=["b", "s"],
        )
        nodes = [map_([1, 2, 3], choice, collect={"a": "o"})]
        program = await harness.submit(nodes, outputs=["a"])
        assert await program.value("a") == ["s1", answer("B2"), answer("B3")]
        assert phases(await program.end())["big.0"] == "skipped"
