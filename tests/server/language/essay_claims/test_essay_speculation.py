"""The essay's speculation with kill, as its text, on a fake and on a real engine.

The text of a real model is not known before, so the decision is made certain: every text contains
the empty string, and no text of the built-in model contains `xxxx`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from conure.server.program.status import OutputTokens, Receipt

from ...inprocess import Program, ServerHarness, server_harness
from .. import essay

ENGINES: dict[str, dict[str, Any]] = {
    "fake": {"time_per_output_token": 0.002},
    "real": {"engine": "local", "device": "cpu", "threads": 1},
}
OPTIONS = "temperature=0, ignore_eos=True"
SOURCE = (
    essay.SPECULATION.replace("QUESTION", "What is tea?")
    .replace("message_list)\n    yield", f"message_list, max_tokens=60, {OPTIONS})\n    yield")
    .replace("feature1_message_list)", f"feature1_message_list, max_tokens=6, {OPTIONS})")
    .replace("message_list2 )", f"message_list2, max_tokens=6, {OPTIONS} )")
)
"""The essay's text with bounded calls: the default is much longer than the feature."""
LONG = 500
HIT = SOURCE.replace("'xxxx'", "''").replace("max_tokens=60", f"max_tokens={LONG}")
"""The kill ends the default early on a busy machine, too."""


class Retriever:
    """A function of the server that answers when a test lets it."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def rag(self, model: str, messages: list[Any]) -> dict[str, str]:
        await self.may_answer.wait()
        return {"context": "found"}


@pytest.fixture
def retriever() -> Retriever:
    return Retriever()


@pytest_asyncio.fixture(params=ENGINES)
async def harness(
    tmp_path: Path, retriever: Retriever, request: pytest.FixtureRequest
) -> AsyncIterator[ServerHarness]:
    async def rag(model: str, messages: list[Any]) -> dict[str, str]:
        return await retriever.rag(model, messages)

    async with server_harness(tmp_path, {"rag": rag}, **ENGINES[request.param]) as harness:
        yield harness


async def yields_of(program: Program) -> list[tuple[str, str]]:
    """Return the job and the key of each value, in the order of their arrival."""
    return [
        (event.data["job"], next(iter(event.data["value"])))
        for event in await program.events()
        if event.type == "yield"
    ]


async def test_on_a_hit_the_default_is_killed_before_retrieval_has_answered(
    harness: ServerHarness, retriever: Retriever
) -> None:
    program = await harness.submit_source(HIT)
    await program.event("node.killed", node="default_result")
    assert (await program.status()).nodes["rag"].status == "running"
    retriever.may_answer.set()
    yields = await yields_of(program)
    keys = [key for _, key in yields]
    assert "default" not in keys
    assert sorted(keys) == ["feat1_found", "feature1", "feature2", "final", "result2"]
    assert keys[-1] == "final"
    speculative = next(job for job, key in yields if key == "feat1_found")
    assert [key for job, key in yields if job == speculative] == ["feat1_found", "result2"]
    status = await program.end()
    assert status.status == "done", status.error
    final: Any = status.variables["final_result"].value
    assert final["content"]
    tokens = status.nodes["default_result"].output_tokens
    receipt = status.receipt
    assert isinstance(tokens, OutputTokens)
    assert isinstance(receipt, Receipt)
    assert tokens.decoded == tokens.discarded < LONG
    assert receipt.output_tokens.discarded == tokens.discarded
    assert receipt.blocks_held == 0
    assert (await harness.num_held())[0][1] == 0


async def test_on_a_miss_retrieval_is_killed_and_the_default_is_the_result(
    harness: ServerHarness,
) -> None:
    program = await harness.submit_source(SOURCE)
    await program.event("node.killed", node="rag")
    yields = await yields_of(program)
    keys = [key for _, key in yields]
    assert sorted(keys) == ["default", "feature1", "final"]
    assert keys[0] == "feature1"
    assert keys[-1] == "final"
    status = await program.end()
    assert status.status == "done", status.error
    assert {status.nodes[each].status for each in ("rag", "feature2_result")} == {"killed"}
    values = status.variables
    assert values["final_result"].value == values["default_result"].value
    receipt = status.receipt
    assert isinstance(receipt, Receipt)
    assert receipt.output_tokens.discarded == 0
    assert receipt.output_tokens.decoded == 60 + 6
    assert receipt.blocks_held == 0
    assert (await harness.num_held())[0][1] == 0
