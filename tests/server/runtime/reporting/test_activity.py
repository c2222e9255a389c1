"""What the server reports as held and waiting, while programs run on the fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.server.engines.protocol import EMBEDDINGS_OWNER
from conure.server.runtime.calls.pins import OWNER
from conure.server.runtime.reporting.activity import MAX_WAITING, ServerActivity

from ...inprocess import TENANT, Program, ServerHarness, client, generate, insert, server_harness

SHARED = "A long beginning that two calls of the program have in common. " * 8


def activity(harness: ServerHarness, tenant: str = TENANT) -> ServerActivity:
    return harness.executor.activity(tenant=tenant)


async def run_first_of_two_readers(harness: ServerHarness) -> Program:
    """Return a program that keeps the beginning of its first prompt for a call that waits for a
    client step.
    """
    program = await harness.submit(
        [
            generate("one", SHARED, "First: ", max_tokens=4),
            client("ask", "answer"),
            generate("two", SHARED, insert("answer"), max_tokens=4, after=["one"]),
        ],
        outputs=["one", "two"],
    )
    await program.value("one")
    await program.event("client.requested")
    return program


async def test_an_idle_server_holds_nothing(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        idle = activity(harness)
        (engine,) = idle.engines
        assert (engine.calls, engine.reserved_tokens, engine.programs) == (0, 0, [])
        assert engine.num_blocks > 0
        assert (idle.waiting, idle.num_waiting, idle.num_programs) == ([], 0, 0)


@pytest.mark.parametrize("owner", [OWNER, EMBEDDINGS_OWNER])
async def test_pins_and_embeddings_are_no_programs(tmp_path: Path, owner: str) -> None:
    async with server_harness(tmp_path) as harness:
        [engine] = harness.executor.services.engines.values()
        engine.new_context(lambda report: None, owner)
        assert activity(harness).engines[0].num_programs == 0


async def test_a_prefix_is_reported_until_its_last_reader_starts(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await run_first_of_two_readers(harness)
        (engine,) = activity(harness).engines
        (holding,) = engine.programs
        assert (holding.program, holding.running) == (program.id, [])
        assert holding.contexts >= 1
        (prefix,) = holding.retained
        assert holding.num_retained == 1
        assert (prefix.readers, prefix.num_readers) == (["two"], 1)
        assert 0 <= len(SHARED) - prefix.tokens < engine.block_size
        assert prefix.generated_tokens == 0

        step = await program.event("client.requested")
        await program.put("answer", "tea", str(step.data["request_id"]))
        await program.end()
        (engine,) = activity(harness).engines
        assert engine.programs == []


async def test_programs_of_other_tenants_are_counted_and_not_named(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await run_first_of_two_readers(harness)
        (engine,) = activity(harness, "another").engines
        assert (engine.programs, engine.num_programs) == ([], 1)
        await program.cancel()


async def test_waiting_calls_are_listed_in_their_order(tmp_path: Path) -> None:
    num_calls = MAX_WAITING + 10
    async with server_harness(tmp_path) as harness:
        harness.executor.services.scheduler.pause()
        names = [f"call{number}" for number in range(num_calls)]
        program = await harness.submit([generate(name, "Hello") for name in names], outputs=names)
        await program.event("node.queued", count=num_calls)
        waiting = activity(harness)
        assert waiting.num_waiting == num_calls
        assert [call.node for call in waiting.waiting] == names[:MAX_WAITING]
        first = waiting.waiting[0]
        assert (first.program, first.prompt_tokens) == (program.id, len("Hello"))
        assert first.output_tokens > 0
        assert activity(harness, "another").waiting == []
        await program.cancel()
        assert activity(harness).num_waiting == 0
