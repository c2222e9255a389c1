"""What the service promises whoever waits: sessions, demand, keys, bounds, events, the disk."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from conure.server import executor
from conure.server.program.errors import (
    ConflictError,
    NotFoundError,
    ProgramError,
    UnavailableError,
)
from conure.server.program.status import Event
from conure.server.runs.recovery import Past
from conure.server.runs.run import Run

from .inprocess import Disk, Program, answer, call, client, desk_of, expr, read, say, var


async def test_a_session_grows_until_it_is_closed(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([], variables={"task": {}, "style": {}}, open=True)
        await program.append(nodes=[say("code", "Code ", read("task"))], outputs=["code"])
        await program.append(
            nodes=[say("test", "Test ", read("code"), " ", read("style"))],
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
            await program.append(nodes=[say("x", "y", writes="task")])
        assert set((await program.status()).nodes) == {"code", "test"}
        # What fails in a session stays with its readers.
        await program.append(nodes=[expr("bad", {"parse_json": ["{"]}), expr("b2", var("bad"))])
        assert (await program.get("b2")).status == "failed"
        await program.append(
            nodes=[expr("bad2", {"parse_json": ["{"]}, after=["test"])], close=True
        )
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
        assert await desk.num_held() == [(0, 0)]
        assert desk.executor.room.num_calls == 0


async def test_a_variable_of_a_session_gets_its_producer_or_its_value_once(
    tmp_path: Path,
) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(
            [expr("b", {"concat": [var("a"), "!"]})], variables={"a": {}, "c": {}}, open=True
        )
        await program.append(nodes=[expr("late", {"lit": "now"}, writes="a")])
        assert await program.value("b") == "now!"
        with pytest.raises(ConflictError):
            await program.put("a", "other")
        await program.put("c", 1)
        for taken in ({"nodes": [expr("d", {"lit": 2}, writes="c")]}, {"inputs": {"c": 2}}):
            with pytest.raises(ProgramError):
                await program.append(**taken)
        assert set((await program.status()).nodes) == {"b", "late"}
        await program.append(close=True)
        assert (await program.end()).status == "done"


async def test_on_demand_only_what_is_asked_for_runs(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(
            [
                expr("one", {"lit": "1"}),
                say("two", read("one")),
                say("three", read("two"), after=["side"]),
                expr("side", {"lit": 1}),
                say("other", "o"),
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


async def test_what_was_asked_for_runs_as_soon_as_a_session_can_make_it(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(
            [expr("b", var("a"))], variables={"a": {}}, open=True, start="demand"
        )
        waiting = asyncio.create_task(program.get("b"))
        assert (await program.get("b", wait_s=0)).status == "waiting"
        await program.append(nodes=[expr("late", {"lit": 5}, writes="a"), expr("idle", {"lit": 0})])
        assert (await waiting).value == 5
        assert (await program.status()).nodes["idle"].status == "waiting"
        await program.cancel()


async def test_one_key_is_one_program_however_many_send_it(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [say("x", "hello")]
        programs = await asyncio.gather(
            *(desk.submit(nodes, outputs=["x"], key="k") for _ in range(20))
        )
        assert len({program.id for program in programs}) == 1
        assert await programs[0].value("x") == answer("hello")
        with pytest.raises(ConflictError) as refused:
            await desk.submit([say("x", "bye")], outputs=["x"], key="k")
        assert refused.value.code == "idempotency.conflict"
        await programs[0].end()
        assert desk.executor.room.num_calls == 0
        again = await desk.submit(nodes, outputs=["x"], key="k")
        assert again.id == programs[0].id


async def test_a_submission_whose_sender_leaves_runs_all_the_same(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [say("x", "hello")]
        disk = Disk(desk)
        sending = asyncio.create_task(desk.submit(nodes, outputs=["x"], key="k"))
        await disk.came.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        disk.let_through()
        again = await desk.submit(nodes, outputs=["x"], key="k")
        assert await again.value("x") == answer("hello")
        await again.end()


async def test_a_full_queue_refuses_before_any_work(tmp_path: Path) -> None:
    async with desk_of(tmp_path, max_queued_calls=3) as desk:
        gate = client("gate", "go")
        held = [say(f"c{i}", read("go")) for i in range(3)]
        program = await desk.submit([gate, *held])
        for more in ([say("x", "y")], held):
            with pytest.raises(UnavailableError) as refused:
                await desk.submit(more, variables={"go": {}})
            assert refused.value.code == "queue.full"
            assert refused.value.http_status == 429
            assert refused.value.retry_after_s
        free = await desk.submit([expr("e", {"lit": 1})], outputs=["e"])
        assert await free.value("e") == 1
        await program.cancel()
        await (await desk.submit(held, inputs={"go": "x"})).end()


async def test_a_cancelled_program_stops_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.005, max_sequences=2) as desk:
        # Some run, some wait for the engine, some wait for others.
        shared = "the same words for all of them; " * 20
        nodes = [say(f"c{i}", shared, str(i), ignore_eos=True, max_tokens=4_000) for i in range(12)]
        nodes += [expr("end", [var(f"c{i}") for i in range(12)]), client("ask", "x")]
        program = await desk.submit(nodes, outputs=["end"])
        waiting = asyncio.create_task(program.get("end"))
        await program.event("node.delta", count=3)
        status = await asyncio.wait_for(program.cancel(), 2)
        assert status.status == "cancelled"
        assert {node.status for node in status.nodes.values()} == {"cancelled"}
        told = await waiting
        assert told.error
        assert told.error.code == "program.cancelled"
        assert await desk.num_held() == [(0, 0)]
        assert desk.executor.scheduler.num_waiting == 0
        status = await program.end()
        assert status.receipt
        assert status.receipt.output_tokens.discarded > 0
        # Cancelling what has ended changes nothing.
        assert await program.cancel() == status


async def test_a_prompt_that_ends_in_its_middle_leaves_nothing(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
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
            program = await desk.submit(nodes, outputs=["open"])
            await program.event("client.requested", count=2)
            assert (await desk.num_held())[0][1] == 1
            await program.put_error("found", "gone")
            if kind == "isolate":
                two = await program.get("two")
                assert two.error
                assert two.error.code == "gone"
                assert await program.value("one") == answer("a" * 40)[:8]
                assert await desk.num_held() == [(0, 0)]
                await program.put("open", 1)
            status = await program.end()
            assert status.receipt
            assert status.receipt.output_tokens.discarded == 0, "what is committed is of use"
            assert await desk.num_held() == [(0, 0)]


async def collect(program: Program, into: list[Event], after: int = 0) -> None:
    async with contextlib.aclosing(program.read(after)) as events:
        async for event in events:
            into += [event]


async def test_events_are_whole_in_order_and_can_be_taken_up_anywhere(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.001) as desk:
        program = await desk.submit(
            [say("a", "x"), say("b", read("a")), client("c", "v"), expr("d", [var("v"), var("b")])],
            outputs=["d"],
        )
        live: list[Event] = []
        reading = asyncio.create_task(collect(program, live))
        await program.event("client.requested")
        await program.put("v", 1)
        await asyncio.wait_for(reading, 20)
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
                desk.executor._recent.clear()
            for at in range(len(whole)):
                assert await program.events(seqs[at] or 0) == whole[at + 1 :]
            assert (await program.status()).status == "done"
        with pytest.raises(NotFoundError):
            await program.get("nobody")


async def test_a_value_is_shown_when_the_disk_has_it_and_not_before(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(
            [client("a", "x"), expr("b", var("x")), expr("bad", {"parse_json": [var("b")]})],
            outputs=["b"],
        )
        await program.event("client.requested")
        disk = Disk(desk)
        waiting = asyncio.create_task(program.get("b"))
        putting = asyncio.create_task(program.put("x", "{"))
        await disk.came.wait()
        assert desk.executor._runs[program.id].execution.values["b"] == "{"
        for variable in ("x", "b", "bad"):
            shown = await program.get(variable, wait_s=0)
            assert (shown.status, shown.error or None) == ("running", None)
        status = await program.status()
        assert status.status == "running"
        assert not status.receipt
        assert not waiting.done()
        assert not putting.done()
        disk.let_through()
        assert (await waiting).value == "{"
        assert (await putting).value == "{"
        assert (await program.get("bad")).status == "failed"
        assert (await program.end()).status == "failed"


async def test_calls_begin_while_the_disk_takes_their_program_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    noted: list[str] = []
    async with desk_of(tmp_path, {"note": lambda: noted.append("now")}) as desk:
        disk = Disk(desk)
        submitting = asyncio.create_task(
            desk.submit([say("x", "hi"), call("f", "note", "done"), client("a", "y")])
        )
        await disk.came.wait()
        (run,) = desk.executor._runs.values()
        async with asyncio.timeout(5):
            while "x" not in run.execution.values:  # noqa: ASYNC110 - nobody may be told of it
                await asyncio.sleep(0.001)
        assert not submitting.done()
        assert (noted, run.feed._events, run.outbox.settled) == ([], [], set())
        assert len(disk.batches) == 1
        disk.let_through()
        program = await submitting
        assert await program.value("x") == answer("hi")
        assert await program.value("done") is None
        assert noted == ["now"]
        await program.put("y", 1)
        await program.end()


async def test_whoever_waits_on_a_server_that_stops_is_told_so(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([client("a", "x")], outputs=["x"])
        await program.event("client.requested")
        waiting = asyncio.create_task(program.get("x"))
        reading: list[Event] = []
        reader = asyncio.create_task(collect(program, reading))
        await asyncio.sleep(0)
        await desk.executor.drain()
        with pytest.raises(UnavailableError):
            await desk.submit([])
        await asyncio.wait_for(reader, 5)
        assert reading[-1].type == "server.draining"
        await desk.executor.stop()
        with pytest.raises(UnavailableError) as told:
            await waiting
        assert told.value.code == "server.draining"


async def test_a_stopped_server_says_so_and_not_that_there_is_no_program(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        done = await desk.submit([expr("e", {"lit": 1})], outputs=["e"])
        await done.end()
        desk.executor._recent.clear()
        open_ = await desk.submit([client("a", "x")], outputs=["x"])
        await desk.executor.stop()
        for program in (done, open_):
            for late in (program.status(), program.get("x"), program.events(), program.cancel()):
                with pytest.raises(UnavailableError) as told:
                    await late
                assert told.value.code == "server.draining"


async def test_calls_of_a_session_that_have_ended_leave_room_for_others(tmp_path: Path) -> None:
    async with desk_of(tmp_path, max_queued_calls=3) as desk:
        session = await desk.submit([client("gate", "go")], open=True)
        for i in range(5):
            await session.append(nodes=[say(f"c{i}", "x"), say(f"d{i}", "y")])
            await session.value(f"c{i}")
            await session.value(f"d{i}")
        await session.append(nodes=[say(f"w{i}", read("go")) for i in range(3)])
        with pytest.raises(UnavailableError) as refused:
            await desk.submit([say("x", "y")])
        assert refused.value.code == "queue.full"
        await session.cancel()
        assert desk.executor.room.num_calls == 0


async def test_an_append_answers_with_what_it_added(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        session = await desk.submit([expr("a", {"lit": 1})], outputs=["a"], open=True)
        told = await session.append(
            nodes=[expr("b", var("n"), writes="c")], variables={"n": {}}, inputs={"n": 2}
        )
        assert (told.id, told.outputs) == (session.id, ["a"])
        assert list(told.nodes) == ["b"]
        assert list(told.variables) == ["n", "c"]
        assert told.variables["n"].value == 2
        assert set((await session.status()).nodes) == {"a", "b"}
        closed = await session.append(close=True)
        assert (closed.nodes, closed.variables) == ({}, {})


async def test_nobody_waits_for_ever_for_a_disk_that_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "ANSWERS_WITHIN_S", 0.05)
    async with desk_of(tmp_path) as desk:
        session = await desk.submit([client("a", "x", retries=1)], outputs=["x"], open=True)
        await session.event("client.requested")
        disk = Disk(desk)
        for change in (
            session.put_error("x", "again"),  # runs again: no value comes of it
            session.append(nodes=[expr("e", {"lit": 1})]),
            session.cancel(),
        ):
            with pytest.raises(UnavailableError) as refused:
                await change
            assert refused.value.code == "store.unavailable"
        disk.let_through()
        monkeypatch.undo()
        await session.end()
        assert (await session.cancel()).status == "cancelled"


@pytest.mark.parametrize("breaks", ["body", "resume"])
async def test_a_program_that_cannot_be_taken_up_again_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    async with desk_of(tmp_path) as desk:
        broken = await desk.submit([client("a", "x")], outputs=["x"], inputs={"i": 1})
        await broken.event("client.requested")
        whole = await desk.submit([client("a", "x")], outputs=["x"])
        await whole.event("client.requested")
    if breaks == "body":
        with sqlite3.connect(tmp_path / "journal.sqlite3") as connection:
            connection.execute("UPDATE program SET body = x'7b' WHERE id = ?", (broken.id,))
    resume = Run.resume

    def refuse(run: Run, past: Past) -> None:
        resume(run, past)
        if breaks == "resume" and run.execution.id == broken.id:
            raise RuntimeError("broken")

    monkeypatch.setattr(Run, "resume", refuse)
    async with desk_of(tmp_path) as desk:
        broken = Program(desk, broken.id)
        status = await broken.status()
        assert status.status == "failed"
        assert status.error
        assert status.error.code == "program.unreadable"
        assert status.receipt
        assert (await broken.events())[-1].type == "program.finished"
        if breaks == "resume":
            assert status.variables["i"].value == 1
            assert (await broken.get("x")).status == "failed"
        whole = Program(desk, whole.id)
        await whole.put("x", 2)
        assert (await whole.end()).status == "done"
    async with desk_of(tmp_path) as desk:
        assert await Program(desk, broken.id).status() == status, "it was ended once and for all"


async def test_a_schema_that_nothing_would_check_is_refused(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        declared = {"n": {"schema": {"type": "integer"}}}
        with pytest.raises(ProgramError) as refused:
            await desk.submit([], variables=declared)
        assert (refused.value.code, refused.value.path) == (
            "program.unsupported",
            "program.variables.n.schema",
        )
        session = await desk.submit([], open=True)
        with pytest.raises(ProgramError) as refused:
            await session.append(variables=declared)
        assert refused.value.path == "variables.n.schema"
        await session.cancel()


async def test_memory_keeps_few_and_small_programs_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "RECENT_BYTES", 50_000)
    async with desk_of(tmp_path) as desk:
        programs = []
        for i in range(8):
            nodes = [expr("e", {"lit": "x" * (60_000 if i == 6 else 100)})]
            programs.append(await desk.submit(nodes, outputs=["e"]))
            await programs[-1].end()
        assert list(desk.executor._recent) == [programs[7].id]
        for program in programs:
            assert (await program.status()).status == "done"
