"""The heartbeat of engines, on a simulated process."""

from __future__ import annotations

import asyncio
import os

import pytest

from conure.server.engines import heartbeat
from conure.server.engines.heartbeat import HeartbeatMonitor

FREEZE_S = 0.05


async def test_process_without_beats_and_work_is_frozen() -> None:
    monitor = HeartbeatMonitor(lambda: None)
    await asyncio.wait_for(monitor.wait_frozen(os.getpid() + 2**22, FREEZE_S), 60)


async def test_computing_process_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s, num_windows = 0.0, 0
    looked = asyncio.Event()

    def cpu_s(_: int) -> float:
        nonlocal used_s, num_windows
        used_s += 1.0
        num_windows += 1
        if num_windows == 6:
            looked.set()
        return used_s

    monkeypatch.setattr(heartbeat, "_cpu_s", cpu_s)
    waiting = asyncio.create_task(HeartbeatMonitor(lambda: None).wait_frozen(1, FREEZE_S))
    await asyncio.wait_for(looked.wait(), 60)
    assert not waiting.done()
    waiting.cancel()


async def test_beats_are_counted_until_the_process_ends() -> None:
    beats: list[int] = []
    two, more = asyncio.Event(), asyncio.Event()

    def on_beat() -> None:
        beats.append(monitor.num_beats)
        (two if monitor.num_beats == 2 else more).set()

    monitor = HeartbeatMonitor(on_beat)
    with monitor.opened() as pipe:
        os.write(pipe, b"..")
        await asyncio.wait_for(two.wait(), 60)
        os.write(pipe, b".")
        await asyncio.wait_for(more.wait(), 60)
    assert beats == [2, 3]
    async with asyncio.timeout(60):
        while monitor._pipe is not None:  # noqa: ASYNC110 - the monitor closes it by itself
            await asyncio.sleep(0.001)
    monitor.close()
