"""`wait`, races, and kills after them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from conure.engine import protocol
from conure.server.engines.connection import EngineConnection
from conure.server.runtime.node_context import NodeContext

from ...inprocess import answer, client, expr, generate, insert, server_harness, var
from .control_nodes import map_, phases

Json = Any


def race(slow: Json, fast: Json, mode: Json = "any") -> list[Json]:
    return [
        slow,
        fast,
        {"id": "w", "op": "wait", "variables": ["slow", "fast"], "mode": mode},
        {"id": "k", "op": "kill", "targets": ["slow", "fast"], "after": ["w"]},
        expr("pick", {"first": [var("slow"), var("fast")]}, after=["k"]),
    ]


async def test_race_loser_is_aborted_in_the_same_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort is sent in the same turn of the event loop, and so in the next frame."""
    order: list[str] = []
    send, commit = EngineConnection.send, NodeContext.publish

    def decide(context: NodeContext, variable: str, *args: Any, **named: Any) -> Any:
        if variable == "fast":
            asyncio.get_running_loop().call_soon(order.append, "turn")
        return commit(context, variable, *args, **named)

    def record_aborts(engine: EngineConnection, *commands: protocol.Command) -> None:
        order.extend("abort" for command in commands if isinstance(command, protocol.Abort))
        send(engine, *commands)

    monkeypatch.setattr(NodeContext, "publish", decide)
    monkeypatch.setattr(EngineConnection, "send", record_aborts)
    async with server_harness(tmp_path, time_per_output_token=0.005) as harness:
        nodes = race(generate("slow", "S", ignore_eos=True), client("ask", "fast"))
        for _ in range(50):
            program = await harness.submit(nodes, outputs=["pick"])
            await program.event("node.started", node="slow")
            requested = await program.event("client.requested")
            await program.put("fast", "won", requested.data["request_id"])
            assert await program.value("pick") == "won"
            status = await program.end()
            assert phases(status)["slow"] == "killed"
        assert await harness.num_held() == [(0, 0)]
    assert order == ["abort", "turn"] * 50


async def test_quorum_counts_values(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        steps = [client(name, name) for name in "abc"]
        nodes = [
            *steps,
            {"id": "w", "op": "wait", "variables": ["a", "b", "c"], "mode": 2},
            expr("two", {"object": {"done": True}}, after=["w"]),
        ]
        program = await harness.submit(nodes, outputs=["two"])
        requests = {
            name: (await program.event("client.requested", node=name)).data["request_id"]
            for name in "abc"
        }
        await program.put("a", 1, requests["a"])
        assert (await program.get("two", wait_s=0)).status == "waiting"
        await program.put("c", 1, requests["c"])
        assert await program.value("two") == {"done": True}


async def test_impossible_wait_ends(tmp_path: Path) -> None:
    """Two of three values are required and two are skipped; nodes listed `after` it run."""
    async with server_harness(tmp_path) as harness:
        skipped = [expr(name, 1, when=False) for name in "ab"]
        nodes = [
            *skipped,
            client("c", "c"),
            {"id": "w", "op": "wait", "variables": ["a", "b", "c"], "mode": 2},
            expr("after", 1, after=["w"]),
        ]
        program = await harness.submit(nodes, outputs=["after"])
        assert await program.value("after") == 1
        assert phases(await program.status())["w"] == "skipped"
        await program.cancel()


async def test_a_wait_has_its_own_time(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        wait = {"id": "w", "op": "wait", "variables": ["a"], "timeout_s": 0.02}
        nodes = [
            client("a", "a"),
            {**wait, "on_error": "isolate"},
            {"id": "k", "op": "kill", "targets": ["a"], "after": ["w"]},
            expr("end", {"first": [var("a"), "late"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        assert await program.value("end") == "late"
        status = await program.end()
        error = status.nodes["w"].error
        assert error
        assert error.code == "node.timeout"


async def test_kill_follows_expressions_back_to_the_call(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        nodes = [
            generate("llm", "L", ignore_eos=True),
            expr("part", {"slice": [var("llm"), 0, 1]}),
            client("go", "go"),
            {"id": "k", "op": "kill", "targets": ["part"], "when": var("go")},
            expr("end", {"first": [var("part"), "gone"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        requested = await program.event("client.requested")
        await program.put("go", True, requested.data["request_id"])
        assert await program.value("end") == "gone"
        assert phases(await program.end())["llm"] == "killed"


async def test_call_with_other_readers_survives_a_kill(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.001) as harness:
        nodes = [
            generate("llm", "L"),
            expr("part", {"slice": [var("llm"), 0, 1]}),
            {"id": "k", "op": "kill", "targets": ["part"], "when": True},
            expr("end", {"concat": [var("llm"), "!"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        assert await program.value("end") == answer("L") + "!"
        assert phases(await program.end())["part"] == "killed"


async def test_later_output_can_be_killed_alone(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.002) as harness:
        prompt = [
            {"text": "A"},
            {"output": "one", "max_tokens": 30},
            {"text": "B"},
            {"output": "two"},
        ]
        nodes = [
            {"id": "p", "op": "generate", "prompt": prompt},
            {"id": "k", "op": "kill", "targets": ["two"], "when": True},
            expr("end", [var("one"), {"first": [var("two"), "gone"]}]),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        assert await program.value("end") == [answer("A")[:30], "gone"]
        assert phases(await program.end())["p"] == "killed"


async def test_kill_ends_a_job_and_its_bodies(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        nodes = [
            map_(
                [1, 2],
                generate("s", insert("x"), writes="o", ignore_eos=True),
                collect={"a": "o"},
                job="side",
            ),
            client("go", "go"),
            {"id": "k", "op": "kill", "targets": ["side"], "when": var("go")},
            expr("end", {"first": [var("a"), "gone"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        await program.event("node.started", node="s.1")
        requested = await program.event("client.requested")
        await program.put("go", True, requested.data["request_id"])
        assert await program.value("end") == "gone"
        status = phases(await program.end())
        assert [status[name] for name in ("m", "s.0", "s.1")] == ["killed"] * 3
        assert await harness.num_held() == [(0, 0)]


def attempt(error: str, *, inner: str = "") -> str:
    """Return a `try` around a wait that fails, or around another such `try`."""
    body = inner or "wait(slow, timeout=0.05)\nyield 'in time'\n"
    return f"try:\n{indent(body, '    ')}except {error}:\n    yield 'too late'\nyield 'after'\n"


@pytest.mark.parametrize(
    ("job", "yielded"),
    [
        pytest.param(attempt("Timeout"), ["too late", "after"], id="handled"),
        pytest.param(attempt("ValueError"), [], id="not handled"),
        pytest.param(
            attempt("Timeout", inner=attempt("ValueError")), ["too late", "after"], id="outside"
        ),
        pytest.param(
            attempt("ValueError", inner=attempt("Timeout")),
            ["too late", "after", "after"],
            id="inside",
        ),
        pytest.param(
            f"for i in range(2):\n{indent(attempt('Timeout'), '    ')}yield 'end'",
            ["too late", "after", "too late", "after", "end"],
            id="in each round",
        ),
        pytest.param(
            attempt("Timeout", inner="if 1 == 1:\n    wait(slow, timeout=0.05)\n    yield 'if'\n"),
            ["too late", "after"],
            id="in an if",
        ),
        pytest.param(
            attempt("ValueError", inner="for i in [1]:\n    wait(slow, timeout=0.05)\n"),
            [],
            id="in a loop, not handled",
        ),
    ],
)
async def test_a_failed_wait_ends_its_job_unless_a_handler_takes_the_failure(
    job: str, yielded: list[str], tmp_path: Path
) -> None:
    source = f"slow = client('slow')\nwith job(on_error='isolate'):\n{indent(job, '    ')}"
    num_waits = yielded.count("too late") or 1
    async with server_harness(tmp_path) as harness:
        program = await harness.submit_source(source)
        await program.event("node.failed", count=num_waits)
        await program.put("slow", "late")
        assert (await program.end()).status == "done"
        events = await program.events()
    assert [each.data["value"] for each in events if each.type == "yield"] == yielded
