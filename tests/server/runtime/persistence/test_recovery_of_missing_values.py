"""Tests of variables without a value after a restart of the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from conure.server.store.records import EndRecord

from ...inprocess import (
    DelayedJournalWriter,
    Program,
    client,
    expr,
    generate,
    insert,
    server_harness,
    var,
)
from ..control_flow.control_nodes import if_


@pytest.mark.parametrize(
    "reader",
    [
        expr("reader", var("lost")),
        generate("reader", insert("lost")),
        {"id": "reader", "op": "wait", "variables": ["lost"]},
        {"id": "reader", "op": "yield", "value": var("lost")},
        {"id": "reader", "op": "if", "cond": var("lost"), "then": [], "else": [], "merge": {}},
    ],
    ids=["expr", "generate", "wait", "yield", "if"],
)
@pytest.mark.parametrize("is_input", [True, False], ids=["input", "step"])
async def test_program_goes_on_after_a_failure_that_a_node_read(
    tmp_path: Path, reader: Any, is_input: bool
) -> None:
    source = [] if is_input else [client("source", "lost", on_error="isolate")]
    async with server_harness(tmp_path) as harness:
        variables: dict[str, Any] = {"lost": {}} if is_input else {}
        nodes = [*source, reader, client("ask", "z")]
        program = await harness.submit(nodes, outputs=["z"], variables=variables)
        await program.event("client.requested", node="ask")
        await program.put_error("lost", "no.source")
        await program.event("node.failed", node="reader")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("z", 1)
        assert (await program.end()).status == "done"


ABSENT = expr("absent", 1, "x", when=False)


def bodies(kind: str) -> list[Any]:
    """Return nodes of a kind whose output `y` has no value."""
    if kind == "if":
        return [if_(True, [ABSENT], [], y=["x", "d"])]
    if kind == "nested":
        inner = {**if_(True, [ABSENT], [], i=["x", "d"]), "id": "inner"}
        return [if_(True, [inner], [], y=["i", "d"])]
    if kind == "try":
        return [{"id": "c", "op": "try", "body": [ABSENT], "merge": {"y": ["x"]}}]
    failing = expr("failing", {"parse_json": "{"}, on_error="isolate")
    inner = if_(False, [], [expr("failed", var("failing"), "x")], i=["d", "x"])
    return [failing, {**inner, "id": "inner"}, if_(True, [], [], y=["i", "d"])]


async def test_program_that_was_failing_fails_after_a_restart(tmp_path: Path) -> None:
    either = {"first": [var("lost"), 1]}
    nodes = [
        client("source", "lost", on_error="isolate"),
        client("step", "made", args={"given": either}),
        *(expr(f"e{number}", var("never")) for number in range(1_000)),
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, variables={"never": {}})
        await program.event("client.requested", node="source")
        await program.put_error("lost", "tool.down")
        await program.event("client.requested", node="step")
        disk = DelayedJournalWriter(harness)
        putting = asyncio.create_task(program.put_error("made", "tool.down"))
        await disk.came.wait()
        assert not any(isinstance(record, EndRecord) for record in disk.batches[0].records)
        disk.release_first()
        await program.event("node.killed")
        await harness.executor.stop()
        await asyncio.gather(putting, return_exceptions=True)
    async with server_harness(tmp_path) as harness:
        status = await Program(harness, program.id).end()
        assert status.status == "failed"
        assert status.nodes["e999"].status == "killed"


@pytest.mark.parametrize("kind", ["if", "nested", "try", "failure"])
async def test_output_that_no_body_gave_is_missing_after_a_restart(
    tmp_path: Path, kind: str
) -> None:
    reader = expr("reader", {"first": [var("y"), var("w")]}, "z")
    nodes = [*bodies(kind), reader, client("ask", "w", after=["c"])]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, inputs={"d": 0}, outputs=["z", "y"])
        await program.event("client.requested")
        before = await program.get("y", wait_s=0)
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        assert await program.get("y", wait_s=0) == before
        await program.put("w", 5)
        assert await program.value("z") == 5
        ended = await program.end()
        assert ended.status == ("failed" if kind == "failure" else "done")
        assert ended.variables["y"] == before


async def test_body_whose_outputs_are_known_goes_on_after_a_restart(tmp_path: Path) -> None:
    body = [
        expr("given", 1, "x"),
        expr("lost", {"parse_json": "{"}, "k", on_error="isolate"),
        client("ask", "w"),
    ]
    nodes = [if_(True, body, [], y=["x", "d"], q=["k", "d"]), expr("reader", var("q"))]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, inputs={"d": 0}, outputs=["y"])
        await program.event("node.failed", node="reader")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("w", 5)
        ended = await program.end()
        assert (ended.status, ended.nodes["c"].status) == ("done", "done")
