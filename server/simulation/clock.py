"""Time that passes from one event to the next.

Kept true: events happen in order of time, those of one time in the order they were asked for;
so a simulation gives the same result however often it runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Virtual time and what will happen in it."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Let something happen; what should have happened already happens now."""
        heapq.heappush(self._events, (max(time_s, self.now), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let something happen after a while."""
        self.at(self.now + delay_s, action)

    def defer(self, action: Callable[[], None]) -> None:
        """Let something happen at the present time, after all that was asked for before."""
        self.at(self.now, action)

    def run(self) -> None:
        """Let everything happen, also what comes of it."""
        events = self._events
        while events:
            self.now, _, action = heapq.heappop(events)
            self.num_events += 1
            action()
