"""Tokens that engines decode after a kill are in the receipt, as discarded."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from conure.server.program.status import Receipt
from conure.server.runtime.calls import aborted_outputs

from ...inprocess import ServerHarness, client, generate, server_harness

LONG = 20_000
"""Tokens of an output that does not end during a test."""
CONTEXT_LEN = 2 * LONG


async def num_decoded(harness: ServerHarness) -> int:
    """Return the tokens that the engines have decoded, by their own count."""
    return sum(info.report.num_decoded_tokens for info in await harness.executor.engines())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts wait for the engine, however slow the machine is."""
    monkeypatch.setattr(aborted_outputs, "MAX_ANSWER_S", 60.0)


def receipt_of(status_receipt: object) -> Receipt:
    assert isinstance(status_receipt, Receipt)
    return status_receipt


@pytest.mark.parametrize("num_calls", [1, 5])
@pytest.mark.parametrize("token_s", [0.002, 0.02])
async def test_killed_tokens_are_discarded(tmp_path: Path, num_calls: int, token_s: float) -> None:
    calls = [
        generate(f"c{i}", f"call {i}", max_tokens=LONG, ignore_eos=True) for i in range(num_calls)
    ]
    nodes = [
        *calls,
        client("ask", "x"),
        {
            "id": "stop",
            "op": "kill",
            "targets": [f"c{i}" for i in range(num_calls)],
            "after": ["ask"],
        },
    ]
    async with server_harness(
        tmp_path, context_len=CONTEXT_LEN, time_per_output_token=token_s
    ) as harness:
        program = await harness.submit(nodes, outputs=["x"])
        for i in range(num_calls):
            await program.event("node.delta", node=f"c{i}")
        await program.put("x", 1)
        status = await program.end()
        tokens = receipt_of(status.receipt).output_tokens
        assert tokens.decoded == await num_decoded(harness)
        assert tokens.discarded == tokens.decoded
        assert all(status.nodes[f"c{i}"].status == "killed" for i in range(num_calls))


async def test_tokens_of_a_cancelled_program_are_discarded(tmp_path: Path) -> None:
    async with server_harness(
        tmp_path, context_len=CONTEXT_LEN, time_per_output_token=0.005
    ) as harness:
        nodes = [generate("c", "call", max_tokens=LONG, ignore_eos=True)]
        program = await harness.submit(nodes, outputs=["c"])
        await program.event("node.delta")
        await program.cancel()
        tokens = receipt_of((await program.end()).receipt).output_tokens
        assert tokens.decoded == tokens.discarded == await num_decoded(harness)


async def test_program_ends_although_the_engine_of_a_killed_call_dies(tmp_path: Path) -> None:
    async with server_harness(
        tmp_path, context_len=CONTEXT_LEN, time_per_output_token=0.005
    ) as harness:
        program = await harness.submit(
            [generate("c", "call", max_tokens=LONG, ignore_eos=True)], outputs=["c"]
        )
        await program.event("node.delta")
        fleet = harness.executor.services.fleet
        assert fleet is not None
        process = fleet.engines["engine-0"]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await program.cancel()
        tokens = receipt_of((await program.end()).receipt).output_tokens
        assert tokens.decoded == tokens.discarded > 0
        after = await harness.submit([generate("x", "hello", max_tokens=2)], outputs=["x"])
        assert (await after.end()).status == "done", "on the next engine"
