"""What the calls of a program share, across rounds and before a prompt is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ..inprocess import WAIT_S, Desk, answer, client, desk_of, read, say, var

LONG = "Once upon a time there was a harbour, and the clocks were striking. " * 8
BLOCK = 16


async def test_a_round_finds_what_the_round_before_it_has_filled(tmp_path: Path) -> None:
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
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([loop], outputs=["history"], trace=True)
        status = await program.end()
        assert status.status == "done", status.error
        lengths = [len(status.nodes[f"say.{i}"].trace[0].prompt_ids) for i in range(4)]  # type: ignore[index]
        shared = [status.nodes[f"say.{i}"].prompt_tokens.shared for i in range(4)]  # type: ignore[union-attr]
        assert shared[0] == 0
        for before, found in zip(lengths, shared[1:], strict=False):
            assert found >= before, "the history was filled again"
        assert await desk.num_held() == [(0, 0)]
        [engine] = await desk.executor.engines()
        assert engine.report.num_cached * BLOCK <= lengths[0], "values are no cache"


SLOW: dict[str, Any] = {"min_tokens": 60, "ignore_eos": True, "max_tokens": 200}


async def wait_until_filled(desk: Desk, num_tokens: int) -> None:
    """Until the engine has computed so many tokens of prompts."""
    async with asyncio.timeout(WAIT_S):
        while True:
            [engine] = await desk.executor.engines()
            if engine.report.num_computed_tokens >= num_tokens:
                return


async def test_a_prompt_is_filled_up_to_the_text_that_is_still_being_written(
    tmp_path: Path,
) -> None:
    nodes = [
        say("first", LONG, **SLOW),
        say("second", "Refine this: ", LONG, read("first"), " and this: ", LONG),
    ]
    async with desk_of(tmp_path, time_per_output_token=0.005) as desk:
        program = await desk.submit(nodes, outputs=["second"], trace=True)
        await wait_until_filled(desk, 2 * len(LONG))
        assert (await program.status()).nodes["second"].status == "waiting"
        status = await program.end()
        assert status.status == "done", status.error
        traces = status.nodes["second"].trace
        assert traces
        [trace] = traces
        text = bytes(trace.output_ids).decode()
        assert text == answer(
            "Refine this: " + LONG + await program.value("first") + " and this: " + LONG
        )
        found = status.nodes["second"].prompt_tokens
        assert found
        # This call alone has filled it: sooner is not shared.
        assert found.computed + found.shared == len(trace.prompt_ids)
        assert found.shared < BLOCK


@pytest.mark.parametrize("ends", ["cancelled", "skipped"])
async def test_what_is_filled_early_goes_with_a_call_that_never_comes(
    tmp_path: Path, ends: str
) -> None:
    nodes = [
        say("first", "Tell me. ", **SLOW),
        say("second", LONG, read("first"), on_error="isolate"),
        {"id": "stop", "op": "kill", "targets": ["second"], "after": ["go"]},
        client("go", "gone"),
    ]
    async with desk_of(tmp_path, time_per_output_token=0.005) as desk:
        program = await desk.submit(nodes, outputs=["first"])
        await wait_until_filled(desk, len(LONG) - BLOCK)
        if ends == "cancelled":
            await program.cancel()
        else:
            await program.put("gone", True)
        status = await program.end()
        assert status.nodes["second"].status in ("killed", "cancelled")
        assert await desk.num_held() == [(0, 0)]
        [engine] = await desk.executor.engines()
        assert status.receipt
        tokens = status.receipt.prompt_tokens
        assert tokens.computed + tokens.discarded == engine.report.num_computed_tokens


async def test_what_is_filled_early_for_a_call_that_is_gone_by_then_counts_as_discarded(
    tmp_path: Path,
) -> None:
    nodes = [
        say("first", "Tell me. ", **SLOW),
        say("second", LONG * 4, read("first"), on_error="isolate"),
        {"id": "stop", "op": "kill", "targets": ["second"], "after": ["go"]},
        client("go", "gone"),
    ]
    async with desk_of(tmp_path, time_per_output_token=0.005, time_per_prompt_token=0.0002) as desk:
        program = await desk.submit(nodes, outputs=["first"])
        [info] = await desk.executor.engines()
        engine = desk.executor.engine(info.id)
        assert engine
        async with asyncio.timeout(WAIT_S):
            while engine.num_contexts(program.id) < 2:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)
        await program.put("gone", True)
        status = await program.end()
        assert status.nodes["second"].status == "killed"
        assert status.receipt
        tokens = status.receipt.prompt_tokens
        assert tokens.recomputed == 0
        assert tokens.discarded > len(LONG)
        [info] = await desk.executor.engines()
        assert tokens.computed + tokens.discarded == info.report.num_computed_tokens


@pytest.mark.parametrize("is_plain", [True, False])
async def test_nothing_is_filled_behind_a_text_that_still_grows(
    tmp_path: Path, is_plain: bool
) -> None:
    inserted: list[Any] = [read("first"), LONG]
    if not is_plain:
        inserted = [{"input": {"concat": [var("first"), {"lit": LONG}]}}]
    nodes = [
        say("first", "Tell me. ", min_tokens=1000, ignore_eos=True, max_tokens=1000),
        *(say(f"reader{i}", LONG, *inserted, f" Reader {i}. ") for i in range(3)),
    ]
    async with desk_of(tmp_path, time_per_output_token=0.001) as desk:
        program = await desk.submit(nodes, outputs=["reader0", "reader1", "reader2"])
        status = await program.end()
        assert status.status == "done", status.error
        assert status.receipt
        assert status.receipt.prompt_tokens.recomputed < BLOCK


async def test_prompts_that_begin_at_once_leave_most_of_the_engine_free(tmp_path: Path) -> None:
    nodes = [
        say("first", "Tell me. ", **SLOW),
        *(say(f"reader{i}", f"{i} ", LONG * 2, read("first")) for i in range(20)),
    ]
    num_blocks = 400
    async with desk_of(tmp_path, num_blocks=num_blocks, time_per_output_token=0.005) as desk:
        program = await desk.submit(nodes, outputs=[f"reader{i}" for i in range(20)])
        await wait_until_filled(desk, 2 * len(LONG))
        [engine] = await desk.executor.engines()
        assert engine.report.num_held < num_blocks / 2
        status = await program.end()
        assert status.status == "done", status.error
        assert status.receipt
        assert status.receipt.prompt_tokens.recomputed < len(LONG), "filled, evicted, filled again"


async def test_prompts_of_programs_that_begin_at_once_leave_most_of_the_engine_free(
    tmp_path: Path,
) -> None:
    """No engine has said yet what the other program has begun."""
    num_blocks = 400
    async with desk_of(tmp_path, num_blocks=num_blocks, time_per_output_token=0.005) as desk:
        programs = []
        for name in "abcde":
            readers = [f"reader{i}" for i in range(4)]
            nodes = [
                say("first", f"{name}: tell me. ", **SLOW),
                *(say(reader, f"{name} {reader} ", LONG * 2, read("first")) for reader in readers),
            ]
            programs.append(await desk.submit(nodes, outputs=readers))
        await wait_until_filled(desk, 2 * len(LONG))
        [engine] = await desk.executor.engines()
        assert engine.report.num_held < num_blocks / 2
        for program in programs:
            assert (await program.end()).status == "done"
