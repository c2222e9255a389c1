"""Tests of ProgramRun that its parts alone do not cover."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from conure.engine import protocol
from conure.server.engines.connection import EngineConnection
from conure.server.program.errors import ConflictError, NotFoundError, ProgramError
from conure.server.program.graph import objectives
from conure.server.program.graph.graph import Graph
from conure.server.program.graph.slot_graph import SlotGraph
from conure.server.program.ir import Deadline
from conure.server.program.status import Problem
from conure.server.runtime import timers
from conure.server.runtime.calls import call_priorities, priority_table
from conure.server.runtime.calls.llm_call import LLMCall
from conure.server.runtime.node_context import NodeContext
from conure.server.runtime.program_run import ProgramRun

from ..inprocess import (
    TENANT,
    WAIT_S,
    Program,
    ServerHarness,
    answer,
    client,
    expr,
    generate,
    insert,
    server_harness,
    var,
)


def run_of(program: Program) -> ProgramRun:
    return program.harness.executor.programs._live[program.id]


def engine_of(harness: ServerHarness) -> EngineConnection:
    engine = harness.executor.services.engine("engine-0")
    assert isinstance(engine, EngineConnection)
    return engine


async def test_an_error_outside_of_a_nodes_work_fails_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NodeContext.end_node

    def wrong(context: NodeContext, node_id: str, phase: Any, *args: Any) -> Any:
        if node_id == "bad" and phase in ("skipped", "failed"):
            raise ZeroDivisionError
        return right(context, node_id, phase, *args)

    monkeypatch.setattr(NodeContext, "end_node", wrong)
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("go", "go"), expr("bad", 1, "x", when=var("go"))])
        requested = await program.event("client.requested")
        await program.put("go", False, requested.data["request_id"])
        async with asyncio.timeout(WAIT_S):
            status = await program.end()
        assert status.status == "failed"
        assert isinstance(status.error, Problem)
        assert status.error.code == "server.internal"


@pytest.mark.parametrize("method", ["_finished", "_filled", "_run_on"])
async def test_internal_error_ends_only_its_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    right = getattr(LLMCall, method)

    def wrong(call: LLMCall, *args: Any) -> None:
        if call.node.id == "bad":
            raise ZeroDivisionError
        right(call, *args)

    monkeypatch.setattr(LLMCall, method, wrong)
    async with server_harness(tmp_path) as harness:
        engine = engine_of(harness)
        bad = await harness.submit(
            [generate("bad", "B"), generate("after", insert("bad"))], outputs=["after"]
        )
        good = await harness.submit([generate("good", "G")], outputs=["good"])
        ended = await bad.end()
        assert ended.nodes["bad"].error
        assert ended.nodes["bad"].error.code == "server.internal"
        assert await good.value("good") == answer("G")
        assert engine_of(harness) is engine, "nobody else's engine died for it"
        assert await harness.num_held() == [(0, 0)]


@pytest.mark.parametrize(
    "node", [expr("x", {"lit": "one"}), generate("x", "X")], ids=["expr", "call"]
)
async def test_wrong_value_type_fails_the_node(tmp_path: Path, node: dict[str, Any]) -> None:
    async with server_harness(tmp_path) as harness:
        declared = {"x": {"type": "int"}}
        program = await harness.submit([node], outputs=["x"], variables=declared)
        error = (await program.end()).nodes["x"].error
        assert error
        assert error.code == "variable.type"
        right = await harness.submit([expr("x", {"lit": 1})], outputs=["x"], variables=declared)
        assert await right.value("x") == 1


async def test_receipt_covers_all_server_processes(tmp_path: Path) -> None:
    nodes = [
        generate("one", "The first of them."),
        client("ask", "found", args={"q": var("one")}),
        generate("two", insert("found")),
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["two"])
        requested = await program.event("client.requested")
        before = (await program.status()).nodes["one"]
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("found", "gold", requested.data["request_id"])
        ended = await program.end()
        receipt = ended.receipt
        assert receipt
        assert (receipt.calls, receipt.critical_path) == (2, ["one", "ask", "two"])
        assert ended.nodes["one"].prompt_tokens == before.prompt_tokens
        assert ended.nodes["one"].engine == "engine-0"
        assert receipt.prompt_tokens.logical == len("The first of them.") + len("gold")
        assert receipt.output_tokens.decoded > len(answer("The first of them."))


async def test_aborted_fill_is_counted_as_discarded(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_prompt_token=0.5) as harness:
        program = await harness.submit([generate("one", "x" * 20)], outputs=["one"])
        await program.event("node.started")
        ended = await program.cancel()
        assert ended.receipt
        tokens = ended.receipt.prompt_tokens
        assert (tokens.logical, tokens.computed, tokens.discarded) == (0, 0, 20)


async def test_receipt_shows_leaked_contexts(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [client("ask", "x"), generate("one", insert("x"))], outputs=["one"]
        )
        await program.event("client.requested")
        engine_of(harness).new_context(lambda report: None, program.id)
        await program.put("x", "now")
        await program.value("one")
        await program.events()
        receipt = (await program.status()).receipt
        assert receipt
        assert receipt.blocks_held == 1


async def test_requests_renew_the_lease(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("ask", "x")], outputs=["x"], detach=False)
        run = run_of(program)
        timers_of_run = run.context.timers
        lease = next(each for each in timers_of_run._leases if each.key == timers.LEASE)
        lease.num_unused_checks = timers.LEASE_CHECKS
        run.renew_lease()
        timers_of_run._check_lease(lease)
        assert not run.is_over
        lease.num_unused_checks = timers.LEASE_CHECKS
        timers_of_run._check_lease(lease)
        assert run.is_over


async def test_later_objective_reranks_queued_and_running_calls(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_sequences=1, time_per_output_token=0.01) as harness:
        names = [f"c{i}" for i in range(14)]
        program = await harness.submit([], open=True)
        await program.append(
            nodes=[generate(name, name, max_tokens=20, ignore_eos=True) for name in names],
            outputs=names,
            objectives=dict.fromkeys(names, "throughput"),
        )
        await program.event("node.started", count=9)  # one runs, eight are on the engine
        sent: list[protocol.Command] = []
        engine = engine_of(harness)
        send = engine.send

        def record(*commands: protocol.Command) -> None:
            sent.extend(commands)
            send(*commands)

        setattr(engine, "send", record)  # noqa: B010 - mypy forbids the plain one
        for variable in ("c13", "c8"):
            await harness.executor.get(
                program.id, variable, tenant=TENANT, wait_s=0, objective="latency"
            )
        assert [type(command) for command in sent] == [protocol.Update]
        await program.append(nodes=[], close=True)
        finished = [
            event.data["node"] for event in await program.events() if event.type == "node.finished"
        ]
        assert finished.index("c8") <= 3
        assert finished.index("c13") < finished.index("c9") < finished.index("c12")


def kinds_of(program: Program) -> dict[str, str]:
    """Return the performance objective of each call by which calls are ranked."""
    priorities = run_of(program)._calls.priorities
    nodes = run_of(program).state.graph.nodes
    return {name: priorities.performance(name).kind for name in nodes}


async def test_get_in_a_session_ranks_the_calls_that_its_variable_needs(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], variables={"x": {}}, open=True)
        calls = [
            generate("a", insert("x")),
            generate("b", insert("a")),
            generate("c", insert("b")),
            generate("d", insert("x")),
        ]
        await program.append(nodes=calls)
        get = harness.executor.get
        await get(program.id, "b", tenant=TENANT, wait_s=0, objective="throughput")
        await get(program.id, "d", tenant=TENANT, wait_s=0)
        assert set(kinds_of(program).values()) == {"throughput"}, "no client waits"
        await get(program.id, "b", tenant=TENANT, wait_s=0, objective="latency")
        expected = {"a": "latency", "b": "latency", "c": "throughput", "d": "throughput"}
        assert kinds_of(program) == expected
        waiting = asyncio.create_task(program.value("d"))
        await asyncio.sleep(0)
        assert kinds_of(program) == expected | {"d": "latency"}
        await program.put("x", "X")
        await waiting
        await get(program.id, "d", tenant=TENANT, wait_s=0, objective=Deadline(5))
        assert run_of(program).state.graph.objectives["d"] == "latency", "its value exists"
        await program.cancel()


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of slots of each computation of objectives."""
    found: list[int] = []

    def count(graph: Graph, live: SlotGraph) -> dict[str, objectives.PerformanceObjective]:
        found.append(len(live.slots))
        return objectives.get_perf_objective(graph, live)

    monkeypatch.setattr(priority_table, "get_perf_objective", count)
    return found


async def test_gets_in_a_large_session_rank_only_what_they_need(
    tmp_path: Path, weighed: list[int]
) -> None:
    async with server_harness(tmp_path) as harness:
        chain = [generate("n0", insert("x"))]
        chain += [generate(f"n{i}", insert(f"n{i - 1}")) for i in range(1, 100)]
        two = [{"output": "first"}, insert("n99"), {"output": "second"}]
        nodes = [
            *chain,
            {"id": "two", "op": "generate", "prompt": [insert("x"), *two]},
            *(generate(f"aside{i}", insert("x")) for i in range(100)),
        ]
        program = await harness.submit([], variables={"x": {}}, open=True)
        await program.append(nodes=nodes)
        graph = run_of(program).state.graph
        for name in ("n3", "first", "second", "n98", "aside7"):
            weighed.clear()
            await harness.executor.get(
                program.id, name, tenant=TENANT, wait_s=0, objective="latency"
            )
            found = objectives.get_perf_objective(graph)
            assert kinds_of(program) == {name: each.kind for name, each in found.items()}
        for i in range(100):
            weighed.clear()
            await harness.executor.get(
                program.id, f"n{i}", tenant=TENANT, wait_s=0, objective="latency"
            )
            assert sum(weighed) == 0, "a reader of a later call waits for it already"
        await program.cancel()


async def test_very_large_program_ranks_each_node_once_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighed: list[int]
) -> None:
    monkeypatch.setattr(call_priorities, "MAX_NODES_RECOMPUTED", 10)
    monkeypatch.setattr(call_priorities, "MAX_NODES_AT_ONCE", 20)
    async with server_harness(tmp_path) as harness:
        waiting = [generate(f"n{i}", insert("x")) for i in range(30)]
        program = await harness.submit(waiting, variables={"x": {}}, open=True)
        for i in range(10):
            more = [generate(f"w{i}_{j}", insert("x")) for j in range(10)]
            await program.append(nodes=[generate(f"a{i}", "A"), *more], outputs=[f"a{i}"])
            await program.value(f"a{i}")
        await program.cancel()
    assert sum(weighed) <= 30 + 10 * 11, "each node once"


async def test_large_program_is_ranked_once_and_not_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked: list[tuple[int, bool]] = []

    def count(graph: Graph, live: SlotGraph) -> dict[str, objectives.PerformanceObjective]:
        ranked.append((len(live.slots), threading.current_thread() is threading.main_thread()))
        return objectives.get_perf_objective(graph, live)

    monkeypatch.setattr(priority_table, "get_perf_objective", count)
    async with server_harness(tmp_path) as harness:
        calls = [generate("n0", "N"), *(generate(f"n{i}", insert("n0")) for i in range(1, 300))]
        program = await harness.submit(calls, outputs=["n299"])
        await program.value("n299")
        await program.cancel()
    assert ranked == [(300, False)]


async def test_append_to_large_session_ranks_only_new_nodes(
    tmp_path: Path, weighed: list[int]
) -> None:
    async with server_harness(tmp_path) as harness:
        waiting = [generate(f"n{i}", insert("x")) for i in range(500)]
        program = await harness.submit(waiting, variables={"x": {}}, open=True)
        for i in range(40):
            await program.append(nodes=[generate(f"a{i}", "A")], outputs=[f"a{i}"])
            await program.value(f"a{i}")
        assert sum(weighed) < 1_000, "all of them once, and each new one"
        await program.cancel()


async def test_no_event_follows_the_end_after_a_job_timeout(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        first = {**client("a", "x"), "job": "j", "on_error": "isolate"}
        second = {**client("b", "y"), "job": "j"}
        program = await harness.submit(
            [first, second], outputs=["x"], jobs={"j": {"timeout_s": 0.05}}, start="demand"
        )
        assert (await program.get("x")).status == "failed"
        await program.end()
        journal = harness.executor.programs.journal
        events = await journal.events(TENANT, program.id, 0, 100)
        assert events[-1].type == "program.finished"


CHOSEN = f"p_{'0a' * 12}"


async def test_append_waits_for_the_submission_of_its_program(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        append = Program(harness, CHOSEN).append(nodes=[generate("b", "B")], wait_s=WAIT_S)
        overtaking = asyncio.create_task(append)
        await asyncio.sleep(0)
        program = await harness.submit([generate("a", "A")], id=CHOSEN, open=True)
        await overtaking
        assert program.id == CHOSEN
        assert await program.value("b") == answer("B")


async def test_append_to_a_rejected_submission_is_not_held(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        append = Program(harness, CHOSEN).append(nodes=[generate("b", "B")], wait_s=WAIT_S)
        overtaking = asyncio.create_task(append)
        await asyncio.sleep(0)
        with pytest.raises(ProgramError):
            await harness.submit([generate("a", insert("nothing"))], id=CHOSEN, open=True)
        with pytest.raises(NotFoundError):
            await overtaking


async def test_id_of_another_program_is_refused(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate("a", "A")], id=CHOSEN, open=True)
        other = ServerHarness(harness.executor, "another tenant")
        with pytest.raises(ConflictError, match="random id"):
            await other.submit([generate("a", "A")], id=CHOSEN)
        await program.append(close=True)
        await program.events()
        with pytest.raises(ConflictError, match="random id"):
            await other.submit([generate("a", "A")], id=CHOSEN)
        assert await program.value("a") == answer("A")


async def test_idle_program_without_a_reader_is_closed(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate("a", "A")], open=True, detach=False)
        await program.event("node.finished")
        timers_of_run = run_of(program).context.timers
        lease = next(each for each in timers_of_run._leases if each.key == timers.LEASE)
        lease.num_unused_checks = timers.LEASE_CHECKS
        timers_of_run._check_lease(lease)
        assert (await program.events())[-1].data["status"] == "done"
