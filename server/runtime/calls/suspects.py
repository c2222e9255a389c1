"""The gate for calls that were on an engine when it died: limits how many run at once.

When an engine dies, any call on it may be the cause, so all of them become *suspects*. At most half
as many suspects then run at once, those with fewer deaths first. A call that is not the cause ends,
or runs for `PROBATION_S`. The call that is the cause kills an engine again, each time among half as
many suspects, until it runs alone: of n calls, it is found after max(3, log2(n) + 1) deaths.

Out of scope: calls that were never on an engine that died; the scheduler places them as usual.

Invariants: a suspect is either waiting or running, never both. While a suspect waits, at least one
runs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

MAX_DEATHS_ALONE = 3
"""Engine deaths after which a call is the cause, if the last engine ran no other call."""
MAX_DEATHS_AMONG_NEW = 4
"""A call that was running at this many engine deaths is taken for the cause if each of the other
calls was running at only one."""
MAX_DEATHS = 8
"""Engine deaths after which a call is the cause in any case."""
PROBATION_S = 10.0
"""Time on an engine after which a suspect no longer counts against the limit."""


def is_cause(num_deaths: int, others: list[int]) -> bool:
    """Whether a call counts as the cause of its engine's death.

    Args:
        num_deaths: number of engines that died while they ran the call, including this one.
        others: the same numbers of the other calls on the engine.
    """
    if num_deaths >= MAX_DEATHS or (num_deaths >= MAX_DEATHS_ALONE and not others):
        return True
    return num_deaths >= MAX_DEATHS_AMONG_NEW and max(others, default=0) <= 1


class SuspectGate:
    """Limits how many suspects run at once."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        """How many suspects may run at once after the start of one, by the deaths of that one."""
        self._running: dict[Hashable, asyncio.TimerHandle | None] = {}
        """Admitted suspects, with the timer of their probation once an engine runs them."""
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._heap: list[tuple[int, int, Hashable]] = []
        self._order = itertools.count()

    @property
    def is_open(self) -> bool:
        """Whether no call is suspected."""
        return not self._limits

    def engine_died(self, deaths: Iterable[int]) -> None:
        """Halve the number of calls that run together with each call of a dead engine.

        Args:
            deaths: for each call of the engine, the number of engines that died while they ran the
                call, including this engine.
        """
        for num_deaths, num_calls in Counter(deaths).items():
            self._limits[num_deaths] = max(1, num_calls // 2)

    def enter(self, call: Hashable, num_deaths: int, start: Callable[[], None]) -> None:
        """Start a suspect now, or when the limit allows it."""
        self._waiting[call] = start
        heapq.heappush(self._heap, (num_deaths, next(self._order), call))
        self._admit()

    def started(self, call: Hashable) -> None:
        """Start the probation of a suspect: an engine runs it. Safe for unknown calls."""
        if call in self._running:
            loop = asyncio.get_running_loop()
            self._running[call] = loop.call_later(PROBATION_S, self._probation_ended, call)

    def leave(self, call: Hashable) -> bool:
        """Remove a call; return whether it was still waiting. Safe for unknown calls."""
        if self._waiting.pop(call, None) is not None:
            return True
        if call in self._running:
            if (timer := self._running.pop(call)) is not None:
                timer.cancel()
            self._open()
        return False

    def _probation_ended(self, call: Hashable) -> None:
        del self._running[call]
        self._open()

    def _open(self) -> None:
        # In a later turn: after a death, all calls of the engine leave before any enters again.
        asyncio.get_running_loop().call_soon(self._admit)

    def _limit(self, num_deaths: int) -> float:
        """Return how many suspects may run after the start of one with this number of deaths."""
        if self.is_open:  # all suspects have ended or have passed their probation
            return math.inf
        return self._limits.get(num_deaths, 1)

    def _admit(self) -> None:
        while self._heap:
            num_deaths, _, call = self._heap[0]
            is_waiting = call in self._waiting
            if is_waiting and len(self._running) >= self._limit(num_deaths):
                return
            heapq.heappop(self._heap)
            if is_waiting:
                # Its probation starts on an engine, which may first have to load its weights.
                self._running[call] = None
                self._waiting.pop(call)()
        if not self._running:
            self._limits.clear()
