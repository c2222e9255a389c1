"""Tests of client writes to a running program."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server.program.errors import ConflictError, ProgramError
from conure.server.program.status import Problem, PutValue

from ...inprocess import Program, answer, client, expr, generate, insert, server_harness, var


async def refused(program: Program, variable: str, value: Any, request: str | None = None) -> str:
    with pytest.raises(ConflictError) as caught:
        await program.put(variable, value, request)
    return caught.value.code


async def test_repeated_put_is_idempotent(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [client("a", "x"), expr("e", var("x")), client("b", "later")]
        program = await harness.submit(nodes, outputs=["later"])
        requested = await program.event("client.requested", node="a")
        request = requested.data["request_id"]
        value = {"k": [1, True], "l": None}
        for sent in (value, value, {"l": None, "k": [1, True]}):
            status = await program.put("x", sent, request)
            assert (status.status, status.value) == ("done", value)
        for other in ({"k": [True, True], "l": None}, {"k": [1, 1], "l": None}, None, "x"):
            assert await refused(program, "x", other, request) == "variable.committed"
        assert await program.value("x") == value
        await program.put("later", 0)
        await program.end()
        # Also when the program is only in the journal.
        harness.executor.programs._recent.clear()
        assert (await program.put("x", value)).value == value
        assert await refused(program, "x", 2) == "program.ended"


async def test_answer_must_match_an_open_request(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [client("a", "x"), client("b", "y", args={"x": var("x")}), generate("c", insert("y"))],
            outputs=["c"],
            variables={"typed": {"type": "int"}},
        )
        await program.event("client.requested")
        assert await refused(program, "x", 1, "r_of_somebody_else") == "client.stale_request"
        assert await refused(program, "y", 1) == "client.not_requested"
        assert await refused(program, "c", 1) == "variable.not_writable"
        for body in ({}, {"value": 1, "error": {"code": "x"}}, {"from": "y"}):
            with pytest.raises(ProgramError):
                await harness.executor.put(
                    program.id, "x", msgspec.convert(body, PutValue), tenant=harness.tenant
                )
        with pytest.raises(ProgramError, match="int"):
            await program.put("typed", "seven")
        await program.put("typed", 7)
        await program.put("x", 1)
        await program.event("client.requested", node="b")
        await program.put("y", "go")
        assert await program.value("c") == answer("go")
        await program.end()


async def test_a_value_against_the_declaration_is_refused(tmp_path: Path) -> None:
    declared = {"x": {"type": "int", "schema": {"minimum": 3}}}
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("e", var("x"))], outputs=["e"], variables=declared)
        for value, code in (("seven", "variable.type"), (2, "variable.schema")):
            with pytest.raises(ProgramError) as caught:
                await program.put("x", value)
            assert caught.value.code == code
        await program.put("x", 3)
        await program.end()


async def test_client_error_fails_the_step_unchanged(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [client("a", "x", on_error="isolate"), generate("b", insert("x")), client("c", "y")]
        program = await harness.submit(nodes, outputs=["b", "y"])
        await program.event("client.requested", node="a")
        await program.put_error("x", "search.down")
        await program.put_error("x", "search.down")
        for variable in ("x", "b"):
            status = await program.get(variable)
            assert status.error == Problem(code="search.down", message="no")
            assert status.status == "failed"
        assert await refused(program, "x", 1) == "variable.committed"
        await program.put("y", 1)
        assert (await program.end()).status == "failed"
        await program.put_error("x", "search.down")
        assert await refused(program, "y", 2) == "program.ended"


async def test_client_step_with_retries_is_requested_again(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [client("a", "x", retries=2), generate("b", insert("x"))]
        program = await harness.submit(nodes, outputs=["b"])
        requests = []
        for count in (1, 2, 3):
            requested = await program.event("client.requested", count=count)
            assert requested.data["attempt"] == count
            requests.append(requested.data["request_id"])
            if count < 3:
                await program.put_error("x", "flaky", requested.data["request_id"])
        assert len(set(requests)) == 3
        assert await refused(program, "x", 1, requests[0]) == "client.stale_request"
        await program.put("x", "fine", requests[2])
        assert await program.value("b") == answer("fine")
        status = await program.end()
        assert status.nodes["a"].attempt == 3
        program = await harness.submit([client("a", "x", retries=1)], outputs=["x"])
        for count in (1, 2):
            await program.event("client.requested", count=count)
            await program.put_error("x", "flaky")
        assert (await program.end()).error == Problem(code="flaky", message="no")


async def test_unanswered_client_step_is_retried_then_fails(
    tmp_path: Path,
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x", retries=1, timeout_s=0.05)], outputs=["x"])
        status = await program.end()
        assert status.error
        assert status.error.code == "client.timeout"
        types = [event.type for event in await program.events()]
        assert types.count("client.requested") == 2


async def test_input_can_arrive_later_or_fail(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [generate("a", insert("one"), on_error="isolate"), generate("b", insert("two"))],
            variables={"one": {}, "two": {}},
            outputs=["b", "a"],
        )
        assert (await program.get("one", wait_s=0)).status == "waiting"
        await program.put_error("one", "no.input")
        failed = await program.get("a")
        assert failed.error == Problem(code="no.input", message="no")
        reported = await program.event("variable.failed")
        assert (reported.data["variable"], reported.data["code"]) == ("one", "no.input")
        await program.put("two", "here")
        assert await program.value("b") == answer("here")
        await program.end()


async def test_one_of_many_concurrent_answers_wins(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x"), client("b", "y")], outputs=["y"])
        await program.event("client.requested", node="a")
        results = await asyncio.gather(
            *(program.put("x", i) for i in range(20)), return_exceptions=True
        )
        winners = [r for r in results if not isinstance(r, BaseException)]
        assert len(winners) == 1
        assert winners[0].value == await program.value("x")
        assert {r.code for r in results if isinstance(r, ConflictError)} == {"variable.committed"}
        await program.cancel()
