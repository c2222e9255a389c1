"""Pins of stored procedures on the fake engine: what they save, cost and survive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server.program.errors import ConflictError, ConureError
from conure.server.program.ir import Submission
from conure.server.program.procedures import (
    PinnedPrefix,
    PutProcedure,
    RunProcedure,
    StoredProcedure,
)
from conure.server.program.status import Receipt

from ...inprocess import Program, ServerHarness, server_harness

RULES = "You judge answers by the rules of the house. " * 8
SOURCE = f"""\
question: str
context = [system({RULES!r}), user(question)]
verdict = llm_chat(context, max_tokens=8)["content"]
return verdict
"""
PROMPTS = f"""\
question: str
verdict = gen(f"{RULES}Question: {{question}}", max_tokens=8)
return verdict
"""


async def put(
    harness: ServerHarness, source: str = SOURCE, name: str = "judge", **fields: Any
) -> StoredProcedure:
    body = msgspec.convert({"source": source, **fields}, PutProcedure)
    return await harness.executor.procedures.put(name, body, tenant=harness.tenant)


async def computed(harness: ServerHarness, question: str) -> int:
    """Run the procedure, and return the prompt tokens that its call computed."""
    run = RunProcedure(inputs={"question": question})
    accepted, _ = await harness.executor.procedures.run(
        "judge", run, tenant=harness.tenant, idempotency_key=None
    )
    status = await Program(harness, accepted.id).end()
    assert status.status == "done", status.error
    assert isinstance(status.receipt, Receipt)
    return status.receipt.prompt_tokens.computed


def pin_of(procedure: StoredProcedure) -> PinnedPrefix:
    assert isinstance(procedure.pin, PinnedPrefix)
    return procedure.pin


@pytest.mark.parametrize("source", [SOURCE, PROMPTS])
async def test_the_first_call_of_a_pinned_procedure_computes_its_own_text_only(
    tmp_path: Path, source: str
) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.0) as harness:
        stored = await put(harness, source, pin_s=600.0)
        pin = pin_of(stored)
        assert pin.tokens >= len(RULES) - 16
        assert pin.engines == ["engine-0"]
        assert await computed(harness, "Is it so?") < 80
        held, contexts = (await harness.num_held())[0]
        assert held == pin.blocks
        assert contexts == 1


async def test_the_cost_is_in_the_record_in_explain_and_in_the_metrics(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        stored = await put(harness, pin_s=600.0)
        await computed(harness, "Is it so?")  # the pin was filled before
        found = await harness.executor.procedures.find("judge", tenant=harness.tenant)
        assert pin_of(found).computed_tokens == pin_of(found).tokens
        program = {
            "nodes": [
                {
                    "id": "c",
                    "op": "procedure",
                    "procedure": "judge",
                    "args": {"question": "Why?"},
                    "output": "c",
                }
            ],
            "outputs": ["c"],
        }
        body = msgspec.json.encode({"program": program})
        explanation = await harness.executor.explainer.explain(
            msgspec.json.decode(body, type=Submission), body=body, tenant=harness.tenant
        )
        assert list(explanation.pins) == [f"judge@{stored.version}"]
        metrics = (await harness.executor.metrics()).decode()
        assert f"conure_pinned_blocks {pin_of(found).blocks}.0" in metrics
        assert "conure_pins 1.0" in metrics


async def test_a_removed_pin_leaves_no_blocks(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        await put(harness, pin_s=600.0)
        procedures = harness.executor.procedures
        after = await procedures.pin("judge", None, tenant=harness.tenant)
        assert after.pin is msgspec.UNSET
        assert await harness.num_held() == [(0, 0)]


async def test_a_pin_survives_a_restart_until_its_time(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        before = await put(harness, pin_s=600.0)
        await put(harness, PROMPTS, name="other", pin_s=600.0)
        await harness.executor.procedures.pin("other", None, tenant=harness.tenant)
    async with server_harness(tmp_path) as harness:
        async with asyncio.timeout(60):  # the server restores pins after its start
            while (  # noqa: ASYNC110 - the server has no event for it
                found := await harness.executor.procedures.find("judge", tenant=harness.tenant)
            ).pin is msgspec.UNSET:
                await asyncio.sleep(0.001)
        assert pin_of(found).expires_at == pin_of(before).expires_at
        other = await harness.executor.procedures.find("other", tenant=harness.tenant)
        assert other.pin is msgspec.UNSET


async def test_a_pin_that_does_not_fit_after_a_restart_can_be_removed(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        await put(harness, pin_s=600.0)
    async with server_harness(tmp_path, pin_share=0.0) as harness:
        await harness.executor.procedures.pin("judge", None, tenant=harness.tenant)
        assert await harness.executor.programs.journal.list_pins(1.0) == []


async def test_of_two_pins_at_once_the_one_that_does_not_fit_leaves_none(tmp_path: Path) -> None:
    async with server_harness(tmp_path, num_blocks=400, pin_share=0.1) as harness:
        puts = (put(harness, name=name, pin_s=600.0) for name in ("one", "two"))
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        (stored,) = (each for each in outcomes if isinstance(each, StoredProcedure))
        (refused,) = (each for each in outcomes if isinstance(each, ConflictError))
        assert refused.code == "procedure.pin_limit"
        (left,) = await harness.executor.programs.journal.list_pins(1.0)
        assert left.name == stored.name


@pytest.mark.parametrize(
    ("source", "pin_s", "code"),
    [
        (SOURCE, 1e9, "procedure.pin_time"),
        ("x: str\nreturn gen(x)", 60.0, "procedure.pin_empty"),
        (f"x: str\nreturn gen({'a' * 40_000!r} + x)", 60.0, "procedure.pin_limit"),
    ],
)
async def test_what_cannot_be_pinned_is_not_stored(
    tmp_path: Path, source: str, pin_s: float, code: str
) -> None:
    async with server_harness(tmp_path, num_blocks=400) as harness:
        with pytest.raises(ConureError) as refused:
            await put(harness, source, pin_s=pin_s)
        assert refused.value.code == code
        assert await harness.executor.procedures.list_all(tenant=harness.tenant) == []


async def test_pins_can_be_forbidden(tmp_path: Path) -> None:
    async with server_harness(tmp_path, pin_share=0.0) as harness:
        with pytest.raises(ConflictError, match="pin-share"):
            await put(harness, pin_s=60.0)
