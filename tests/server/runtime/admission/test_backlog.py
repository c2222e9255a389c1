"""Which open calls a new program waits for."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.runtime.admission.backlog import COUNT_AGE_S, Backlog
from conure.server.runtime.admission.load import MIN_CALLS, Newcomer
from conure.server.scheduling.policy import Rank, policy_named
from conure.server.scheduling.request import PriorityInputs

from ...inprocess import Json, ServerHarness, generate, insert, server_harness

ONE = Newcomer(num_calls=1, depth=1)
SLOW: dict[str, Any] = {"max_wait_s": 600.0, "time_per_output_token": 0.05, "max_sequences": 2}


def side_by_side(num_calls: int) -> list[Json]:
    return [generate(f"g{i}", "x", ignore_eos=True) for i in range(num_calls)]


def chain(num_calls: int) -> list[Json]:
    return [
        generate(f"g{i}", *([insert(f"g{i - 1}")] if i else ["x"]), ignore_eos=True)
        for i in range(num_calls)
    ]


def make_busy(harness: ServerHarness, call_s: float) -> None:
    """Let the server know how long calls take."""
    for _ in range(MIN_CALLS):
        harness.executor.services.load.observe_call(call_s)


def num_ahead(harness: ServerHarness, newcomer: Newcomer, *, policy: str = "conure") -> int:
    services = harness.executor.services
    backlog = Backlog(services.call_quota, policy_named(policy))
    return backlog.num_ahead(newcomer, call_s=3.0, now_s=services.clock.now())


async def test_short_program_does_not_wait_for_a_wide_one(tmp_path: Path) -> None:
    async with server_harness(tmp_path, **SLOW) as harness:
        await harness.submit(side_by_side(40), outputs=["g0"])
        assert num_ahead(harness, ONE) == 0
        assert num_ahead(harness, Newcomer(num_calls=40, depth=1)) == 40
        assert num_ahead(harness, ONE, policy="fcfs") == 40


async def test_program_with_a_reader_does_not_wait_for_background_programs(tmp_path: Path) -> None:
    async with server_harness(tmp_path, **SLOW) as harness:
        await harness.submit(chain(3), outputs=["g2"], objectives={"g2": "throughput"})
        assert num_ahead(harness, Newcomer(num_calls=8, depth=8)) == 0
        assert num_ahead(harness, Newcomer(num_calls=8, depth=8, is_background=True)) == 3


async def test_a_number_of_calls_is_used_until_another_program_is_added(tmp_path: Path) -> None:
    async with server_harness(tmp_path, **SLOW) as harness:
        services = harness.executor.services
        ranked: list[float] = []
        policy = policy_named("conure")

        class Counting:
            def rank(self, inputs: PriorityInputs) -> Rank:
                ranked.append(inputs.remaining_work_s)
                return policy.rank(inputs)

        backlog = Backlog(services.call_quota, Counting())  # type: ignore[arg-type]  # ranks only

        def count(now_s: float) -> int:
            ranked.clear()
            return backlog.num_ahead(ONE, call_s=3.0, now_s=now_s)

        now_s = services.clock.now()
        await harness.submit(chain(3), outputs=["g2"])
        num_calls = count(now_s)
        assert ranked
        assert count(now_s + COUNT_AGE_S / 2) == num_calls
        assert not ranked
        await harness.submit(chain(2), outputs=["g1"])
        count(now_s + COUNT_AGE_S / 2)
        assert len(ranked) == 3  # the newcomer and two programs
        count(now_s + 2 * COUNT_AGE_S)
        assert ranked


async def test_busy_server_accepts_by_length_and_objective(tmp_path: Path) -> None:
    async with server_harness(tmp_path, **SLOW) as harness:
        make_busy(harness, 3.0)
        for _ in range(2):  # 6 calls of 3 s, two at once: a wait of 6 s
            await harness.submit(chain(3), outputs=["g2"])
        with pytest.raises(UnavailableError, match=r"the limit for this one is 4\.5 s") as caught:
            await harness.submit(chain(3), outputs=["g2"])
        assert caught.value.code == "queue.full"
        await harness.submit(chain(8), outputs=["g7"])
        await harness.submit(chain(3), outputs=["g2"], objectives={"g2": "throughput"})


async def test_idle_server_accepts_a_program_of_ten_thousand_calls(tmp_path: Path) -> None:
    async with server_harness(tmp_path, **SLOW) as harness:
        make_busy(harness, 3.0)
        program = await harness.submit(side_by_side(10_000), outputs=["g0"])
        # It ranks after a short program for two minutes.
        await asyncio.wait_for(harness.submit(chain(1), outputs=["g0"]), 60)
        # On a busy machine, the end of 10,000 calls is not durable within 5 s.
        with contextlib.suppress(UnavailableError):
            await program.cancel()
        assert (await program.end()).status == "cancelled"


async def test_accepted_session_grows_while_the_server_is_busy(tmp_path: Path) -> None:
    async with server_harness(tmp_path, **SLOW) as harness:
        make_busy(harness, 3.0)
        session = await harness.submit([], open=True)
        for _ in range(2):
            await harness.submit(chain(3), outputs=["g2"])
        with pytest.raises(UnavailableError):
            await harness.submit(chain(3), outputs=["g2"])
        await session.append(nodes=chain(3))
