"""The watch over programs that were running when the server died."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from conure.server.program.errors import ConureError
from conure.server.runtime import program_watch
from conure.server.runtime.node_context import NodeContext
from conure.server.runtime.node_state import Ready
from conure.server.runtime.program_watch import (
    MAX_DEATHS,
    QUARANTINED,
    ProgramWatch,
    TurnLimitError,
    judge,
)
from conure.server.store.journal import StoredProgram, WatchRecord
from conure.server.store.turn_mark import TurnMark

from ..inprocess import Program, client, expr, generate, server_harness, var
from ..store.journal_records import value


def stored(num_values: int, watch: WatchRecord | None = None) -> StoredProgram:
    return StoredProgram(
        id="p",
        tenant="a",
        idempotency_key=None,
        body_hash=b"",
        body=b"{}",
        created_at=1.0,
        appends=[],
        values=[value("p", f"v{number}", b"1") for number in range(num_values)],
        events=[],
        end=None,
        watch=watch,
    )


def test_deaths_without_progress_quarantine_a_program() -> None:
    watch = None
    for number in range(1, MAX_DEATHS + 1):
        watch = judge(stored(2, watch), was_at_death=True)
        assert watch is not None
        assert watch.num_deaths == number
    assert watch is not None
    assert watch.problem == QUARANTINED


def test_progress_starts_the_count_again() -> None:
    watch = judge(stored(2, judge(stored(1), was_at_death=True)), was_at_death=True)
    assert watch is not None
    assert (watch.num_deaths, watch.num_values, watch.problem) == (1, 2, None)


def test_program_outside_its_turn_is_not_suspected() -> None:
    assert judge(stored(1), was_at_death=False) is None


def test_turn_is_marked_until_its_outermost_end(tmp_path: Path) -> None:
    watch = ProgramWatch()
    watch.mark = TurnMark(tmp_path)
    watch.begin("p")
    watch.begin("p")
    watch.end()
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "turn", tmp_path / "copy" / "turn")
    watch.end()
    assert TurnMark(tmp_path / "copy").previous == "p"
    assert TurnMark(tmp_path).previous is None


def test_watched_turn_has_a_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_watch, "MAX_TURN_CPU_S", 0.05)
    watch = ProgramWatch()
    watch.watched.add("p")
    watch.begin("p")
    with pytest.raises(TurnLimitError, match="processor time"):
        while True:
            pass
    watch.end()
    watch.begin("other")
    watch.end()


def test_watched_turn_has_a_limit_of_memory() -> None:
    watch = ProgramWatch()
    watch.watched.add("p")
    watch.begin("p")
    try:
        with pytest.raises(MemoryError):
            bytearray(2 * program_watch.MAX_TURN_BYTES)
    finally:
        watch.end()
    assert len(bytearray(2 * program_watch.MAX_TURN_BYTES)) > 0


async def test_program_that_froze_the_server_does_not_freeze_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_watch, "MAX_TURN_CPU_S", 0.2)
    dispatch = NodeContext._dispatch
    async with server_harness(tmp_path / "data") as harness:
        guilty = await harness.submit([client("a", "x"), expr("poison", var("x"))], outputs=["x"])
        await guilty.event("client.requested")
        innocent = await harness.submit([client("b", "y"), generate("g", "G")], outputs=["y", "g"])
        requested = await innocent.event("client.requested")
        await innocent.value("g")
        # What a killed server leaves, in the middle of the guilty program's turn.
        mark = harness.executor.services.journal.turn_mark
        mark.set(guilty.id)
        shutil.copytree(
            tmp_path / "data", tmp_path / "image", ignore=shutil.ignore_patterns("lock")
        )
        mark.clear()

    def freeze(context: NodeContext, ready: Ready) -> None:
        if ready.node == "poison":
            while True:
                pass
        dispatch(context, ready)

    monkeypatch.setattr(NodeContext, "_dispatch", freeze)
    async with server_harness(tmp_path / "image") as harness:
        guilty, innocent = Program(harness, guilty.id), Program(harness, innocent.id)
        assert harness.executor.services.watch.watched == {guilty.id}
        await guilty.put("x", 1)
        status = await guilty.status()
        assert status.status == "failed"
        assert status.error
        assert status.error.code == QUARANTINED
        await innocent.put("y", 2, requested.data["request_id"])
        assert (await innocent.end()).status == "done"


async def test_damaged_program_is_ended_with_its_code(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("e", 1), client("a", "x")], outputs=["e", "x"])
        await program.event("client.requested")
        journal = harness.executor.services.journal
        problem = "program.damaged"
        record = WatchRecord(program=program.id, num_deaths=0, num_values=0, problem=problem)
        await journal.append([record])
    async with server_harness(tmp_path) as harness:
        status = await Program(harness, program.id).status()
        assert status.status == "failed"
        assert status.error
        assert status.error.code == "program.damaged"
        assert status.variables["e"].value == 1
        assert {name: node.status for name, node in status.nodes.items()} == {
            "e": "done",
            "a": "failed",
        }


async def test_pending_program_is_resumed_when_it_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        programs = [await harness.submit([client("a", "x")], outputs=["x"]) for _ in range(3)]
        requested = [await program.event("client.requested") for program in programs]
    monkeypatch.setattr("conure.server.runtime.persistence.resumption.START_S", 0.0)

    async def never(_: Any) -> None:
        """Leave all programs pending."""

    monkeypatch.setattr(
        "conure.server.runtime.persistence.resumption.Resumption._resume_rest", never
    )
    async with server_harness(tmp_path) as harness:
        directory = harness.executor.programs
        assert len(directory.pending) == len(directory) == 3
        with pytest.raises(ConureError):
            await harness.executor.status(programs[1].id, tenant="another")
        last = Program(harness, programs[2].id)
        await last.put("x", 5, requested[2].data["request_id"])
        assert (await last.end()).status == "done"
        assert list(directory.pending) == [programs[0].id, programs[1].id]
