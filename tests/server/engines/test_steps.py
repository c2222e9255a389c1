"""The steps of an engine let a waiting call start before another one ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..inprocess import generate, server_harness
from ..stepped_engine import SteppedEngine, install


async def test_a_call_starts_in_the_step_in_which_memory_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    async with server_harness(tmp_path, num_blocks=100, block_size=1, context_len=100) as harness:
        (engine,) = harness.executor.services.engines.values()
        assert isinstance(engine, SteppedEngine)
        calls = [generate(name, name * 10, max_tokens=50, ignore_eos=True) for name in "ab"]
        run = await harness.submit(calls, outputs=["a", "b"])
        await run.end()
        status = await engine.status()
    together = [number for number, rows in enumerate(engine.steps) if len(rows) == 2]
    assert together
    first, last = together[0], together[-1]
    # Of 120 tokens, 100 fit when the first call ends.
    assert first >= 20
    assert last <= 50
    assert last - first >= 25, "it joins a few steps after it fits"
    assert len(engine.steps) <= 80, "100 if one call follows the other"
    assert status.num_recomputed_tokens == 0
