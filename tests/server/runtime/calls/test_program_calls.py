"""Prefix sharing between the calls of a program."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ...inprocess import TENANT, generate, server_harness, var

LONG = "Once upon a time there was a harbour, and the clocks were striking. " * 8
BLOCK = 16


async def test_rounds_share_the_history_prefix(tmp_path: Path) -> None:
    chat = {
        "id": "say",
        "op": "generate",
        "messages": [{"splice": "history"}],
        "output": {"variable": "answer", "as": "message", "max_tokens": 64},
    }
    question = {"role": "user", "content": LONG}
    loop = {
        "id": "talk",
        "op": "loop",
        "count": 4,
        "carry": {
            "history": [
                {"lit": [question]},
                {"concat": [var("history"), [var("answer")], {"lit": [question]}]},
            ]
        },
        "body": [chat],
        "max_iter": 4,
    }
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([loop], outputs=["history"], trace=True)
        status = await program.end()
        assert status.status == "done", status.error
        lengths = [len(trace.prompt_ids) for trace in await program.traced_calls()]
        shared = [status.nodes[f"say.{i}"].prompt_tokens.shared for i in range(4)]  # type: ignore[union-attr]
        assert shared[0] == 0
        for before, found in zip(lengths, shared[1:], strict=False):
            assert found >= before, "the history was filled again"
        assert await harness.num_held() == [(0, 0)]


async def test_later_program_reads_a_value_that_calls_of_an_earlier_one_shared(
    tmp_path: Path,
) -> None:
    async with server_harness(tmp_path) as harness:
        computed = []
        for _ in range(2):
            calls = [generate(name, {"input": "report"}, f" {name}?") for name in ("x", "y")]
            program = await harness.submit(calls, outputs=["x", "y"], inputs={"report": LONG})
            status = await program.end()
            assert status.receipt
            computed.append(status.receipt.prompt_tokens.computed)
        assert computed[1] < 2 * BLOCK < computed[0]


async def test_readers_are_expected_of_text_of_the_program_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: dict[int, tuple[int, int]] = {}
    async with server_harness(tmp_path) as harness:
        engine = harness.executor.services.engine("engine-0")
        assert engine is not None
        free = engine.free

        def observed(context: int, num_cached: int = 0, num_expected: int = 0) -> None:
            freed[context] = (num_cached, num_expected)
            free(context, num_cached, num_expected)

        monkeypatch.setattr(engine, "free", observed)
        calls = [generate(name, LONG, {"input": "report"}, f" {name}?") for name in ("x", "y")]
        program = await harness.submit(calls, outputs=["x", "y"], inputs={"report": LONG})
        await program.end()
    num_text = len(LONG.encode())
    assert freed
    for num_cached, num_expected in freed.values():
        assert num_text - BLOCK < num_expected <= num_text < num_cached


async def test_time_in_the_queue_includes_the_time_before_a_new_rank(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        harness.executor.services.scheduler.pause()
        later = {"x": "throughput"}
        waiting = await harness.submit([generate("x", "B")], outputs=["x"], objectives=later)
        await asyncio.sleep(0.2)
        run = harness.executor.programs.find_live(waiting.id, TENANT)
        assert run is not None
        run.demand("x", "latency")
        assert run.state.nodes["x"].phase == "queued"
        assert run.state.nodes["x"].usage.queued_s >= 0.2
