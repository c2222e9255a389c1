"""A program at work, as far as its parts alone do not show it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from conure.engine import api
from conure.server.engines.engine import Engine
from conure.server.program import objective
from conure.server.program.graph import Graph
from conure.server.runs import calls, clocks
from conure.server.runs.call import Call
from conure.server.runs.run import Run

from ..inprocess import (
    TENANT,
    WAIT_S,
    Desk,
    Program,
    answer,
    client,
    desk_of,
    expr,
    read,
    say,
    var,
)


def run_of(program: Program) -> Run:
    return program.desk.executor._runs[program.id]


def engine_of(desk: Desk) -> Engine:
    engine = desk.executor.engine("engine-0")
    assert engine is not None
    return engine


@pytest.mark.parametrize("method", ["_finished", "_filled", "_run_on"])
async def test_a_mistake_in_one_call_ends_its_program_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    right = getattr(Call, method)

    def wrong(call: Call, *args: Any) -> None:
        if call.node.id == "bad":
            raise ZeroDivisionError
        right(call, *args)

    monkeypatch.setattr(Call, method, wrong)
    async with desk_of(tmp_path) as desk:
        engine = engine_of(desk)
        bad = await desk.submit([say("bad", "B"), say("after", read("bad"))], outputs=["after"])
        good = await desk.submit([say("good", "G")], outputs=["good"])
        ended = await bad.end()
        assert ended.nodes["bad"].error
        assert ended.nodes["bad"].error.code == "server.internal"
        assert await good.value("good") == answer("G")
        assert engine_of(desk) is engine, "nobody else's engine died for it"
        assert await desk.num_held() == [(0, 0)]


@pytest.mark.parametrize("node", [expr("x", {"lit": "one"}), say("x", "X")], ids=["expr", "call"])
async def test_a_value_that_is_not_of_the_declared_type_fails_its_node(
    tmp_path: Path, node: dict[str, Any]
) -> None:
    async with desk_of(tmp_path) as desk:
        declared = {"x": {"type": "int"}}
        program = await desk.submit([node], outputs=["x"], variables=declared)
        error = (await program.end()).nodes["x"].error
        assert error
        assert error.code == "variable.type"
        right = await desk.submit([expr("x", {"lit": 1})], outputs=["x"], variables=declared)
        assert await right.value("x") == 1


async def test_the_receipt_tells_of_every_life_of_the_server(tmp_path: Path) -> None:
    nodes = [
        say("one", "The first of them."),
        client("ask", "found", args={"q": var("one")}),
        say("two", read("found")),
    ]
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(nodes, outputs=["two"])
        asked = await program.event("client.requested")
        before = (await program.status()).nodes["one"]
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        await program.put("found", "gold", asked.data["request_id"])
        ended = await program.end()
        receipt = ended.receipt
        assert receipt
        assert (receipt.calls, receipt.critical_path) == (2, ["one", "ask", "two"])
        assert ended.nodes["one"].prompt_tokens == before.prompt_tokens
        assert ended.nodes["one"].engine == "engine-0"
        assert receipt.prompt_tokens.logical == len("The first of them.") + len("gold")
        assert receipt.output_tokens.decoded > len(answer("The first of them."))


async def test_a_prompt_that_was_given_up_while_it_was_filled_is_booked(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_prompt_token=0.5) as desk:
        program = await desk.submit([say("one", "x" * 20)], outputs=["one"])
        await program.event("node.started")
        ended = await program.cancel()
        assert ended.receipt
        tokens = ended.receipt.prompt_tokens
        assert (tokens.logical, tokens.computed, tokens.discarded) == (0, 0, 20)


async def test_a_context_that_was_not_given_up_shows_in_the_receipt(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([client("ask", "x"), say("one", read("x"))], outputs=["one"])
        await program.event("client.requested")
        engine_of(desk).new_context(lambda report: None, program.id)
        await program.put("x", "now")
        await program.value("one")
        await program.events()
        receipt = (await program.status()).receipt
        assert receipt
        assert receipt.blocks_held == 1


async def test_a_program_that_is_asked_for_does_not_lose_its_lease(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([client("ask", "x")], outputs=["x"], detach=False)
        run = run_of(program)
        timers = run._clocks
        timers._num_unread = clocks.NUM_LOOKS
        run.touch()
        timers._check_lease()
        assert not run.is_over
        timers._num_unread = clocks.NUM_LOOKS
        timers._check_lease()
        assert run.is_over


async def test_a_later_demand_reaches_calls_that_wait_and_calls_that_run(tmp_path: Path) -> None:
    async with desk_of(tmp_path, max_sequences=1, time_per_output_token=0.002) as desk:
        names = [f"c{i}" for i in range(14)]
        program = await desk.submit([], open=True)
        await program.append(
            nodes=[say(name, name, max_tokens=20, ignore_eos=True) for name in names],
            outputs=names,
            objectives=dict.fromkeys(names, "throughput"),
        )
        await program.event("node.started", count=9)  # one runs, eight are on the engine
        sent: list[api.Command] = []
        engine = engine_of(desk)
        send = engine.send

        def record(*commands: api.Command) -> None:
            sent.extend(commands)
            send(*commands)

        setattr(engine, "send", record)  # noqa: B010 - mypy forbids the plain one
        for wanted in ("c13", "c8"):
            await desk.executor.get(
                program.id, wanted, tenant=TENANT, wait_s=0, objective="latency"
            )
        assert [type(command) for command in sent] == [api.Update]
        await program.append(nodes=[], close=True)
        finished = [
            event.data["node"] for event in await program.events() if event.type == "node.finished"
        ]
        assert finished.index("c8") <= 3
        assert finished.index("c13") < finished.index("c9") < finished.index("c12")


async def test_an_append_to_a_large_session_weighs_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[int] = []

    def count(graph: Graph, nodes: Any = None) -> dict[str, objective.Performance]:
        names = list(nodes)
        weighed.append(len(names))
        return objective.get_perf_objective(graph, names)

    monkeypatch.setattr(calls, "get_perf_objective", count)
    async with desk_of(tmp_path) as desk:
        waiting = [say(f"n{i}", read("x")) for i in range(500)]
        program = await desk.submit(waiting, variables={"x": {}}, open=True)
        for i in range(40):
            await program.append(nodes=[say(f"a{i}", "A")], outputs=[f"a{i}"])
            await program.value(f"a{i}")
        assert sum(weighed) < 1_000, "all of them once, and each new one"
        await program.cancel()


async def test_no_prompt_is_begun_early_once_the_server_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What begins to be written is looked at in the next turn of the loop."""
    made: list[str] = []
    gone = asyncio.Event()
    make, writes = calls.Calls._make, calls.Calls.writes

    def listed(self: calls.Calls, node_id: str) -> Call:
        made.append(node_id)
        return make(self, node_id)

    def last(self: calls.Calls, call: Call, slot: int) -> None:
        writes(self, call, slot)
        assert isinstance(self._host, Run)
        self._host.park()
        gone.set()

    monkeypatch.setattr(calls.Calls, "_make", listed)
    monkeypatch.setattr(calls.Calls, "writes", last)
    async with desk_of(tmp_path) as desk:
        nodes = [say("a", "tell"), say("b", "a long prompt " * 20, read("a"))]
        await desk.submit(nodes, outputs=["b"])
        await asyncio.wait_for(gone.wait(), WAIT_S)
        for _ in range(3):
            await asyncio.sleep(0)  # turns of the loop
        assert made == ["a"]
