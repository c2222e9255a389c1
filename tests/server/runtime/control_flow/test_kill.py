"""What a kill ends: its targets, what only served them, and what cannot run without them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ...inprocess import Program, ServerHarness, client, expr, generate, insert, server_harness, var
from .control_nodes import if_, loop, map_, phases

Json = Any

LONG: Json = {"max_tokens": 100_000, "ignore_eos": True}


@pytest_asyncio.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ServerHarness]:
    async with server_harness(
        tmp_path, time_per_output_token=0.01, context_len=200_000, num_blocks=20_000
    ) as harness:
        yield harness


def kill(*targets: str) -> Json:
    return {"id": "k", "op": "kill", "targets": list(targets), "when": var("go")}


async def phases_after_go(harness: ServerHarness, nodes: list[Json], **fields: Json) -> Json:
    """Run nodes and let the kill run once the program runs. Return the phases at the end."""
    program = await harness.submit([client("go", "go"), *nodes], **fields)
    requested = await program.event("client.requested")
    await program.put("go", True, requested.data["request_id"])
    async with asyncio.timeout(60):
        status = await program.end()
    assert status.status == "done", status.error
    assert await harness.num_held() == [(0, 0)]
    return {name: node.status for name, node in status.nodes.items()}


async def test_calls_that_only_a_killed_call_needs_are_killed(harness: ServerHarness) -> None:
    nodes: list[Json] = [
        generate("plan", "P", **LONG),
        expr("part", {"slice": [var("plan"), 0, 9]}),
        generate("essay", insert("part"), **LONG),
        kill("essay"),
    ]
    phases = await phases_after_go(harness, nodes)
    assert [phases[name] for name in ("plan", "part", "essay")] == ["killed"] * 3


async def test_a_call_goes_on_whose_value_is_an_output_or_has_another_reader(
    harness: ServerHarness,
) -> None:
    nodes: list[Json] = [
        generate("output", "O", max_tokens=9),
        generate("read", "R", max_tokens=9),
        generate("reader", insert("read"), max_tokens=9),
        generate("essay", insert("output"), insert("read"), **LONG),
        kill("essay"),
    ]
    phases = await phases_after_go(harness, nodes, outputs=["output", "reader"])
    assert phases["essay"] == "killed"
    assert [phases[name] for name in ("output", "read", "reader")] == ["done"] * 3


async def test_readers_of_a_killed_value_end_at_once_and_with_them_what_only_they_read(
    harness: ServerHarness,
) -> None:
    nodes: list[Json] = [
        generate("a", "A", **LONG),
        generate("b", "B", **LONG),
        generate("both", insert("a"), insert("b"), **LONG),
        {"id": "told", "op": "yield", "value": var("both")},
        kill("a"),
    ]
    phases = await phases_after_go(harness, nodes)
    assert (phases["a"], phases["b"]) == ("killed", "killed")
    assert (phases["both"], phases["told"]) == ("skipped", "skipped")


async def test_a_value_read_with_first_is_needed(harness: ServerHarness) -> None:
    nodes: list[Json] = [
        generate("a", "A", **LONG),
        generate("b", "B", max_tokens=9),
        expr("end", {"first": [var("a"), var("b")]}),
        kill("a"),
    ]
    phases = await phases_after_go(harness, nodes, outputs=["end"])
    assert (phases["b"], phases["end"]) == ("done", "done")


async def test_a_call_is_killed_after_its_last_output_that_has_a_reader(
    harness: ServerHarness,
) -> None:
    prompt: list[Json] = [{"text": "A"}, {"output": "one", "max_tokens": 9}, {"text": "B"}]
    nodes: list[Json] = [
        {"id": "p", "op": "generate", "prompt": [*prompt, {"output": "two", **LONG}]},
        generate("reader", insert("two"), **LONG),
        generate("end", insert("one"), max_tokens=9),
        kill("reader"),
    ]
    phases = await phases_after_go(harness, nodes, outputs=["end"])
    assert (phases["p"], phases["end"]) == ("killed", "done")


def outputs(node: str, *names: str, first: Json = LONG) -> Json:
    """Return a call that waits for `found` and generates several outputs."""
    writes = [{"output": name, "max_tokens": 9} for name in names]
    return {
        "id": node,
        "op": "generate",
        "prompt": [{"input": "found"}, writes[0] | first, *writes[1:]],
    }


async def test_a_killed_output_is_not_generated_for_a_later_one_that_is_needed(
    harness: ServerHarness,
) -> None:
    nodes: list[Json] = [
        outputs("p", "one", "two", "three"),
        generate("reader", insert("one"), **LONG),
        generate("other", insert("three"), **LONG),
        kill("reader", "two"),
    ]
    phases = await phases_after_go(harness, nodes, inputs={"found": "A"})
    assert [phases[name] for name in ("p", "reader", "other")] == ["killed", "killed", "skipped"]


async def test_a_second_kill_does_not_extend_a_call(harness: ServerHarness) -> None:
    nodes: list[Json] = [
        client("find", "found"),
        outputs("p", "one", "two", "three", first={}),
        generate("reader", insert("two"), max_tokens=9),
        kill("two"),
        kill("three") | {"id": "k2", "after": ["k"]},
        client("answer", "x", after=["k2"]),
    ]
    program = await harness.submit([client("go", "go"), *nodes], outputs=["one"])
    for node, variable in (("go", "go"), ("answer", "x"), ("find", "found")):
        requested = await program.event("client.requested", node=node)
        await program.put(variable, "yes", requested.data["request_id"])
    status = await program.end()
    assert status.nodes["p"].status == "killed"
    assert [status.variables[name].status for name in ("one", "two")] == ["done", "killed"]
    assert status.nodes["reader"].status == "skipped"


async def test_a_map_with_a_yield_in_its_body_goes_on(harness: ServerHarness) -> None:
    told = {"id": "told", "op": "yield", "value": var("s")}
    body: list[Json] = [generate("s", insert("x"), max_tokens=9)]
    map_ = {"op": "map", "items": ["1", "2"], "as": "x", "collect": {"xs": "s"}}
    nodes: list[Json] = [
        {**map_, "id": "loud", "body": [*body, told]},
        {**map_, "id": "quiet", "body": [generate("q", insert("x"), **LONG)]}
        | {"collect": {"qs": "q"}},
        generate("essay", insert("xs"), insert("qs"), **LONG),
        kill("essay"),
    ]
    phases = await phases_after_go(harness, nodes)
    assert (phases["loud"], phases["quiet"], phases["q.0"]) == ("done", "killed", "killed")
    assert phases["told.1"] == "done"


@pytest.mark.parametrize("required", [False, True])
async def test_nodes_after_a_required_wait_for_a_killed_value_are_skipped(
    harness: ServerHarness, required: bool
) -> None:
    inner = {"id": "w", "op": "wait", "variables": ["a"], "required": required, "job": "side"}
    options: Json = LONG if required else {"max_tokens": 9}
    nodes: list[Json] = [
        generate("a", "A", **LONG),
        generate("b", "B", **options),
        {"id": "c", "op": "if", "cond": True, "then": [inner], "else": [], "job": "side"},
        expr("after", {"concat": [var("b"), "!"]}, after=["c"], job="side"),
        expr("later", 1, after=["after"], job="side"),
        expr("elsewhere", 1, after=["after"]),
        kill("a"),
    ]
    phases = await phases_after_go(harness, nodes, jobs={"side": {}})
    expected = "skipped" if required else "done"
    assert phases["w"] == "skipped"
    assert phases["c"] == "done"
    assert (phases["after"], phases["later"]) == (expected, expected)
    assert phases["elsewhere"] == "done"
    assert (phases["b"] == "killed") == required


@pytest.mark.parametrize("max_iter", [2, 3])
async def test_a_loop_ends_after_the_round_whose_wait_is_not_met(
    harness: ServerHarness, max_iter: int
) -> None:
    wait = {"id": "w", "op": "wait", "variables": ["a"], "required": True}
    loop = {"id": "l", "op": "loop", "count": 3, "index": "i", "carry": {"n": [0, var("m")]}}
    nodes: list[Json] = [
        generate("a", "A", **LONG),
        {
            **loop,
            "max_iter": max_iter,
            "body": [wait, expr("m", {"add": [var("n"), 1]}, after=["w"])],
        },
        expr("after", 1, after=["l"]),
        kill("a"),
    ]
    phases = await phases_after_go(harness, nodes, outputs=["n"])
    assert "w.1" not in phases
    assert (phases["l"], phases["after"]) == ("done", "skipped")


async def test_a_restart_repeats_the_consequences_of_a_kill(tmp_path: Path) -> None:
    """The journal ends with the kill's first target; what served it ends after the restart."""
    settings: dict[str, Any] = {"time_per_output_token": 0.01, "context_len": 200_000}
    nodes: list[Json] = [
        client("go", "go"),
        generate("plan", "P", **LONG),
        generate("essay", insert("plan"), **LONG),
        kill("essay"),
    ]
    async with server_harness(tmp_path, num_blocks=20_000, **settings) as harness:
        program = await harness.submit(nodes)
        run = harness.executor.programs.find(program.id, harness.tenant)
        assert run is not None
        requested = await program.event("client.requested")
        # Drop the pending ends, as a crash after the first target does.
        run.context.to_end = deque(maxlen=0)
        await program.put("go", True, requested.data["request_id"])
        await program.event("node.killed", node="essay")
        assert run.state.nodes["plan"].phase == "running"
    async with server_harness(tmp_path, num_blocks=20_000, **settings) as harness:
        program = Program(harness, program.id)
        async with asyncio.timeout(60):
            status = await program.end()
        assert status.nodes["plan"].status == "killed"


async def test_a_call_ends_before_a_killed_output_after_a_restart(tmp_path: Path) -> None:
    nodes: list[Json] = [
        client("go", "go"),
        client("find", "found"),
        outputs("p", "one", "two", first={}),
        generate("reader", insert("one"), **LONG),
        kill("reader", "two"),
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, open=True)
        find = await program.event("client.requested", node="find")
        go = await program.event("client.requested", node="go")
        await program.put("go", True, go.data["request_id"])
        await program.event("node.finished", node="k")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("found", "A", find.data["request_id"])
        await program.event("node.killed", "node.finished", node="p")
        await program.append(close=True)
        status = await program.end()
    assert status.nodes["p"].status == "killed"
    assert [status.variables[name].status for name in ("one", "two")] == ["done", "killed"]


async def test_a_call_that_was_appended_after_a_kill_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    repeated = {
        "id": "m",
        "op": "map",
        "items": ["1"],
        "as": "x",
        "body": [kill("one") | {"when": True}],
    }
    async with server_harness(tmp_path) as harness:
        variables: Json = {"one": {}, "found": {}}
        program = await harness.submit([repeated], open=True, variables=variables)
        await program.event("node.finished", node="m")
        await program.append(nodes=[outputs("p", "one", "two", first={})])
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("found", "A")
        await program.append(close=True)
        status = await program.end()
    assert [status.variables[name].status for name in ("one", "two")] == ["done", "done"]


async def test_body_can_kill_the_node_around_it(tmp_path: Path) -> None:
    """A kill in the body of a map kills the map, also inside an `if`."""
    async with server_harness(tmp_path) as harness:
        kill = {"id": "k", "op": "kill", "targets": ["ys"], "after": ["e"]}
        inner = map_([1, 2], expr("e", var("x"), "y"), kill, collect={"ys": "y"})
        alone = await harness.submit([inner], outputs=["ys"])
        assert phases(await alone.end())["m"] == "killed"
        branch = if_(1, [inner], [expr("o", 1, "one")], z=["ys", "one"])
        nested = await harness.submit([branch], outputs=["z"])
        assert phases(await nested.end())["m"] == "killed"


async def test_a_kill_of_a_job_is_none_of_a_variable_in_a_body(harness: ServerHarness) -> None:
    nodes: list[Json] = [
        generate("a", "A", **LONG, job="side"),
        if_(True, [expr("e", 1, "side")], []),
        kill("side"),
    ]
    phases = await phases_after_go(harness, nodes, jobs={"side": {}})
    assert (phases["a"], phases["e"]) == ("killed", "done")


async def test_a_loop_whose_body_kills_its_job_goes_on_to_the_next_round(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        kill = {"id": "k", "op": "kill", "targets": ["j"], "job": "j", "after": ["a"]}
        body = [expr("a", 1, "x", job="j"), client("b", "y", job="j"), kill]
        carry = {"n": [0, {"add": [var("n"), 1]}]}
        program = await harness.submit([loop(*body, count=2, carry=carry, job="j")], outputs=["n"])
        async with asyncio.timeout(60):
            status = await program.end()
        assert status.variables["n"].value == 2
        assert phases(status)["b.1"] == "killed"
