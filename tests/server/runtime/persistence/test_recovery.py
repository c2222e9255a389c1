"""Tests of recovery after a restart of the server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from conure.engine.core.engine import EngineCore
from conure.engine.testing.scripted_runner import FakeRunner
from conure.server.program.errors import ProgramError
from conure.server.program.graph import extension
from conure.server.program.graph.objectives import PerformanceObjective
from conure.server.program.ir import GenerateNode, GraphNode
from conure.server.program.status import Problem, ProgramStatus
from conure.server.prompts.served_model import ServedModel
from conure.server.runtime.calls.aborted_outputs import AbortedOutputs
from conure.server.runtime.calls.kv_context import PromptPlan
from conure.server.runtime.calls.llm_call import LLMCall
from conure.server.runtime.calls.prefix_registry import PrefixRegistry
from conure.server.runtime.clock import SteadyClock
from conure.server.runtime.node_state import NodeState
from conure.server.runtime.persistence import event_stream, resumption
from conure.server.runtime.program_run import ProgramRun
from conure.server.runtime.timed_jobs import JobInstance
from conure.server.runtime.timers import Timers
from conure.server.scheduling.policy import Rank
from conure.server.store.journal import ValueRecord

from ...inprocess import (
    TENANT,
    DelayedJournalWriter,
    Program,
    answer,
    call,
    client,
    expr,
    generate,
    insert,
    server_harness,
    var,
)

GROWING = [
    {
        "id": "p",
        "op": "generate",
        "prompt": [
            {"text": "Think: "},
            {"output": "one", "max_tokens": 64},
            {"text": "\nFound: "},
            {"input": "found"},
            {"text": "\nSo: "},
            {"output": "two", "max_tokens": 64},
        ],
    },
    client("find", "found", args={"q": var("one")}),
    generate("end", "E", insert("two")),
]


async def check_events(program: Program) -> list[Any]:
    """Check that every event is read once and in order, from any starting point."""
    whole = await program.events()
    seqs = [event.seq or 0 for event in whole]
    assert seqs == sorted(set(seqs))
    for at, seq in enumerate(seqs):
        assert await program.events(seq) == whole[at + 1 :]
    return whole


async def test_growing_prompt_continues_after_committed_outputs(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(GROWING, outputs=["end"], trace=True)
        requested = await program.event("client.requested")
        one = await program.value("one")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        # The step is not requested again, and the open request can be answered.
        status = await program.put("found", "gold", requested.data["request_id"])
        assert status.value == "gold"
        text = f"Think: {one}\nFound: gold\nSo: "
        assert one == answer("Think: ")
        assert await program.value("two") == answer(text)
        ended = await program.end()
        assert await program.value("end") == answer("E" + answer(text))
        traces = {trace.variable: trace for trace in await program.traced_calls()}
        for variable, prompt in (("one", "Think: "), ("two", text)):
            assert bytes(traces[variable].prompt_ids).decode() == prompt
            assert traces[variable].prompt == prompt
        events = await check_events(program)
        requests = [e.data["request_id"] for e in events if e.type == "client.requested"]
        assert requests == [requested.data["request_id"]]
        assert ended.nodes["p"].attempt == 2
        assert ended.nodes["find"].attempt == 1
        assert ended.nodes["end"].attempt == 1
        assert await harness.num_held() == [(0, 0)]


async def test_recovery_reruns_only_uncommitted_calls(tmp_path: Path) -> None:
    nodes = [
        generate("first", "x"),
        generate("second", insert("first"), ignore_eos=True, max_tokens=400),
        generate("last", insert("second")),
    ]
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        program = await harness.submit(nodes, outputs=["last"])
        first = await program.value("first")
        await program.event("node.started", node="second")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        assert (await program.get("first", wait_s=0)).value == first
        ended = await program.end()
        attempts = {name: node.attempt for name, node in ended.nodes.items()}
        assert attempts == {"first": 1, "second": 2, "last": 1}
        events = await check_events(program)
        counts = Counter((e.type, e.data.get("node")) for e in events)
        assert counts["node.started", "first"] == counts["node.started", "last"] == 1
        assert counts["node.started", "second"] == 2
        assert counts["node.restarted", "second"] == 1
        assert set(Counter(e.data["variable"] for e in events if "value" in e.data).values()) == {1}


async def test_lost_batches_are_repeated(tmp_path: Path) -> None:
    """Simulates a crash with values that were committed in memory only."""
    ran: list[str] = []

    def note(text: str) -> str:
        ran.append(text)
        return text

    nodes = [client("go", "v"), expr("a", var("v")), call("f", "note", args={"text": var("a")})]
    async with server_harness(tmp_path, {"note": note}) as harness:
        program = await harness.submit(nodes, outputs=["f"])
        requested = await program.event("client.requested")
        disk = DelayedJournalWriter(harness)
        putting = asyncio.create_task(program.put("v", "one"))
        await disk.came.wait()
        assert harness.executor.programs._live[program.id].state.values == {"v": "one", "a": "one"}
        await harness.executor.stop()
        assert (await asyncio.gather(putting, return_exceptions=True))[0] is not None
    assert ran == [], "a function waits for the disk"
    async with server_harness(tmp_path, {"note": note}) as harness:
        program = Program(harness, program.id)
        assert (await program.get("v", wait_s=0)).status == "running"
        await program.put("v", "two", requested.data["request_id"])
        assert await program.value("f") == "two"
        await program.end()
    assert ran == ["two"]


async def test_ends_and_failed_inputs_are_recovered(tmp_path: Path) -> None:
    nodes = [
        expr("off", {"lit": 1}, when={"lit": False}),
        expr("bad", {"parse_json": ["{"]}, on_error="isolate"),
        generate("reader", insert("lost"), on_error="isolate"),
        expr("all", {"first": [var("off"), var("bad"), var("reader"), var("given"), var("x")]}),
        client("ask", "x"),
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["all"], variables={"lost": {}, "given": {}})
        await program.put_error("lost", "no.input")
        await program.event("client.requested")
        assert (await program.get("reader")).status == "failed"
    for _ in range(2):
        async with server_harness(tmp_path) as harness:
            program = Program(harness, program.id)
            statuses = [await program.get(name, 0) for name in ("off", "bad", "lost", "reader")]
            assert [s.status for s in statuses] == ["skipped", "failed", "failed", "failed"]
            assert statuses[3].error == Problem(code="no.input", message="no")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("given", None)
        await program.put("x", "last")
        assert await program.value("all") == "last"
        ended = await program.end()
        assert ended.status == "done"
        types = Counter(e.type for e in await check_events(program))
        assert types["node.failed"] == 2
        assert types["variable.failed"] == types["client.requested"] == 1


async def test_retries_survive_restarts(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x", retries=1)], outputs=["x"])
        await program.event("client.requested")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put_error("x", "once")
        again = await program.event("client.requested", count=2)
        assert again.data["attempt"] == 2
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put_error("x", "twice", again.data["request_id"])
        ended = await program.end()
        assert ended.error == Problem(code="twice", message="no")


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [
        ("failure", "failed", "expr.json"),
        ("cancel", "cancelled", "program.cancelled"),
        ("deadline", "deadline_exceeded", "program.deadline_exceeded"),
    ],
)
async def test_program_that_was_stopping_is_stopped_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, status: str, code: str
) -> None:
    nodes = [
        generate("slow", "x", ignore_eos=True),
        expr("bad", {"parse_json": "{"}) if cause == "failure" else expr("good", 1),
        client("step", "given"),
    ]
    options: dict[str, Any] = {"deadline_s": 0.05} if cause == "deadline" else {}
    with monkeypatch.context() as crash:
        # The server dies while the engine stops the call.
        crash.setattr(AbortedOutputs, "when_settled", lambda self, callback: None)
        async with server_harness(tmp_path, time_per_output_token=0.1) as harness:
            program = await harness.submit(nodes, **options)
            cancelling = asyncio.create_task(program.cancel()) if cause == "cancel" else None
            await program.event("node.killed", node="step")
            if cancelling is not None:
                cancelling.cancel()
                await asyncio.gather(cancelling, return_exceptions=True)
    async with server_harness(tmp_path) as harness:
        ended = await Program(harness, program.id).end()
        assert (ended.status, ended.error and ended.error.code) == (status, code)
        assert {node.status for node in ended.nodes.values()} <= {"failed", "killed", "done"}
        assert set(await harness.num_held()) == {(0, 0)}


async def test_session_is_restored_unchanged(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], variables={"a": {}, "b": {}}, open=True)
        await program.append(
            nodes=[generate("x", insert("a"), insert("b"))], inputs={"a": "A"}, outputs=["x"]
        )
        await program.put("b", "B")
        value = await program.value("x")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        status = await program.status()
        assert (status.status, status.outputs) == ("running", ["x"])
        assert {n: v.value for n, v in status.variables.items()} == {"a": "A", "b": "B", "x": value}
        for taken in ("a", "b", "x"):
            with pytest.raises(ProgramError):
                await program.append(nodes=[expr("y", {"lit": 1}, taken)])
        await program.append(nodes=[expr("y", {"parse_json": ["{"]}), expr("z", var("x"))])
        assert await program.value("z") == value
        await program.append(close=True)
        assert (await program.end()).status == "done"
        await check_events(program)


async def demanded_and_answered_after_restart(tmp_path: Path, nodes: list[Any]) -> ProgramStatus:
    """Demand `b`, restart while its client step waits for `x`, and answer the step."""
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["b"], start="demand")
        await program.get("b", wait_s=0)
        requested = await program.event("client.requested")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("x", 1, requested.data["request_id"])
        assert await program.value("b") == 1
        return await program.end()


async def test_on_demand_client_step_is_answered_after_restart(tmp_path: Path) -> None:
    await demanded_and_answered_after_restart(tmp_path, [client("a", "x"), expr("b", var("x"))])


async def test_on_demand_client_step_in_a_body_is_answered_after_restart(tmp_path: Path) -> None:
    body = {"id": "t", "op": "try", "body": [client("a", "x")], "merge": {"y": ["x"]}}
    nodes = [body, expr("b", var("y")), expr("other", 1)]
    status = await demanded_and_answered_after_restart(tmp_path, nodes)
    assert status.nodes["other"].status == "waiting"


async def test_answer_that_arrives_before_its_step_is_dispatched_again_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [expr(f"e{i}", {"concat": [var("go"), "x"]}) for i in range(400)]
    nodes = [*many, client("a", "x"), expr("b", var("x"))]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["b"], variables={"go": {}})
        requested = await program.event("client.requested")
    monkeypatch.setattr(resumption, "START_S", 0.0)
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        status = await program.put("x", 1, requested.data["request_id"])
        assert status.value == 1
        assert await program.value("b") == 1
        await program.cancel()


async def test_missing_function_fails_only_its_node(tmp_path: Path) -> None:
    nodes = [client("a", "x"), call("f", "gone", args={"x": var("x")}), call("g", "gone")]
    gate = asyncio.Event()

    async def gone(x: object = None) -> None:
        await gate.wait()

    async with server_harness(tmp_path, {"gone": gone}) as harness:
        program = await harness.submit(nodes, outputs=["f"])
        await program.event("client.requested")
        other = await harness.submit([client("a", "x")], outputs=["x"])
    async with server_harness(tmp_path) as harness:
        ended = await Program(harness, program.id).end()
        assert ended.error
        assert ended.error.code == "call.unknown_function"
        await Program(harness, other.id).put("x", 1)


async def test_deadline_is_an_absolute_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x")], outputs=["x"], deadline_s=3_600)
        await program.event("client.requested")
    now = SteadyClock.now
    monkeypatch.setattr(SteadyClock, "now", lambda clock: now(clock) + 3_600)
    async with server_harness(tmp_path) as harness:
        assert (await Program(harness, program.id).end()).status == "deadline_exceeded"


async def test_timeout_of_a_job_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        node = client("a", "x", job="j", timeout_s=86_400)
        program = await harness.submit([node], outputs=["x"], jobs={"j": {"timeout_s": 3_600}})
        await program.event("client.requested")
    now = SteadyClock.now
    monkeypatch.setattr(SteadyClock, "now", lambda clock: now(clock) + 3_600)
    async with server_harness(tmp_path) as harness:
        failed = await Program(harness, program.id).get("x")
        assert failed.error
        assert failed.error.code == "job.timeout"


@pytest.mark.parametrize(
    "node",
    [
        {"id": "n", "op": "wait", "variables": ["never"]},
        {"id": "n", "op": "loop", "count": 2, "body": [client("a", "x")]},
        generate("n", {"input": "x"}),
    ],
    ids=lambda node: node["op"],
)
async def test_timeout_of_a_node_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: dict[str, Any]
) -> None:
    async with server_harness(tmp_path) as harness:
        harness.executor.services.scheduler.pause()
        program = await harness.submit(
            [node | {"timeout_s": 3_600, "on_error": "isolate"}],
            variables={"never": {}, "x": {}},
            require_inputs=False,
        )
        if node["op"] == "generate":
            await program.put("x", "text")
            await program.event("node.queued")
        else:
            await program.event("node.started")
    now = SteadyClock.now
    monkeypatch.setattr(SteadyClock, "now", lambda clock: now(clock) + 3_600)
    async with server_harness(tmp_path) as harness:
        harness.executor.services.scheduler.pause()
        restarted = Program(harness, program.id)
        failed = await restarted.event("node.failed")
        assert failed.data["code"] == "node.timeout"
        if node["op"] != "generate":
            assert (await restarted.status()).nodes["n"].attempt == 1


async def test_timeout_of_a_job_goes_on_while_none_of_its_nodes_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [expr("a", 1, job="j"), client("c", "x"), expr("b", var("x"), job="j")]
    async with server_harness(tmp_path) as harness:
        jobs = {"j": {"timeout_s": 3_600, "on_error": "isolate"}}
        program = await harness.submit(nodes, outputs=["b"], jobs=jobs)
        await program.event("client.requested")
    now = SteadyClock.now
    monkeypatch.setattr(SteadyClock, "now", lambda clock: now(clock) + 3_600)
    async with server_harness(tmp_path) as harness:
        failed = await Program(harness, program.id).get("b")
        assert failed.error
        assert failed.error.code == "job.timeout"


async def test_each_round_has_the_whole_time_of_its_job_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = {"id": "l", "op": "loop", "count": 2, "body": [client("c", "y", job="j")]}
    passed = {"s": 0.0}
    now = SteadyClock.now
    monkeypatch.setattr(SteadyClock, "now", lambda clock: now(clock) + passed["s"])
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([node], jobs={"j": {"timeout_s": 3_600}})
        first = await program.event("client.requested")
        passed["s"] = 3_000
        await program.put("y.0", 1, first.data["request_id"])
        second = await program.event("client.requested", count=2)
    passed["s"] = 5_000
    async with server_harness(tmp_path) as harness:
        restarted = Program(harness, program.id)
        await restarted.status()
        await (await harness.submit([expr("e", 1)])).end()  # time for the timer of the first round
        await restarted.put("y.1", 2, second.data["request_id"])
        assert (await restarted.end()).status == "done"


async def test_timeout_of_a_job_starts_after_a_restart_if_no_node_had_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        expr("a", 1, when=False, job="j"),
        client("b", "y", args={"given": var("given")}, job="j"),
    ]
    async with server_harness(tmp_path) as harness:
        jobs = {"j": {"timeout_s": 3_600}}
        program = await harness.submit(nodes, outputs=["y"], variables={"given": {}}, jobs=jobs)
        await program.event("node.skipped")
    now = SteadyClock.now
    monkeypatch.setattr(SteadyClock, "now", lambda clock: now(clock) + 3_600)
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("given", 1)
        await program.event("client.requested")
        await program.put("y", 2)
        assert (await program.end()).status == "done"


async def test_timeout_of_a_job_counts_from_a_start_that_only_the_end_reports(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()

    async def slow() -> None:
        await gate.wait()

    nodes = [
        call("f", "slow", job="j"),
        client("a", "x"),
        client("b", "y", args={"x": var("x")}, job="j"),
    ]
    async with server_harness(tmp_path, {"slow": slow}) as harness:
        jobs = {"j": {"timeout_s": 3_600}}
        program = await harness.submit(nodes, outputs=["y"], jobs=jobs)
        await program.put("x", 1, (await program.event("client.requested")).data["request_id"])
        await program.event("client.requested", node="b")
        gate.set()
        await program.event("node.finished", node="f")
    async with server_harness(tmp_path) as harness:
        run = harness.executor.programs.find_live(program.id, TENANT)
        assert run is not None
        assert run.state.job_starts[JobInstance("j", None)] == run.state.nodes["f"].started_at


async def test_timeouts_of_nodes_between_two_slots_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: list[Any] = [
        *GROWING[:2],
        {"id": "m", "op": "map", "items": [1], "as": "i", "body": [client("c", "y")]},
        {"id": "l", "op": "loop", "count": 2, "body": [client("d", "z")]},
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes)
        await program.event("client.requested", count=3)
    started: list[str] = []
    start_node = Timers.start_node

    def note(timers: Timers, node: GraphNode) -> None:
        started.append(node.id)
        start_node(timers, node)

    monkeypatch.setattr(Timers, "start_node", note)
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        status = await program.status()
        assert {status.nodes[node].status for node in ("p", "m", "l")} == {"running"}
        assert sorted(started) == ["c.0", "d.0", "find", "l", "m", "p"]
        await program.cancel()


async def test_flags_of_a_node_are_recovered(tmp_path: Path) -> None:
    nodes = [client("c", "x"), generate("a", insert("x")), client("d", "y", after=["a"])]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["y"])
        run = harness.executor.programs.find_live(program.id, TENANT)
        assert run is not None
        run.state.nodes["a"].constraint_relaxed = run.state.nodes["a"].prefix_break = True
        await program.put("x", "X", (await program.event("client.requested")).data["request_id"])
        await program.event("client.requested", count=2)
        before = (await program.status()).nodes["a"]
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        after = (await program.status()).nodes["a"]
        assert after.constraint_relaxed
        assert after.prefix_break
        assert after.why == before.why != ""
        await program.cancel()


async def test_deadline_does_not_move_with_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x")], outputs=["x"], deadline_s=3_600)
        await program.event("client.requested")
        two_hours_later = time.time() + 7_200
        started = time.monotonic()
        monkeypatch.setattr(time, "time", lambda: two_hours_later + time.monotonic() - started)
    async with server_harness(tmp_path) as harness:
        await Program(harness, program.id).put("x", 1)
        ended = await Program(harness, program.id).end()
        assert ended.status == "done"
        assert ended.receipt
        assert 0 <= ended.receipt.wall_s < 3_600


async def test_ended_program_is_read_from_the_journal(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [generate("a", "x"), expr("off", {"lit": 1}, when={"lit": False}), client("c", "v")],
            inputs={"i": {"k": 1}},
            outputs=["a"],
        )
        await program.put("v", None)
        before = await program.end()
        events = await program.events()
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        assert msgspec.to_builtins(await program.status()) == msgspec.to_builtins(before)
        for name, variable in before.variables.items():
            assert await program.get(name) == variable
        assert await program.events() == events
        assert await program.cancel() == await program.status()


async def test_reader_gets_events_that_are_dropped_while_it_reads_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MAX_KEPT", 2)
    nodes = [client("ask", "x"), *(expr(f"e{i}", var("x")) for i in range(20)), client("b", "y")]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes)
        known = await program.event("client.requested", count=2)
        other = await harness.submit([client("ask", "x")])
        await other.event("client.requested")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        journal = harness.executor.services.journal
        query = journal.events

        async def query_slowly(*args: Any) -> Any:
            page = await query(*args)
            if not page and not waiting:
                waiting.append(True)
                await program.put("x", 1)
            return page

        waiting: list[bool] = []
        monkeypatch.setattr(journal, "events", query_slowly)
        reading = asyncio.create_task(program.events(known.seq or 0))
        await program.value("e19")
        await program.put("y", 1)
        assert await reading == await program.events(known.seq or 0)


# --- a call that continues --------------------------------------------------------------------


@pytest.mark.parametrize("body", ["a call", "an expression"])
async def test_map_entered_after_restart_has_items_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    node = generate("s", "S ", insert("x"))
    if body == "an expression":
        node = expr("s", {"concat": ["S ", var("x")]})
    wide = {"id": "m", "op": "map", "items": var("docs"), "as": "x", "body": [node]}
    docs = [f"d{i}" for i in range(300)]
    start = ProgramRun.start
    async with server_harness(tmp_path, max_queued_calls=8) as harness:
        # The server is killed when the program is on disk.
        monkeypatch.setattr(ProgramRun, "start", lambda *_: None)
        submitted = await harness.submit(
            [{**wide, "collect": {"all": "s"}}], inputs={"docs": docs}, outputs=["all"]
        )
    monkeypatch.setattr(ProgramRun, "start", start)
    async with server_harness(tmp_path, max_queued_calls=8) as harness:
        program = Program(harness, submitted.id)
        assert (await program.end()).status == "done"
        reported = [e.data["nodes"] for e in await program.events() if e.type == "nodes.appended"]
        assert [node for nodes in reported for node in nodes] == [f"s.{i}" for i in range(300)]


@pytest.mark.parametrize("kind", ["first round", "next round", "attempt"])
async def test_expansion_that_did_not_fit_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    body = [expr("e", 1), expr("f", {"parse_json": "{"} if kind == "attempt" else 1)]
    node = {"id": "n", "op": "loop", "count": 3, "body": body}
    if kind == "attempt":
        node = {"id": "n", "op": "try", "retries": 3, "body": body}
    size = {"first round": 4, "next round": 7, "attempt": 7}[kind]
    monkeypatch.setattr(extension, "MAX_EXPANDED_NODES", size)
    async with server_harness(tmp_path) as harness:
        nodes = [{**node, "on_error": "isolate"}, client("ask", "x")]
        program = await harness.submit(nodes, outputs=["x"])
        failed = await program.event("node.failed", node="n")
        assert failed.data["code"] == "program.too_large"
        before = (await program.status()).nodes.keys()
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("x", 1)
        ended = await program.end()
        assert ended.status == "done"
        assert ended.nodes.keys() == before


def resumed(text: str, ids: list[int], tokenizer_hash: str = "") -> LLMCall:
    """Return a call whose first output was journaled."""
    model = ServedModel.of(EngineCore(FakeRunner(), 1).hello())
    model = replace(model, tokenizer_hash="ours")
    node = msgspec.convert(
        {
            "op": "generate",
            "id": "n",
            "prompt": [{"text": "A:"}, {"output": "a"}, {"text": " B:"}, {"output": "b"}],
        },
        GenerateNode,
    )
    context: Any = SimpleNamespace(
        state=SimpleNamespace(id="p"), services=SimpleNamespace(model=model)
    )
    call = LLMCall(
        NodeState(node),
        context,
        PrefixRegistry(),
        PromptPlan(hashes=(), reads=(), constants=(), salt="", expects_readers=False),
        ready_at_s=0.0,
        rank=Rank(0.0, ""),
        performance=PerformanceObjective("latency", None, 0),
        priorities=SimpleNamespace(),  # type: ignore[arg-type]
        on_started=lambda: None,
    )
    record = ValueRecord(
        program="p",
        variable="a",
        value=b'""',
        text=text,
        token_ids=ids,
        tokenizer_hash=tokenizer_hash or "ours",
        epoch=1,
        attempt=1,
    )
    call.restore({"a": record}, {}, 1)
    return call


def following(call: LLMCall) -> bytes:
    """Return the ids up to the second output, as bytes."""
    return bytes(call.ids + call.encode(1, call.render(1, {})).ids)


def test_ids_of_another_tokenizer_are_encoded_again() -> None:
    assert following(resumed("xy", list(b"xy"))) == b"A:xy B:"
    assert following(resumed("xy", [1, 2, 3])) == b"A:\1\2\3 B:", "ids, not text, are what stands"
    assert following(resumed("xy", [1, 2, 3], "theirs")) == b"A:xy B:"


def test_text_after_a_stop_string_is_refilled() -> None:
    call = resumed("xyz", list(b"xy"))
    assert bytes(call.ids) == b"A:xy"
    assert following(call) == b"A:xyz B:"
