"""Random programs with control flow: right values, only taken branches, no leaked blocks.

However a program ends (done, failed, cancelled, timed out, unread), the engine's own count shows
that its blocks are free. The expected values come from a sequential interpreter
(`control_programs`); the server runs all programs concurrently.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from conure.server.program.status import ProgramStatus
from conure.server.runtime import timers

from ..inprocess import Program, ServerHarness, server_harness
from .control_programs import FailureError, Reading, random_program, shuffled

Json = Any

AT_ONCE = 8
ENDINGS = ("by itself", "by itself", "by itself", "cancelled", "deadline", "unread")


async def submit(
    harness: ServerHarness, nodes: list[Json], things: list[str], **options: Json
) -> Program:
    inputs = {"given": "something", "things": things}
    return await harness.submit(nodes, inputs=inputs, **options)


def check(nodes: list[Json], things: list[str], status: ProgramStatus) -> None:
    """Compare the server's values with those of the sequential interpreter."""
    observed = {
        name: variable.value
        for name, variable in status.variables.items()
        if variable.status == "done"
    }
    killed = {name for name, node in status.nodes.items() if node.status == "killed"}
    reading = Reading(observed, killed)
    failure: FailureError | None = None
    try:
        reading.run(nodes, {"given": "something", "things": things}, "")
    except FailureError as error:
        failure = error
    for name, value in observed.items():
        if name in reading.values:
            assert value == reading.values[name], name
    assert status.status != ("failed" if failure is None else "done"), (failure, status.error)
    if status.status == "done":
        missing = reading.expected() - observed.keys() - reading.open
        for name in missing:
            assert is_only_for_ended(name, reading, status), name
    for node in reading.never & status.nodes.keys():
        assert status.nodes[node].attempt == 0, node


def is_only_for_ended(variable: str, reading: Reading, status: ProgramStatus) -> bool:
    """Whether a variable without a value is in an ended body, or had a reader that ended.

    A reader that is done had all the values it needed: `each` may bind a name again.
    """

    def has_ended(path: tuple[str, ...]) -> bool:
        nodes = (status.nodes[node] for node in path if node in status.nodes)
        return any(node.status in ("skipped", "killed") for node in nodes)

    readers = reading.readers.get(variable, set())
    return has_ended(reading.bodies[variable]) or any(map(has_ended, readers))


async def cancel_after(program: Program, num_turns: int) -> None:
    """Cancel a program after a number of turns of the event loop."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await program.cancel()


def unanswered(nodes: list[Json]) -> list[Json]:
    """Return nodes with a client step that no client answers, so that no machine ends them."""
    return [*nodes, {"id": "unanswered", "op": "client", "name": "ask", "output": "unwritten"}]


async def run_some(harness: ServerHarness, rng: random.Random, num_programs: int) -> set[str]:
    """Run programs concurrently and end them in various ways; return how they ended."""
    plans = []
    cancels: list[asyncio.Task[None]] = []
    for _ in range(num_programs):
        nodes = random_program(rng)
        things = [f"thing {i}" for i in range(rng.choice((0, 1, 2, 3)))]
        ending = rng.choice(ENDINGS)
        options: dict[str, Json] = {}
        if ending == "deadline":
            options["deadline_s"] = rng.uniform(0.001, 0.05)
        elif ending == "unread":
            options["detach"] = False
        submitted = unanswered(nodes) if ending == "cancelled" else nodes
        program = await submit(harness, shuffled(submitted, rng), things, **options)
        plans.append((nodes, things, program))
        if ending == "cancelled":
            cancels.append(asyncio.create_task(cancel_after(program, rng.randint(0, 30))))
    await asyncio.gather(*cancels)
    ended: set[str] = set()
    for nodes, things, program in plans:
        status = await program.end()
        check(nodes, things, status)
        ended.add(status.status)
    assert set(await harness.num_held()) <= {(0, 0)}
    assert harness.executor.services.scheduler.num_waiting == 0
    assert harness.executor.services.call_quota.num_calls == 0
    return ended


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two slow engines": {"num_engines": 2, "time_per_output_token": 0.0001},
    "little memory": {"num_blocks": 96, "context_len": 1024, "max_sequences": 4, "step_tokens": 64},
}


async def run_many(tmp_path: Path, settings: str, num_programs: int) -> None:
    rng = random.Random(settings)
    ended: set[str] = set()
    async with server_harness(tmp_path, **SETTINGS[settings]) as harness:
        for _ in range(num_programs // AT_ONCE):
            ended |= await run_some(harness, rng, AT_ONCE)
    assert {"done", "cancelled"} <= ended  # others end by the clock, and now and then


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "LEASE_S", 0.02)


@pytest.mark.parametrize("settings", SETTINGS)
async def test_all_values_are_right_and_nothing_leaks(tmp_path: Path, settings: str) -> None:
    await run_many(tmp_path, settings, 80)


async def check_history(program: Program) -> None:
    """Check that no committed value is computed again and no decision is taken twice."""
    committed: set[str] = set()
    written: dict[str, set[str]] = {}
    for event in await program.events():
        node = event.data.get("node", "")
        if event.type == "variable.committed":
            name = event.data["variable"]
            assert name not in committed
            committed.add(name)
            written.setdefault(node, set()).add(name)
        elif event.type in ("node.queued", "node.started", "node.restarted"):
            # Calls of these programs write one variable each.
            assert event.data.get("retry") or not written.get(node), node


async def restart_often(tmp_path: Path, rng: random.Random) -> None:
    """Run a few programs through several restarts of the server."""
    plans: list[tuple[list[Json], list[str], str]] = []
    settings: dict[str, Any] = {"time_per_output_token": 0.0002}
    async with server_harness(tmp_path, **settings) as harness:
        for _ in range(4):
            nodes = random_program(rng)
            things = [f"thing {i}" for i in range(rng.choice((1, 2, 3)))]
            plans.append((nodes, things, (await submit(harness, shuffled(nodes, rng), things)).id))
        await asyncio.sleep(rng.uniform(0, 0.05))
    for _ in range(rng.randint(0, 2)):
        async with server_harness(tmp_path, **settings):
            await asyncio.sleep(rng.uniform(0, 0.1))
    async with server_harness(tmp_path, **settings) as harness:
        for nodes, things, program_id in plans:
            program = Program(harness, program_id)
            check(nodes, things, await program.end())
            await check_history(program)
        assert set(await harness.num_held()) <= {(0, 0)}


async def test_programs_survive_crashes_unchanged(tmp_path: Path) -> None:
    rng = random.Random("lives")
    for number in range(6):
        await restart_often(tmp_path / str(number), rng)


@pytest.mark.slow
async def test_many_programs_survive_crashes_unchanged(tmp_path: Path) -> None:
    rng = random.Random("many lives")
    for number in range(60):
        await restart_often(tmp_path / str(number), rng)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("settings", SETTINGS)
async def test_two_thousand_programs_are_right(tmp_path: Path, settings: str) -> None:
    await run_many(tmp_path, settings, 704)
