"""A missed deadline of an output is in the status, the events, the receipt and the metrics."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from conure.server.program.ir import Deadline

from ..inprocess import Program, ServerHarness, client, expr, server_harness, var

SOON_S, LATER_S = 0.01, 3_600.0


async def submit(harness: ServerHarness) -> Program:
    """Submit two client steps. The first has a deadline that passes."""
    return await harness.submit(
        [client("a", "late"), client("b", "early")],
        outputs=["late", "early"],
        objectives={"late": {"deadline_s": SOON_S}, "early": {"deadline_s": LATER_S}},
    )


async def deadlines(harness: ServerHarness) -> dict[str, float]:
    """Return the metric of deadlines by result."""
    lines = (await harness.executor.metrics()).decode().splitlines()
    counts = (line for line in lines if line.startswith("conure_deadlines_total{"))
    return {line.split('"')[1]: float(line.split()[-1]) for line in counts}


async def test_missed_deadline_is_reported_everywhere(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await submit(harness)
        missed = await program.event("objective.missed")
        assert (missed.data["variable"], missed.data["deadline_s"]) == ("late", SOON_S)
        running = await program.status()
        assert running.variables["late"].deadline_missed
        assert not running.variables["early"].deadline_missed
        await program.put("late", 1)
        await program.put("early", 2)
        status = await program.end()
        assert status.status == "done", "a deadline of an output does not end the program"
        assert status.variables["late"].deadline_missed
        assert msgspec.to_builtins(status.receipt)["deadlines_missed"] == ["late"]
        events = [event.type for event in await program.events()]
        assert events.count("objective.missed") == 1
        assert await deadlines(harness) == {"missed": 1.0, "met": 1.0}
    async with server_harness(tmp_path) as harness:  # from the journal
        stored = await harness.executor.status(program.id, tenant=harness.tenant)
    assert stored.variables["late"].deadline_missed
    assert not stored.variables["early"].deadline_missed


async def test_missed_deadline_is_reported_once_across_a_restart(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await submit(harness)
        await program.event("objective.missed")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        assert (await program.status()).variables["late"].deadline_missed
        await program.put("late", 1)
        await program.put("early", 2)
        await program.end()
        events = [event.type for event in await program.events()]
    assert events.count("objective.missed") == 1


async def test_deadline_of_a_later_reader_counts(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x")], outputs=["x"])
        await harness.executor.get(
            program.id, "x", tenant=harness.tenant, wait_s=0, objective=Deadline(SOON_S)
        )
        assert (await program.event("objective.missed")).data["variable"] == "x"
        await program.cancel()
        status = await program.status()
    assert status.status == "cancelled"
    assert status.variables["x"].deadline_missed


async def test_deadline_of_appended_nodes_counts(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], open=True)
        await program.append(
            nodes=[client("a", "x")], outputs=["x"], objectives={"x": {"deadline_s": SOON_S}}
        )
        assert (await program.event("objective.missed")).data["variable"] == "x"
        await program.cancel()


@pytest.mark.parametrize("age_s", [LATER_S, 8 * 86_400.0, -60.0])
async def test_deadline_of_an_append_counts_from_the_append(tmp_path: Path, age_s: float) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], open=True)
        run = harness.executor.programs.find_live(program.id, harness.tenant)
        assert run is not None
        run.state.created_at -= age_s
        await program.append(
            nodes=[client("a", "x"), client("b", "y"), client("c", "z")],
            outputs=["x", "y", "z"],
            objectives={"x": {"deadline_s": 60}, "y": {"deadline_s": 604_800}, "z": "latency"},
        )
        deadlines_s = run.state.graph.deadlines
        assert 60 <= deadlines_s["x"] - age_s < 120
    async with server_harness(tmp_path) as harness:
        run = harness.executor.programs.find_live(program.id, harness.tenant)
        assert run is not None
        assert run.state.graph.deadlines == deadlines_s
        program = Program(harness, program.id)
        assert not (await program.status()).variables["y"].deadline_missed
        await program.cancel()


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_value_that_never_exists_misses_no_deadline(tmp_path: Path, end: str) -> None:
    async with server_harness(tmp_path) as harness:
        failing = [expr("e", {"parse_json": var("x")}, "out")]
        program = await harness.submit(
            [client("a", "x"), *failing],
            outputs=["out"],
            objectives={"out": {"deadline_s": LATER_S}},
        )
        if end == "failed":
            await program.put("x", "{")
        else:
            await program.cancel()
        status = await program.end()
        assert status.status == end
        assert not status.variables["out"].deadline_missed
        assert await deadlines(harness) == {"open": 1.0}
