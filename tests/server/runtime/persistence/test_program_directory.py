"""Where requests find programs: live, in memory, or in the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.server.runtime.persistence import event_stream

from ...inprocess import client, expr, server_harness, var


async def test_a_reader_of_the_journal_is_a_reader_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MAX_KEPT", 2)
    nodes = [client("ask", "x"), *(expr(f"e{i}", var("x")) for i in range(20)), client("b", "y")]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, detach=False)
        await program.event("client.requested", count=2)
        await program.put("x", 1)
        await program.value("e19")
        events = harness.executor.programs._live[program.id].events
        reading = program.read()
        first = await anext(reading)
        assert (first.seq or 0) < events.first_seq, "it is only in the journal"
        assert events.num_readers == 1
        await reading.aclose()
        assert events.num_readers == 0
