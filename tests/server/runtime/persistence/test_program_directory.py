"""Where requests find programs: live, in memory, or in the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.server.program.errors import NotFoundError
from conure.server.runtime.persistence import event_stream
from conure.server.runtime.program_run import ProgramRun
from conure.server.runtime.reporting.status import stored_variable

from ...inprocess import Program, ServerHarness, client, expr, generate, server_harness, var


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
