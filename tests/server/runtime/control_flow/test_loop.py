"""`loop`: rounds, carried variables, limits and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ...inprocess import answer, client, expr, generate, insert, server_harness, var
from .control_nodes import loop, map_, phases

Json = Any


async def test_each_round_has_the_whole_time_of_a_job_in_the_body(tmp_path: Path) -> None:
    jobs = {"j": {"timeout_s": 0.05, "on_error": "isolate"}}
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([loop(client("c", "y", job="j"), count=2)], jobs=jobs)
        status = await program.end()
    assert [phases(status)[name] for name in ("c.0", "c.1")] == ["failed", "failed"]


async def test_loop_carries_variables_between_rounds(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(
            generate("s", insert("text"), writes="o", max_tokens=3),
            items=["a", "b"],
            index="i",
            **{"as": "x"},
            carry={"text": ["0", {"concat": [var("text"), var("x"), var("o")]}]},
        )
        program = await harness.submit([node], outputs=["text"])
        one = "0a" + answer("0")[:3]
        two = one + "b" + answer(one)[:3]
        assert await program.value("text") == two
        status = await program.end()
        values = {name: variable.value for name, variable in status.variables.items()}
        assert (values["text.0"], values["text.1"], values["text.2"]) == ("0", one, two)
        assert phases(status) == {
            "l": "done",
            "s.0": "done",
            "l.0": "done",
            "s.1": "done",
            "l.1": "done",
        }


async def test_a_loop_ends_when_until_holds(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(
            expr("e", {"add": [var("n"), 2]}, "o"),
            carry={"n": [0, var("o")]},
            until={"gt": [var("o"), 5]},
            max_iter=10,
        )
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == 6
        assert "l.3" not in (await program.end()).nodes


@pytest.mark.parametrize("fields", [{"until": "is_last"}, {"count": "rounds"}])
async def test_a_text_as_count_or_until_names_a_variable(tmp_path: Path, fields: Json) -> None:
    async with server_harness(tmp_path) as harness:
        following = expr("e", {"add": [var("n"), 1]}, "o")
        is_last = expr("f", {"eq": [var("o"), 3]}, "is_last")
        nodes = [
            expr("r", 3, "rounds"),
            loop(following, is_last, carry={"n": [0, var("o")]}, **fields),
        ]
        program = await harness.submit(nodes, outputs=["n"])
        assert await program.value("n") == 3


async def test_loop_without_rounds_returns_initial_values(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", var("n"), "o"), count=0, carry={"n": ["start", var("o")]})
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == "start"


@pytest.mark.parametrize("fields", [{"until": False}, {"count": 5, "until": False}])
async def test_loop_beyond_max_iter_is_exhausted(tmp_path: Path, fields: Json) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", var("n"), "o"), max_iter=2, carry={"n": [0, var("o")]}, **fields)
        status = await (await harness.submit([node], outputs=["n"])).end()
        assert status.error
        assert status.error.code == "loop.exhausted"
        assert status.nodes["e.1"].status == "done"
        assert "e.2" not in status.nodes


@pytest.mark.parametrize("fields", [{"count": 3}, {"items": {"range": [3]}}])
async def test_loop_with_too_many_rounds_fails_before_the_first(
    tmp_path: Path, fields: Json
) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", 1, "o"), max_iter=2, **fields)
        status = await (await harness.submit([node])).end()
        assert status.error
        assert status.error.code == "loop.exhausted"
        assert status.nodes.keys() == {"l"}


@pytest.mark.parametrize(
    "other",
    [
        {"op": "kill", "targets": ["z"], "after": ["z"]},
        {"op": "wait", "variables": ["z"], "required": True},
    ],
)
async def test_loop_that_another_node_may_end_has_its_first_rounds(
    tmp_path: Path, other: Json
) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [expr("z", 1, "z"), {"id": "other", **other}]
        program = await harness.submit([*nodes, loop(expr("e", 1, "o"), max_iter=2, count=3)])
        assert "e.1" in (await program.end()).nodes


async def test_loop_with_many_items_may_end_early(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        fields = {"items": {"range": [5]}, "index": "i", "until": {"eq": [var("i"), 1]}}
        node = loop(expr("e", 1, "o"), max_iter=2, **fields)
        assert (await (await harness.submit([node])).end()).status == "done"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"until": False}, "loop l did not end within 2 rounds, its `max_iter`"),
        ({"count": 1_500}, "loop l has 1,500 rounds, and its `max_iter` is 2"),
        (
            {"items": {"range": [1_500]}},
            "loop l has 1,500 rounds, and its `max_iter` is 2; raise `max_iter`, or in a "
            "program text write a slice such as `items[:1500]`",
        ),
    ],
)
async def test_an_exhausted_loop_names_its_rounds(
    tmp_path: Path, fields: Json, message: str
) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", 1, "o"), max_iter=2, **fields)
        status = await (await harness.submit([node])).end()
        assert status.error
        assert status.error.message.removeprefix("l.1: ") == message


async def test_loop_with_exactly_max_iter_rounds_succeeds(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", var("n"), "o"), count=2, max_iter=2, carry={"n": [0, var("o")]})
        assert (await (await harness.submit([node], outputs=["n"])).end()).status == "done"


async def test_skipped_carry_keeps_the_previous_value(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        body = expr("e", {"add": [var("n"), 1]}, "o", when={"eq": [var("i"), 0]})
        node = loop(body, count=3, index="i", carry={"n": [5, var("o")]})
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == 6


async def test_nested_map_and_loop_have_separate_indices(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        inner = map_(
            {"range": [2]},
            generate("s", insert("r"), insert("x"), writes="o", max_tokens=2),
            collect={"a": "o"},
        )
        node = loop(inner, count=2, carry={"r": ["", {"join": [var("a"), "-"]}]})
        program = await harness.submit([node], outputs=["r"])
        first = "-".join(answer(f"{i}")[:2] for i in range(2))
        second = "-".join(answer(f"{first}{i}")[:2] for i in range(2))
        assert await program.value("r") == second
        assert await program.value("o.1.0") == second[:2]
        assert "s.0.1" in (await program.end()).nodes


async def test_many_rounds_of_expressions_end(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(count=2_000, max_iter=2_000, carry={"n": [0, {"add": [var("n"), 1]}]})
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == 2_000


@pytest.mark.parametrize("carry", [{"var": "b"}, {"add": [{"var": "b"}, {"var": "n"}]}])
async def test_loop_fails_with_a_failed_carried_variable(tmp_path: Path, carry: Json) -> None:
    async with server_harness(tmp_path) as harness:
        bad = {**expr("bad", {"div": [1, 0]}, "b"), "on_error": "isolate"}
        nodes = [bad, loop(count=3, carry={"n": [0, carry]})]
        status = await (await harness.submit(nodes, outputs=["n"])).end()
        assert status.status == "failed"
        assert phases(status) == {"bad": "failed", "l": "failed", "l.0": "failed"}


async def test_exhausted_loop_in_an_isolating_job_has_no_result(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        step = expr("e", {"add": [var("n"), 1]}, "n2")
        endless = loop(step, max_iter=2, carry={"n": [0, var("n2")]}, until=False, job="j")
        after = expr("z", {"first": [var("n"), "none"]}, "y")
        program = await harness.submit(
            [endless, after], outputs=["y"], jobs={"j": {"on_error": "isolate"}}
        )
        status = await program.end()
        assert phases(status)["l"] == "failed"
        assert status.variables["y"].value == "none"
