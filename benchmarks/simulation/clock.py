"""Virtual time for the simulator.

Invariant: events run in order of time, and events of one time in the order of their submission, so
a simulation always gives the same result.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class SimulationClock:
    """Virtual time, and an event queue."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run an action at a time; immediately if the time has passed."""
        heapq.heappush(self._events, (max(time_s, self.now), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action after a delay."""
        self.at(self.now + delay_s, action)

    def defer(self, action: Callable[[], None]) -> None:
        """Run an action at the present time, after all actions submitted for it so far."""
        self.at(self.now, action)

    def run(self) -> None:
        """Run all events, including those that events add."""
        events = self._events
        while events:
            self.now, _, action = heapq.heappop(events)
            self.num_events += 1
            action()
