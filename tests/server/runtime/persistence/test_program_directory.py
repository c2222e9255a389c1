"""Where requests find programs: live, in memory, or in the journal."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from conure.server.program.errors import ConflictError, NotFoundError, UnavailableError
from conure.server.runtime.persistence import event_stream, resumption
from conure.server.runtime.program_run import ProgramRun
from conure.server.runtime.reporting.status import stored_variable

from ...inprocess import (
    DelayedJournalWriter,
    Program,
    ServerHarness,
    client,
    expr,
    generate,
    server_harness,
    var,
)


async def test_a_reader_of_the_journal_is_a_reader_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MAX_KEPT", 2)
    nodes = [client("ask", "x"), *(expr(f"e{i}", var("x")) for i in range(20)), client("b", "y")]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, detach=False)
        await program.event("client.requested", count=2)
        await program.put("x", 1)
        await program.value("e19")
        events = harness.executor.programs._live[program.id].events
        reading = program.read()
        first = await anext(reading)
        assert (first.seq or 0) < events.first_seq, "it is only in the journal"
        assert events.num_readers == 1
        await reading.aclose()
        assert events.num_readers == 0


async def submit_all(harness: ServerHarness) -> list[Program]:
    """Return ended programs with all kinds of variables, and one that has not ended."""
    nodes = [
        expr("e", var("i")),
        expr("off", 1, when={"lit": False}),
        generate("cut", "a", max_tokens=1),
        expr("bad", {"parse_json": ["{"]}, on_error="isolate"),
        expr("reader", var("bad")),
    ]
    done = await harness.submit(nodes, inputs={"i": 1}, outputs=["e", "i"])
    failed = await harness.submit([expr("bad", {"parse_json": ["{"]}), client("a", "x")])
    killing = [client("a", "x"), {"id": "k", "op": "kill", "targets": ["x"], "after": ["e"]}]
    killed = await harness.submit([expr("e", 1), *killing])
    session = await harness.submit([], variables={"free": {}}, open=True)
    await session.append(nodes=[expr("b", var("n"))], variables={"n": {}}, inputs={"n": 2})
    cancelled = await harness.submit([client("a", "x"), expr("e", var("x"))], outputs=["e"])
    await cancelled.cancel()
    await session.append(close=True)
    ended = [done, failed, killed, session, cancelled]
    for program in ended:
        await program.end()
    unreadable = await harness.submit([client("a", "x")], inputs={"i": 1}, outputs=["x", "i"])
    await unreadable.event("client.requested")
    return [*ended, unreadable]


async def test_one_variable_is_read_as_the_whole_program_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        programs = await submit_all(harness)
    monkeypatch.setattr(ProgramRun, "resume", lambda run, _: run.missing)
    shown: set[str] = set()
    async with server_harness(tmp_path) as harness:
        directory, tenant = harness.executor.programs, harness.tenant
        for program in (Program(harness, each.id) for each in programs):
            whole = await directory.load(program.id, tenant)
            status = await program.status()
            assert await harness.executor.find(program.id, tenant=tenant) == status.status
            for name, expected in status.variables.items():
                assert await program.get(name) == stored_variable(whole, name) == expected
                shown.add(expected.status)
            with pytest.raises(NotFoundError, match="has no variable"):
                await program.get("other")
            stranger = Program(ServerHarness(harness.executor, "another"), program.id)
            for reading in (stranger.events(), stranger.get("x")):
                with pytest.raises(NotFoundError, match="there is no program"):
                    await reading
    assert shown == {"done", "failed", "killed", "skipped", "cancelled"}


async def test_a_value_is_read_without_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("e", 1), expr("off", 1, when={"lit": False})])
        await program.end()
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        monkeypatch.setattr(harness.executor.services.journal, "load_program", None)
        assert (await program.get("e")).value == 1
        assert (await program.get("off")).status == "skipped"
        assert (await program.events())[-1].type == "program.finished"


CHOSEN = f"p_{'0b' * 12}"


@pytest.mark.parametrize("is_client_gone", [False, True])
async def test_waiters_of_a_refused_program_get_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_client_gone: bool
) -> None:
    async with server_harness(tmp_path) as harness:
        disk = DelayedJournalWriter(harness)
        submitting = asyncio.create_task(harness.submit([client("a", "x")], id=CHOSEN))
        await asyncio.wait_for(disk.came.wait(), 60)
        program = Program(harness, CHOSEN)
        value = asyncio.create_task(program.get("x"))
        reading = asyncio.create_task(anext(program.read(), None))
        await asyncio.sleep(0)
        if is_client_gone:
            submitting.cancel()
            await asyncio.wait([submitting])
        full = sqlite3.OperationalError("database or disk is full")
        writer = harness.executor.services.journal._writer
        monkeypatch.setattr(writer, "_try_commit", lambda group: full)
        disk.release()
        with pytest.raises(UnavailableError, match="full") as refused:
            await value
        assert refused.value.code == "store.unavailable"
        assert await reading is None, "no event says that the server stops"
        await asyncio.gather(submitting, return_exceptions=True)
        with pytest.raises(NotFoundError):
            await program.get("x")
        monkeypatch.undo()


async def test_a_submission_with_the_id_of_an_ended_program_does_not_hide_it(
    tmp_path: Path,
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("e", 1)], id=CHOSEN)
        await program.end()
    async with server_harness(tmp_path) as harness:
        disk = DelayedJournalWriter(harness)
        with pytest.raises(ConflictError) as taken:
            async with asyncio.timeout(60):
                await harness.submit([expr("other", 1)], id=CHOSEN)
        assert taken.value.code == "program.id_taken"
        assert not disk.batches
        assert (await Program(harness, CHOSEN).get("e")).value == 1


async def test_a_submission_with_the_id_of_a_program_that_is_not_resumed_yet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x")], id=CHOSEN)
        requested = await program.event("client.requested")

    async def never(_: object) -> None:
        """Leave all programs pending."""

    monkeypatch.setattr(resumption, "START_S", 0.0)
    monkeypatch.setattr(resumption.Resumption, "_resume_rest", never)
    async with server_harness(tmp_path) as harness:
        with pytest.raises(ConflictError) as taken:
            await harness.submit([client("b", "y")], id=CHOSEN)
        assert taken.value.code == "program.id_taken"
        program = Program(harness, CHOSEN)
        await program.put("x", 1, requested.data["request_id"])
        assert (await program.end()).status == "done"
