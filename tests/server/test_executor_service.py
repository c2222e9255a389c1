"""Tests of the executor as a service: sessions, demand, keys, limits, events, the journal."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conure.server import executor
from conure.server.program.errors import (
    ConflictError,
    NotFoundError,
    ProgramError,
    UnavailableError,
)
from conure.server.program.status import Event
from conure.server.prompts.chat_template import ChatTemplate
from conure.server.runtime.persistence import program_directory
from conure.server.runtime.persistence.journaled_events import RecoveredState
from conure.server.runtime.program_run import ProgramRun
from conure.server.runtime.reporting import status as reported_status

from .inprocess import (
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


async def test_models_without_a_chat_template_have_a_notice(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        services = harness.executor.services
        (model,) = harness.executor.models()
        assert "chat template" not in model.notice
        services.served_model = replace(services.model, template=ChatTemplate("", {}))
        (model,) = harness.executor.models()
        assert "no chat template" in model.notice


async def test_session_accepts_nodes_until_closed(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], variables={"task": {}, "style": {}}, open=True)
        await program.append(nodes=[generate("code", "Code ", insert("task"))], outputs=["code"])
        await program.append(
            nodes=[generate("test", "Test ", insert("code"), " ", insert("style"))],
            variables={"more": {}},
            inputs={"more": 1},
            outputs=["test"],
        )
        await program.put("task", "sort")
        code = answer("Code sort")
        assert await program.value("code") == code
        # All or nothing: the second node of this one cannot be.
        with pytest.raises(ProgramError):
            await program.append(nodes=[expr("fine", {"lit": 1}), expr("bad", var("nobody"))])
        with pytest.raises(ProgramError):
            await program.append(nodes=[generate("x", "y", writes="task")])
        assert set((await program.status()).nodes) == {"code", "test"}
        # What fails in a session stays with its readers.
        await program.append(nodes=[expr("bad", {"parse_json": ["{"]}), expr("b2", var("bad"))])
        assert (await program.get("b2")).status == "failed"
        await program.append(
            nodes=[expr("bad2", {"parse_json": ["{"]}, after=["test"])], close=True
        )
        late: dict[str, Any]
        for late in ({"nodes": [expr("late", {"lit": 1})]}, {"close": True}):
            with pytest.raises(ConflictError) as refused:
                await program.append(**late)
            assert refused.value.code == "session.closed"
        await program.put("style", "short")
        assert await program.value("test") == answer(f"Test {code} short")
        status = await program.end()
        assert status.status == "done"
        with pytest.raises(ConflictError) as refused:
            await program.append(close=True)
        assert refused.value.code == "session.ended"
        assert await harness.num_held() == [(0, 0)]
        assert harness.executor.services.call_quota.num_calls == 0


async def test_session_variable_has_one_producer_or_value(
    tmp_path: Path,
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [expr("b", {"concat": [var("a"), "!"]})], variables={"a": {}, "c": {}}, open=True
        )
        await program.append(nodes=[expr("late", {"lit": "now"}, writes="a")])
        assert await program.value("b") == "now!"
        with pytest.raises(ConflictError):
            await program.put("a", "other")
        await program.put("c", 1)
        taken: dict[str, Any]
        for taken in ({"nodes": [expr("d", {"lit": 2}, writes="c")]}, {"inputs": {"c": 2}}):
            with pytest.raises(ProgramError):
                await program.append(**taken)
        assert set((await program.status()).nodes) == {"b", "late"}
        await program.append(close=True)
        assert (await program.end()).status == "done"


async def test_on_demand_runs_only_requested_variables(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [
                expr("one", {"lit": "1"}),
                generate("two", insert("one")),
                generate("three", insert("two"), after=["side"]),
                expr("side", {"lit": 1}),
                generate("other", "o"),
            ],
            outputs=["three", "other"],
            start="demand",
        )
        assert (await program.get("other", wait_s=0)).status in {"waiting", "queued", "running"}
        assert await program.value("other") == answer("o")
        status = await program.status()
        assert {n for n, s in status.nodes.items() if s.status == "done"} == {"other"}
        assert await program.value("two") == answer("1")
        assert (await program.status()).nodes["three"].status == "waiting"
        assert await program.value("three") == answer(answer("1"))
        status = await program.end()
        assert {node.status for node in status.nodes.values()} == {"done"}


async def test_demanded_variable_runs_once_it_has_a_producer(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [expr("b", var("a"))], variables={"a": {}}, open=True, start="demand"
        )
        waiting = asyncio.create_task(program.get("b"))
        assert (await program.get("b", wait_s=0)).status == "waiting"
        await program.append(nodes=[expr("late", {"lit": 5}, writes="a"), expr("idle", {"lit": 0})])
        assert (await waiting).value == 5
        assert (await program.status()).nodes["idle"].status == "waiting"
        await program.cancel()


async def test_concurrent_submissions_with_one_key_share_a_program(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [generate("x", "hello")]
        programs = await asyncio.gather(
            *(harness.submit(nodes, outputs=["x"], key="k") for _ in range(20))
        )
        assert len({program.id for program in programs}) == 1
        assert await programs[0].value("x") == answer("hello")
        with pytest.raises(ConflictError) as refused:
            await harness.submit([generate("x", "bye")], outputs=["x"], key="k")
        assert refused.value.code == "idempotency.conflict"
        await programs[0].end()
        assert harness.executor.services.call_quota.num_calls == 0
        again = await harness.submit(nodes, outputs=["x"], key="k")
        assert again.id == programs[0].id


async def test_a_repeated_submission_is_answered_without_the_status_of_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(reported_status, "node_status", shown.append)
    async with server_harness(tmp_path) as harness:
        first, again = [await harness.submit([client("a", "x")], key="k") for _ in range(2)]
    assert first.id == again.id
    assert not shown


async def test_program_runs_after_its_client_disconnects(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [generate("x", "hello")]
        disk = DelayedJournalWriter(harness)
        sending = asyncio.create_task(harness.submit(nodes, outputs=["x"], key="k"))
        await disk.came.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        disk.release()
        again = await harness.submit(nodes, outputs=["x"], key="k")
        assert await again.value("x") == answer("hello")
        await again.end()


async def test_full_queue_rejects_before_any_work(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_queued_calls=3) as harness:
        gate = client("gate", "go")
        held = [generate(f"c{i}", insert("go")) for i in range(3)]
        program = await harness.submit([gate, *held])
        for more in ([generate("x", "y")], held):
            with pytest.raises(UnavailableError) as refused:
                await harness.submit(more, variables={"go": {}})
            assert refused.value.code == "queue.full"
            assert refused.value.status == 429
            assert refused.value.retry_after_s
        free = await harness.submit([expr("e", {"lit": 1})], outputs=["e"])
        assert await free.value("e") == 1
        await program.cancel()
        await (await harness.submit(held, inputs={"go": "x"})).end()


async def test_cancelled_program_stops_and_frees_everything(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.005, max_sequences=2) as harness:
        # Some run, some wait for the engine, some wait for others.
        shared = "the same words for all of them; " * 20
        nodes = [
            generate(f"c{i}", shared, str(i), ignore_eos=True, max_tokens=4_000) for i in range(12)
        ]
        nodes += [expr("end", [var(f"c{i}") for i in range(12)]), client("ask", "x")]
        program = await harness.submit(nodes, outputs=["end"])
        waiting = asyncio.create_task(program.get("end"))
        await program.event("node.delta", count=3)
        status = await asyncio.wait_for(program.cancel(), 60)
        assert status.status == "cancelled"
        assert {node.status for node in status.nodes.values()} == {"cancelled"}
        received = await waiting
        assert received.error
        assert received.error.code == "program.cancelled"
        assert await harness.num_held() == [(0, 0)]
        assert harness.executor.services.scheduler.num_waiting == 0
        status = await program.end()
        assert status.receipt
        assert status.receipt.output_tokens.discarded > 0
        # Cancelling what has ended changes nothing.
        assert await program.cancel() == status


async def test_prompt_ended_early_frees_everything(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        prompt = [
            {"text": "a" * 40},
            {"output": "one", "max_tokens": 8},
            {"input": "found"},
            {"output": "two", "max_tokens": 8},
        ]
        for kind in ("isolate", "fail"):
            nodes = [
                {"id": "p", "op": "generate", "prompt": prompt},
                client("find", "found", args={"x": var("one")}, on_error=kind),
                client("later", "open", args={"x": var("one")}),
            ]
            program = await harness.submit(nodes, outputs=["open"])
            await program.event("client.requested", count=2)
            assert (await harness.num_held())[0][1] == 1
            await program.put_error("found", "gone")
            if kind == "isolate":
                two = await program.get("two")
                assert two.error
                assert two.error.code == "gone"
                assert await program.value("one") == answer("a" * 40)[:8]
                assert await harness.num_held() == [(0, 0)]
                await program.put("open", 1)
            status = await program.end()
            assert status.receipt
            assert status.receipt.output_tokens.discarded == 0, "what is committed is of use"
            assert await harness.num_held() == [(0, 0)]


async def collect(program: Program, into: list[Event], after: int = 0) -> None:
    async with contextlib.aclosing(program.read(after)) as events:
        async for event in events:
            into += [event]


async def test_events_can_be_resumed_at_any_number(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.001) as harness:
        program = await harness.submit(
            [
                generate("a", "x"),
                generate("b", insert("a")),
                client("c", "v"),
                expr("d", [var("v"), var("b")]),
            ],
            outputs=["d"],
        )
        live: list[Event] = []
        reading = asyncio.create_task(collect(program, live))
        await program.event("client.requested")
        await program.put("v", 1)
        await asyncio.wait_for(reading, 60)
        whole = [event for event in live if event.seq is not None]
        seqs = [event.seq for event in whole if event.seq is not None]
        assert seqs == sorted(set(seqs))
        assert [event.data["seq"] for event in whole] == seqs
        for node in "abcd":
            own = [event.type for event in whole if event.data.get("node") == node]
            assert own[-2:] == ["variable.committed", "node.finished"]
        assert (whole[0].type, whole[-1].type) == ("program.accepted", "program.finished")
        for variable in "ab":
            deltas = [
                e.data for e in live if e.type == "node.delta" and e.data["variable"] == variable
            ]
            text = ""
            for delta in deltas:
                assert delta["offset"] == len(text)
                text += delta["text"]
            assert text == await program.value(variable)
        for is_in_memory in (True, False):
            if not is_in_memory:
                harness.executor.programs._recent.clear()
            for at in range(len(whole)):
                assert await program.events(seqs[at] or 0) == whole[at + 1 :]
            assert (await program.status()).status == "done"
        with pytest.raises(NotFoundError):
            await program.get("nobody")


async def test_value_is_shown_only_when_durable(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [client("a", "x"), expr("b", var("x")), expr("bad", {"parse_json": [var("b")]})],
            outputs=["b"],
        )
        await program.event("client.requested")
        disk = DelayedJournalWriter(harness)
        waiting = asyncio.create_task(program.get("b"))
        putting = asyncio.create_task(program.put("x", "{"))
        await disk.came.wait()
        assert harness.executor.programs._live[program.id].state.values["b"] == "{"
        for variable in ("x", "b", "bad"):
            shown = await program.get(variable, wait_s=0)
            assert (shown.status, shown.error or None) == ("running", None)
        status = await program.status()
        assert status.status == "running"
        assert not status.receipt
        assert not waiting.done()
        assert not putting.done()
        disk.release()
        assert (await waiting).value == "{"
        assert (await putting).value == "{"
        assert (await program.get("bad")).status == "failed"
        assert (await program.end()).status == "failed"


async def test_calls_start_before_the_program_is_durable(
    tmp_path: Path,
) -> None:
    noted: list[str] = []
    async with server_harness(tmp_path, {"note": lambda: noted.append("now")}) as harness:
        disk = DelayedJournalWriter(harness)
        submitting = asyncio.create_task(
            harness.submit([generate("x", "hi"), call("f", "note", "done"), client("a", "y")])
        )
        await disk.came.wait()
        (run,) = harness.executor.programs._live.values()
        async with asyncio.timeout(60):
            while "x" not in run.state.values:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)
        assert not submitting.done()
        assert (noted, run.events._events, run.outbox.durable_variables) == ([], [], set())
        assert len(disk.batches) == 1
        disk.release()
        program = await submitting
        assert await program.value("x") == answer("hi")
        assert await program.value("done") is None
        assert noted == ["now"]
        await program.put("y", 1)
        await program.end()


async def test_shutdown_fails_pending_requests(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x")], outputs=["x"])
        await program.event("client.requested")
        waiting = asyncio.create_task(program.get("x"))
        reading: list[Event] = []
        reader = asyncio.create_task(collect(program, reading))
        await asyncio.sleep(0)
        await harness.executor.drain()
        with pytest.raises(UnavailableError):
            await harness.submit([])
        await asyncio.wait_for(reader, 60)
        assert reading[-1].type == "server.draining"
        await harness.executor.stop()
        with pytest.raises(UnavailableError) as raised:
            await waiting
        assert raised.value.code == "server.draining"


async def test_stopped_server_answers_draining_not_not_found(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        done = await harness.submit([expr("e", {"lit": 1})], outputs=["e"])
        await done.end()
        harness.executor.programs._recent.clear()
        open_ = await harness.submit([client("a", "x")], outputs=["x"])
        await harness.executor.stop()
        for program in (done, open_):
            for late in (program.status(), program.get("x"), program.events(), program.cancel()):
                with pytest.raises(UnavailableError) as raised:
                    await late
                assert raised.value.code == "server.draining"


async def test_ended_session_calls_free_the_quota(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_queued_calls=3) as harness:
        session = await harness.submit([client("gate", "go")], open=True)
        for i in range(5):
            await session.append(nodes=[generate(f"c{i}", "x"), generate(f"d{i}", "y")])
            await session.value(f"c{i}")
            await session.value(f"d{i}")
        await session.append(nodes=[generate(f"w{i}", insert("go")) for i in range(3)])
        with pytest.raises(UnavailableError) as refused:
            await harness.submit([generate("x", "y")])
        assert refused.value.code == "queue.full"
        await session.cancel()
        assert harness.executor.services.call_quota.num_calls == 0


async def test_status_can_be_restricted_to_nodes(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        executor = harness.executor
        nodes = [expr("a", {"lit": 1}), expr("b", {"lit": 2})]
        program = await harness.submit(nodes, outputs=["a", "b"], open=True)

        async def check_node(status: str) -> None:
            some = await executor.status(program.id, tenant=harness.tenant, nodes=["b"])
            every = await program.status()
            assert some.status == status
            assert (list(some.nodes), some.variables) == (["b"], {})
            assert some.nodes["b"] == every.nodes["b"]

        await check_node("running")
        await program.append(close=True)
        await program.end()
        executor.programs._recent.clear()
        await check_node("done")


async def test_append_returns_the_added_nodes(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        session = await harness.submit([expr("a", {"lit": 1})], outputs=["a"], open=True)
        received = await session.append(
            nodes=[expr("b", var("n"), writes="c")], variables={"n": {}}, inputs={"n": 2}
        )
        assert (received.id, received.outputs) == (session.id, ["a"])
        assert list(received.nodes) == ["b"]
        assert list(received.variables) == ["n", "c"]
        assert received.variables["n"].value == 2
        assert set((await session.status()).nodes) == {"a", "b"}
        closed = await session.append(close=True)
        assert (closed.nodes, closed.variables) == ({}, {})


async def test_an_append_may_repeat_a_declaration_with_a_default(tmp_path: Path) -> None:
    style = {"style": {"type": "string", "default": "short"}}
    async with server_harness(tmp_path) as harness:
        session = await harness.submit([expr("a", var("style"))], variables=style, open=True)
        await session.append(nodes=[expr("b", var("style"))], variables=style, outputs=["b"])
        assert await session.value("b") == "short"


async def test_requests_time_out_on_a_stalled_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "DURABILITY_TIMEOUT_S", 0.05)
    async with server_harness(tmp_path) as harness:
        session = await harness.submit([client("a", "x", retries=1)], outputs=["x"], open=True)
        await session.event("client.requested")
        disk = DelayedJournalWriter(harness)
        for change in (
            session.put_error("x", "again"),  # the step is requested again
            session.append(nodes=[expr("e", {"lit": 1})]),
            session.cancel(),
        ):
            with pytest.raises(UnavailableError) as refused:
                await change
            assert refused.value.code == "store.unavailable"
        disk.release()
        monkeypatch.undo()
        await session.end()
        assert (await session.cancel()).status == "cancelled"


@pytest.mark.parametrize("breaks", ["body", "resume"])
async def test_unrecoverable_program_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    async with server_harness(tmp_path) as harness:
        broken = await harness.submit([client("a", "x")], outputs=["x"], inputs={"i": 1})
        await broken.event("client.requested")
        whole = await harness.submit([client("a", "x")], outputs=["x"])
        await whole.event("client.requested")
    if breaks == "body":
        with sqlite3.connect(tmp_path / "journal.sqlite3") as connection:
            connection.execute(
                "UPDATE program SET body = x'7b', crc = NULL WHERE id = ?", (broken.id,)
            )
    resume = ProgramRun.resume

    def refuse(run: ProgramRun, past: RecoveredState) -> None:
        resume(run, past)
        if breaks == "resume" and run.state.id == broken.id:
            raise RuntimeError("broken")

    monkeypatch.setattr(ProgramRun, "resume", refuse)
    async with server_harness(tmp_path) as harness:
        broken = Program(harness, broken.id)
        status = await broken.status()
        assert status.status == "failed"
        assert status.error
        assert status.error.code == "program.unreadable"
        assert status.receipt
        last = (await broken.events())[-1]
        assert last.type == "program.finished"
        error = status.error
        assert (last.data["code"], last.data["message"]) == (error.code, error.message)
        metrics = (await harness.executor.metrics()).decode()
        assert 'programs_ended_total{status="failed"} 1' in metrics
        if breaks == "resume":
            assert status.variables["i"].value == 1
            assert (await broken.get("x")).status == "failed"
        whole = Program(harness, whole.id)
        await whole.put("x", 2)
        assert (await whole.end()).status == "done"
    async with server_harness(tmp_path) as harness:
        assert await Program(harness, broken.id).status() == status, "it was ended once and for all"


async def test_recent_programs_are_bounded_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_directory, "MAX_RECENT_BYTES", 50_000)
    async with server_harness(tmp_path) as harness:
        programs = []
        for i in range(8):
            nodes = [expr("e", {"lit": "x" * (60_000 if i == 6 else 100)})]
            programs.append(await harness.submit(nodes, outputs=["e"]))
            await programs[-1].end()
        recent = harness.executor.programs._recent
        assert programs[6].id not in recent, "larger than the limit"
        assert programs[7].id in recent
        assert recent.currsize <= 50_000
        for program in programs:
            assert (await program.status()).status == "done"


@pytest.mark.parametrize("state", ["live", "ended", "restarted"])
async def test_an_append_that_is_sent_again_has_no_effect(tmp_path: Path, state: str) -> None:
    append: dict[str, Any] = {
        "nodes": [generate("b", "B")],
        "outputs": ["b"],
        "request_id": "r1",
        "close": state == "ended",
    }
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate("a", "A")], open=True)
        await program.append(**append)
        if state == "ended":
            await program.end()
        if state != "restarted":
            assert "b" in (await program.append(**append)).nodes
            return
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        assert "b" in (await program.append(**append)).nodes
        assert await program.value("b") == answer("B")
        with pytest.raises(ProgramError, match="two nodes have the id `b`") as other:
            await program.append(**{**append, "request_id": "r2"})
        assert other.value.code == "program.duplicate_node"


async def test_a_repeated_append_gets_only_what_it_added_after_the_end(tmp_path: Path) -> None:
    append: dict[str, Any] = {
        "nodes": [expr("b", var("n"), writes="c"), expr("bad", {"parse_json": ["{"]})],
        "variables": {"n": {}},
        "inputs": {"n": 2},
        "request_id": "r",
    }
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("a", 1)], inputs={"i": 1}, open=True)
        await program.append(**append)
        await program.append(close=True)
        ended = await program.end()
        again = await program.append(**append)
        assert (list(again.nodes), list(again.variables)) == (["b", "bad"], ["n", "c", "bad"])
        for name, variable in again.variables.items():
            assert variable == ended.variables[name]
        assert again.nodes["bad"] == ended.nodes["bad"]


@pytest.mark.parametrize("is_ended", [False, True])
async def test_another_append_with_the_same_request_id_is_refused(
    tmp_path: Path, is_ended: bool
) -> None:
    first: dict[str, Any] = {"nodes": [expr("a", 1)], "request_id": "r", "close": is_ended}
    others: list[dict[str, Any]] = [{"nodes": [expr("b", 1)]}]
    if not is_ended:
        others += [{"inputs": {"x": 2}}, {"variables": {"y": {}}}]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], variables={"x": {}}, open=True)
        await program.append(**first)
        if is_ended:
            await program.end()
        for other in others:
            with pytest.raises(ConflictError) as refused:
                await program.append(**{**first, **other})
            assert refused.value.code == "idempotency.conflict"


async def test_appends_of_one_request_are_applied_once_at_the_same_time(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], open=True)
        large = generate("a", "a " * 20_000)  # is checked in a thread
        appends = [program.append(nodes=[large], request_id="r", close=True) for _ in range(3)]
        assert all("a" in status.nodes for status in await asyncio.gather(*appends))
        await program.end()


async def test_a_repeated_submission_waits_until_the_first_is_durable(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        journal = DelayedJournalWriter(harness)
        chosen = f"p_{'0b' * 12}"
        submissions = [
            asyncio.create_task(harness.submit([generate("a", "A")], id=chosen, key="k"))
            for _ in range(2)
        ]
        async with asyncio.timeout(60):
            await journal.came.wait()
        late = asyncio.create_task(harness.submit([generate("a", "A")], id=chosen, key="k"))
        await asyncio.sleep(0)
        journal.release()
        for submission in (*submissions, late):
            assert (await submission).id == chosen
        with pytest.raises(ConflictError) as taken:
            await harness.submit([generate("a", "A")], id=chosen, key="other")
        assert taken.value.code == "program.id_taken"
