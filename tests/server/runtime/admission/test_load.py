"""The bounds on accepted work."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.runtime.admission.load import Load, LoadLimits, LoadMonitor, Newcomer
from conure.server.runtime.program_run import ProgramRun

from ...inprocess import client, generate, server_harness


def observed(seconds: float, limits: LoadLimits) -> LoadMonitor:
    load = LoadMonitor(limits, now=lambda: 0.0, noise=random.Random(0))
    for _ in range(100):
        load.observe_call(seconds)
    return load


def check(
    monitor: LoadMonitor, newcomer: Newcomer, num_calls: int, *, num_ahead: int | None = None
) -> None:
    ahead = num_calls if num_ahead is None else num_ahead
    monitor.check(newcomer, Load(9, num_calls, 16), lambda: ahead)


BATCH = Newcomer(num_calls=4, depth=4, is_background=True)


def test_wait_is_the_work_beyond_what_runs_at_once() -> None:
    load = observed(2.0, LoadLimits(10, 5.0))
    assert load.wait_s(16, 16) == 0
    assert load.wait_s(48, 16) == pytest.approx(4.0)
    assert load.wait_s(48, 0) == 0, "without engines nothing is known"


def test_first_calls_are_not_limited() -> None:
    load = LoadMonitor(LoadLimits(10, 5.0))
    load.observe_call(1_000)
    check(load, BATCH, 10_000)


def test_refusal_names_wait_limit_and_time_to_retry() -> None:
    load = observed(2.0, LoadLimits(10, 5.0))
    check(load, BATCH, 56)
    with pytest.raises(
        UnavailableError, match=r"about 9\.0 s, the limit for this one is 5\.0 s"
    ) as caught:
        check(load, BATCH, 88)
    assert (caught.value.code, caught.value.status) == ("queue.full", 429)
    assert caught.value.retry_after_s == 4
    with pytest.raises(UnavailableError, match="10 programs are open, the limit is 10"):
        load.check(BATCH, Load(10, 0, 16), lambda: 0)


def test_program_with_a_reader_waits_for_half_of_its_duration_at_most() -> None:
    load = observed(2.0, LoadLimits(10, 600.0))
    four = Newcomer(num_calls=4, depth=4)
    check(load, four, 16 + 31)
    with pytest.raises(UnavailableError, match=r"the limit for this one is 4\.0 s"):
        check(load, four, 16 + 33)
    check(load, BATCH, 16 + 33)


def test_short_request_may_wait_two_seconds() -> None:
    load = observed(0.1, LoadLimits(10, 600.0))
    one = Newcomer(num_calls=1, depth=1)
    check(load, one, 16 + 319)
    with pytest.raises(UnavailableError, match=r"the limit for this one is 2\.0 s"):
        check(load, one, 16 + 321)


def test_no_program_may_wait_longer_than_the_flag_says() -> None:
    load = observed(2.0, LoadLimits(10, 1.0))
    for newcomer in (BATCH, Newcomer(num_calls=4, depth=4)):
        with pytest.raises(UnavailableError, match=r"the limit for this one is 1\.0 s"):
            check(load, newcomer, 16 + 9)


def test_calls_that_rank_after_the_program_do_not_count() -> None:
    load = observed(2.0, LoadLimits(10, 600.0))
    check(load, Newcomer(num_calls=1, depth=1), 10_000, num_ahead=20)


def test_without_limit_every_program_is_accepted() -> None:
    for newcomer in (BATCH, Newcomer(num_calls=1, depth=1)):
        check(observed(2.0, LoadLimits(10, None)), newcomer, 10**6)


def test_refused_programs_are_asked_back_over_the_time_that_their_work_takes() -> None:
    now_s = 0.0
    load = LoadMonitor(LoadLimits(1_000, 0.5), now=lambda: now_s, noise=random.Random(0))
    for _ in range(100):
        load.observe_call(1.0)

    def refused(num_programs: int) -> list[float]:
        asked: list[float] = []
        for _ in range(num_programs):
            with pytest.raises(UnavailableError) as caught:
                check(load, BATCH, 16 + 32)
            asked.append(caught.value.retry_after_s or 0.0)
        return asked

    asked = refused(80)  # 80 programs of 4 calls, 16 at once: 20 s of work
    assert min(asked) == 2
    assert 15 < max(asked) <= 22
    now_s = 100.0
    assert refused(1) == [2], "refusals are forgotten in the time that their work takes"
    assert max(refused(1_000)) <= 60


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
        await asyncio.wait_for(ended.wait(), 60)
        status = await session.status()
        assert status.status == "cancelled"
        assert status.error
        assert status.error.code == "program.idle"
        assert (await working.end()).status == "done"
