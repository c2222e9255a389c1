"""Random programs of which the journal keeps only the first commits, at every point.

The server dies after a number of batches: later ones are lost, as by a loss of power. The next
server must continue from there to the values of the sequential interpreter.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from conure.server.runtime import turns
from conure.server.store.writer import WriteBatch

from ..inprocess import Program, ServerHarness, server_harness
from .control_programs import random_program, shuffled
from .test_control_flow import Json, check, check_history, submit

SETTINGS: dict[str, Any] = {"time_per_output_token": 0.0002}


class LosingJournal:
    """Writes the first batches of a server's journal, and loses all later ones."""

    def __init__(self, harness: ServerHarness, num_kept: int) -> None:
        self.num_batches = 0
        self.has_lost = asyncio.Event()
        self._num_kept = num_kept
        writer = harness.executor.services.journal._writer
        self._put = writer.put
        setattr(writer, "put", self._write_or_lose)  # noqa: B010 - mypy forbids the plain one

    def _write_or_lose(self, batch: WriteBatch) -> None:
        self.num_batches += 1
        if self.num_batches <= self._num_kept:
            self._put(batch)
        else:
            self.has_lost.set()


async def num_batches(folder: Path, nodes: list[Json], things: list[str]) -> int:
    """Run a program to its end; return the batches that the journal got."""
    async with server_harness(folder, **SETTINGS) as harness:
        journal = LosingJournal(harness, 10**9)
        await (await submit(harness, nodes, things)).end()
        return journal.num_batches


async def crash_after(folder: Path, num_kept: int, nodes: list[Json], things: list[str]) -> str:
    """Submit a program to a server that dies after some batches; return its id."""
    async with server_harness(folder, **SETTINGS) as harness:
        journal = LosingJournal(harness, num_kept)
        program = await submit(harness, nodes, things)
        ended = asyncio.create_task(program.end())
        lost = asyncio.create_task(journal.has_lost.wait())
        await asyncio.wait([ended, lost], return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, lost):
            task.cancel()
        await asyncio.gather(ended, lost, return_exceptions=True)
    return program.id


async def crash_everywhere(
    tmp_path: Path, rng: random.Random, *, num_programs: int, num_points: int
) -> None:
    for number in range(num_programs):
        nodes = random_program(rng)
        things = [f"thing {i}" for i in range(rng.choice((1, 2, 3)))]
        mixed = shuffled(nodes, rng)
        last = await num_batches(tmp_path / f"{number}", mixed, things)
        points = rng.sample(range(1, last), min(num_points, last - 1))
        for point in points:
            folder = tmp_path / f"{number}-{point}"
            program_id = await crash_after(folder, point, mixed, things)
            async with server_harness(folder, **SETTINGS) as harness:
                program = Program(harness, program_id)
                check(nodes, things, await program.end())
                await check_history(program)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a crash come between the turns of one transition, too."""
    monkeypatch.setattr(turns, "STEPS_PER_TURN", 300)


async def test_programs_continue_from_any_commit(tmp_path: Path) -> None:
    await crash_everywhere(tmp_path, random.Random("points"), num_programs=2, num_points=5)


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_many_programs_continue_from_any_commit(tmp_path: Path) -> None:
    await crash_everywhere(tmp_path, random.Random("all points"), num_programs=20, num_points=20)
