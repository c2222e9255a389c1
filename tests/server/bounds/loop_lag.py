"""The lag of an event loop: how much work delays a callback that is due.

The work is measured as processor time of the loop's thread, which other processes do not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

PAUSE_S = 0.005


class LoopLag:
    """The work between the beats of a heartbeat, in seconds."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []

    @property
    def worst_s(self) -> float:
        """Return the longest work without a beat."""
        return max(self.lags_s, default=0.0)

    async def beat(self) -> None:
        """Measure until cancelled."""
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(PAUSE_S)
            self.lags_s.append(time.thread_time() - before_s)


@contextlib.asynccontextmanager
async def loop_lag() -> AsyncIterator[LoopLag]:
    """Measure the lag of the running loop in a block."""
    lag = LoopLag()
    task = asyncio.create_task(lag.beat())
    try:
        yield lag
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
