"""The six workloads as whole programs and request by request: same prompts, same tokens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.server.inprocess import ServerHarness, server_harness

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from apps.programs import AppPlan, chain, coding, map_reduce, single

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKLOADS: dict[str, list[AppPlan]] = {
    "chain summary": [chain(4, 96, 12)],
    "map-reduce summary": [map_reduce(5, 96, 12)],
    "shared system prompt": [single("copilot", 200, 20, 12, user) for user in range(5)],
    "four GPTs applications": [
        single(name, 60 + 40 * number, 8, 8, user)
        for user in range(2)
        for number, name in enumerate(("productivity", "image", "code", "data"))
    ],
    "multi-agent coding": [coding(3, 1, scale=40)],
    "mixed chat and map-reduce": [
        *(single("", 0, 40 + user, 16, user) for user in range(3)),
        map_reduce(4, 64, 12),
    ],
}

Ids = dict[str, tuple[list[int], list[int]]]
"""Prompt ids and output ids of every call."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerHarness]:
    data = tmp_path_factory.mktemp("apps")
    async with server_harness(data, engine="local", dtype="float32", threads=1) as harness:
        yield harness


async def send_whole(harness: ServerHarness, program: dict[str, Any]) -> Ids:
    running = await harness.submit(program["nodes"], outputs=program["outputs"], trace=True)
    status = await running.end()
    assert status.status == "done", status.error
    traces = await running.traced_calls()
    return {trace.variable: (trace.prompt_ids, trace.output_ids) for trace in traces}


async def send_calls(harness: ServerHarness, program: dict[str, Any]) -> Ids:
    """Run each call as a separate program, as a client that sends texts does."""
    found: Ids = {}
    texts: dict[str, asyncio.Task[str]] = {}

    async def send(node: dict[str, Any]) -> str:
        for other in node.get("after", ()):
            await texts[other]
        *segments, output = node["prompt"]
        parts = [
            each["text"] if "text" in each else await texts[each["input"]] for each in segments
        ]
        alone = {"id": node["id"], "op": "generate", "prompt": [{"text": "".join(parts)}, output]}
        running = await harness.submit([alone], outputs=[node["id"]], trace=True)
        text: str = await running.value(node["id"])
        await running.end()
        for trace in await running.traced_calls():
            found[trace.variable] = (trace.prompt_ids, trace.output_ids)
        return text

    for node in program["nodes"]:
        texts[node["id"]] = asyncio.create_task(send(node))
    await asyncio.gather(*texts.values())
    return found


@pytest.mark.parametrize("name", WORKLOADS)
async def test_programs_and_single_requests_give_the_same_tokens(
    harness: ServerHarness, name: str
) -> None:
    programs = [plan.written(name) for plan in WORKLOADS[name]]
    # Tenants share no cache, so neither run finds the results of the other.
    whole = await asyncio.gather(
        *(
            send_whole(ServerHarness(harness.executor, f"{name} whole"), program)
            for program in programs
        )
    )
    calls = await asyncio.gather(
        *(
            send_calls(ServerHarness(harness.executor, f"{name} calls"), program)
            for program in programs
        )
    )
    for program, one, other in zip(programs, whole, calls, strict=True):
        assert len(one) == len(program["nodes"])
        for variable, (prompt, output) in one.items():
            assert (prompt, output) == other[variable], variable
            assert output
