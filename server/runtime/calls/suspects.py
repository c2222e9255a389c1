"""The gate for calls that were on an engine when it died: they are tried apart.

A call that kills its engine takes the other calls on the engine with it. After a death all of them
are suspects, and at most half as many of them run at once again. Suspects with fewer deaths go
first. Innocent calls end or outlive their probation; the guilty call kills an engine again, in half
the company each time, until it is alone: of n calls, it is found after log2(n) + 1 deaths.

Out of scope: calls that were never on an engine that died; the scheduler places them as usual.

Invariants: a suspect waits in the gate, or was started and not left, or is unknown here. While a
suspect waits, at least one runs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

MAX_DEATHS_ALONE = 3
"""Engine deaths of a call, the last of them without other calls, after which it is the cause."""
MAX_DEATHS_AMONG_NEW = 4
"""The same, if all other calls were on a dying engine for the first time."""
MAX_DEATHS = 8
"""The same in any company."""
PROBATION_S = 10.0
"""Time on an engine after which a suspect no longer counts against the limit."""


def is_cause(num_deaths: int, others: list[int]) -> bool:
    """Whether a call counts as the cause of its engine's death.

    Args:
        num_deaths: deaths of engines under the call, including this one.
        others: the same of the other calls on the engine.
    """
    if num_deaths >= MAX_DEATHS or (num_deaths >= MAX_DEATHS_ALONE and not others):
        return True
    return num_deaths >= MAX_DEATHS_AMONG_NEW and max(others, default=0) <= 1


class SuspectGate:
    """Limits how many suspects run at once."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        """By number of deaths: how many suspects may run at once when such a call starts."""
        self._running: dict[Hashable, asyncio.TimerHandle] = {}
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._heap: list[tuple[int, int, Hashable]] = []
        self._order = itertools.count()

    @property
    def is_open(self) -> bool:
        """Whether no call is suspected."""
        return not self._limits

    def engine_died(self, deaths: Iterable[int]) -> None:
        """Halve the company of the calls of an engine that died.

        Args:
            deaths: for each of its calls, how many engines died under it, including this one.
        """
        for num_deaths, num_calls in Counter(deaths).items():
            self._limits[num_deaths] = max(1, num_calls // 2)

    def enter(self, call: Hashable, num_deaths: int, start: Callable[[], None]) -> None:
        """Start a suspect, now or when it is its turn."""
        self._waiting[call] = start
        heapq.heappush(self._heap, (num_deaths, next(self._order), call))
        self._admit()

    def leave(self, call: Hashable) -> bool:
        """Forget a call; return whether it was still waiting. Safe for unknown calls."""
        if self._waiting.pop(call, None) is not None:
            return True
        timer = self._running.pop(call, None)
        if timer is not None:
            timer.cancel()
            self._open()
        return False

    def _probation_ended(self, call: Hashable) -> None:
        if self._running.pop(call, None) is not None:
            self._open()

    def _open(self) -> None:
        # In a later turn: after a death all of its calls leave before the first one enters again.
        asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        while self._heap:
            num_deaths, _, call = self._heap[0]
            is_waiting = call in self._waiting
            if is_waiting and len(self._running) >= self._limits.get(num_deaths, 1):
                return
            heapq.heappop(self._heap)
            if is_waiting:
                loop = asyncio.get_running_loop()
                self._running[call] = loop.call_later(PROBATION_S, self._probation_ended, call)
                self._waiting.pop(call)()
        if not self._running:
            self._limits.clear()
