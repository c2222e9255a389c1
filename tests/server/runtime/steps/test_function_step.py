"""Functions that `call` nodes run: timeouts, errors with codes, and argument checks."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conure.server.functions.registry import function
from conure.server.program.errors import ProgramError, RunError

from ...inprocess import server_harness, var

GO_ON = threading.Event()


@function(timeout_s=0.05)
def hang() -> int:
    GO_ON.wait()
    return 1


@function(timeout_s=0.05)
async def hang_async() -> int:
    await asyncio.Event().wait()
    return 1


def refuse() -> None:
    raise RunError("shop.closed", "come back tomorrow")


def typed(count: int = 3) -> int:
    return count


def lose_upstream() -> None:
    raise TimeoutError("the shop did not answer")


async def lose_upstream_async() -> None:
    lose_upstream()


FUNCTIONS = {"hang": hang, "hang_async": hang_async, "refuse": refuse, "typed": typed}


def call(name: str, **args: Any) -> dict[str, Any]:
    return {"id": "c", "op": "call", "function": name, "args": args, "output": "x"}


@pytest.mark.parametrize(
    ("node", "code"),
    [
        (call("hang"), "call.timeout"),
        (call("hang_async"), "call.timeout"),
        (call("refuse"), "shop.closed"),
        (call("typed", count={"concat": ["3"]}), "call.argument"),
        (call("calc", expression="9**9**9"), "calc.invalid"),
        (call("json.parse", text="{"), "expr.json"),
    ],
)
async def test_a_function_that_fails_gives_its_node_a_code(
    tmp_path: Path, node: dict[str, Any], code: str
) -> None:
    async with server_harness(tmp_path, functions=FUNCTIONS) as harness:
        program = await harness.submit([node], outputs=["x"])
        status = await program.end()
    GO_ON.set()
    assert status.error
    assert status.error.code == code


@pytest.mark.parametrize("run", [lose_upstream, lose_upstream_async])
async def test_a_timeout_that_a_function_raises_is_a_failure_with_a_log_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Callable[[], Any]
) -> None:
    async with server_harness(tmp_path, {"run": run}) as harness:
        program = await harness.submit([call("run")])
        failed = await program.get("x")
    assert failed.error
    assert failed.error.code == "call.failed"
    assert "the shop did not answer" in caplog.text


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (object(), "object"),
        ({"sum": [1j]}, "complex"),
        ({(1, 2): 3}, "dict"),
        ([deque()], "collections.deque"),
    ],
)
async def test_a_result_that_is_not_json_is_named(tmp_path: Path, result: Any, kind: str) -> None:
    async with server_harness(tmp_path, {"run": lambda: result}) as harness:
        program = await harness.submit([call("run")])
        failed = await program.get("x")
    assert failed.error
    assert failed.error.code == "call.failed"
    message = "function run of node c returned a value that is not JSON: "
    assert failed.error.message == message + kind


async def test_a_timeout_of_a_call_is_retried_like_that_of_its_function(tmp_path: Path) -> None:
    attempts: list[int] = []

    async def slow_at_first() -> int:
        attempts.append(1)
        if len(attempts) < 3:
            await asyncio.Event().wait()
        return 7

    async with server_harness(tmp_path, {"slow": slow_at_first}) as harness:
        program = await harness.submit([{**call("slow"), "timeout_s": 0.05, "retries": 2}])
        assert await program.value("x") == 7
        attempts.clear()
        failing = await harness.submit([{**call("slow"), "timeout_s": 0.05}])
        failed = await failing.get("x")
        assert failed.error
        assert failed.error.code == "call.timeout"


async def test_defaults_of_parameters_are_passed(tmp_path: Path) -> None:
    async with server_harness(tmp_path, functions=FUNCTIONS) as harness:
        program = await harness.submit([call("typed")], outputs=["x"])
        assert await program.value("x") == 3


async def test_built_in_functions_read_variables(tmp_path: Path) -> None:
    nodes = [{**call("list.sort", items=var("xs")), "output": "sorted"}]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, inputs={"xs": [3, 1]}, outputs=["sorted"])
        assert await program.value("sorted") == [1, 3]


@pytest.mark.parametrize(
    ("node", "code", "path"),
    [
        (call("tpyed"), "call.unknown_function", "program.nodes[0].function"),
        (call("typed", cuont=1), "call.argument", "program.nodes[0].args.cuont"),
        (call("calc"), "call.argument", "program.nodes[0].args"),
    ],
)
async def test_a_call_that_cannot_work_is_refused_at_submission(
    tmp_path: Path, node: dict[str, Any], code: str, path: str
) -> None:
    async with server_harness(tmp_path, functions=FUNCTIONS) as harness:
        with pytest.raises(ProgramError) as caught:
            await harness.submit([node], outputs=["x"])
    assert (caught.value.code, caught.value.path) == (code, path)
