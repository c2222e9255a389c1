"""Tests of variables without a value after a restart of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ...inprocess import Program, client, expr, generate, insert, server_harness, var


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
        variables = {"lost": {}} if is_input else {}
        nodes = [*source, reader, client("ask", "z")]
        program = await harness.submit(nodes, outputs=["z"], variables=variables)
        await program.event("client.requested", node="ask")
        await program.put_error("lost", "no.source")
        await program.event("node.failed", node="reader")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("z", 1)
        assert (await program.end()).status == "done"
