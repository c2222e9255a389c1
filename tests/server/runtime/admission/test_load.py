"""The bounds on accepted work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.runtime.admission.load import LoadLimits, LoadMonitor
from conure.server.runtime.program_run import ProgramRun

from ...inprocess import client, generate, server_harness


def observed(seconds: float, limits: LoadLimits) -> LoadMonitor:
    load = LoadMonitor(limits)
    for _ in range(100):
        load.observe_call(seconds)
    return load


def test_wait_is_the_work_beyond_what_runs_at_once() -> None:
    load = observed(2.0, LoadLimits(10, 5.0))
    assert load.wait_s(16, 16) == 0
    assert load.wait_s(48, 16) == pytest.approx(4.0)
    assert load.wait_s(48, 0) == 0, "without engines nothing is known"


def test_first_calls_are_not_limited() -> None:
    load = LoadMonitor(LoadLimits(10, 5.0))
    load.observe_call(1_000)
    load.check(num_programs=0, num_calls=10_000, num_sequences=1)


def test_refusal_names_wait_limit_and_time_to_retry() -> None:
    load = observed(2.0, LoadLimits(10, 5.0))
    load.check(num_programs=9, num_calls=56, num_sequences=16)
    with pytest.raises(UnavailableError, match=r"about 9\.0 s, the limit is 5 s") as caught:
        load.check(num_programs=9, num_calls=88, num_sequences=16)
    assert (caught.value.code, caught.value.status) == ("queue.full", 429)
    assert caught.value.retry_after_s == 4
    with pytest.raises(UnavailableError, match="10 programs are open, the limit is 10"):
        load.check(num_programs=10, num_calls=0, num_sequences=16)


def test_wait_without_limit_is_accepted() -> None:
    observed(2.0, LoadLimits(10, None)).check(num_programs=0, num_calls=10**6, num_sequences=1)


async def test_programs_without_calls_are_bounded(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_programs=3) as harness:
        programs = [await harness.submit([client("a", "x")], outputs=["x"]) for _ in range(3)]
        with pytest.raises(UnavailableError, match="3 programs are open"):
            await harness.submit([client("a", "x")], outputs=["x"])
        await programs[0].cancel()
        await harness.submit([client("a", "x")], outputs=["x"])


async def test_idle_session_is_ended_and_a_working_one_is_not(tmp_path: Path) -> None:
    async with server_harness(tmp_path, idle_s=0.05, time_per_output_token=0.02) as harness:
        ended = asyncio.Event()
        directory = harness.executor.programs
        end = directory.end

        def note_end(run: ProgramRun) -> bool:
            if run.state.id == session.id:
                ended.set()
            return end(run)

        setattr(directory, "end", note_end)  # noqa: B010 - mypy forbids the plain one
        session = await harness.submit([], open=True)
        working = await harness.submit([generate("x", "hi", ignore_eos=True, max_tokens=20)])
        await asyncio.wait_for(ended.wait(), 30)
        status = await session.status()
        assert status.status == "cancelled"
        assert status.error
        assert status.error.code == "program.idle"
        assert (await working.end()).status == "done"
