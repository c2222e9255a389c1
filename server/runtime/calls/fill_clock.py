"""The time in which an engine fills prompts, divided among the calls whose prompts it fills.

Prompts that are filled together wait for each other, so the sum of their fill times is longer than
the time that passes. Here each moment counts once: calls that are filled at the same time get equal
parts of it.

Invariant: the parts of all fills add up to `busy_s`.
"""

from __future__ import annotations

from typing import NamedTuple

from ..node_state import NodeState


class FillMark(NamedTuple):
    """A moment of a `FillClock`."""

    busy_s: float
    """Time until then in which at least one prompt was being filled."""
    part_s: float
    """Part that a prompt would have of it if it had been filled all the time."""


class FillClock:
    """The fills of one engine. Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._num_filling = 0
        self._busy_s = 0.0
        self._part_s = 0.0
        self._changed_s = 0.0

    def begin(self, now: float) -> FillMark:
        """Start a fill; return the mark that `end` takes."""
        mark = self.read(now)
        self._num_filling += 1
        return mark

    def end(self, now: float, mark: FillMark) -> float:
        """End the fill that began at a mark; return its part of the time."""
        assert self._num_filling > 0, "a fill that has not begun"
        end = self.read(now)
        self._num_filling -= 1
        return end.part_s - mark.part_s

    def read(self, now: float) -> FillMark:
        """Return the mark of this moment."""
        if self._num_filling:
            passed_s = max(now - self._changed_s, 0.0)
            self._busy_s += passed_s
            self._part_s += passed_s / self._num_filling
        self._changed_s = now
        return FillMark(self._busy_s, self._part_s)


class FillTimer:
    """Measures the fills of one call."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._clock = FillClock()
        self._mark: FillMark | None = None
        """The start of a fill that has not ended."""
        self._ended_busy_s = 0.0

    def begin(self, clock: FillClock, now: float) -> None:
        """Start a fill on the engine with this clock."""
        self._clock = clock
        self._mark = clock.begin(now)

    def end(self, now: float) -> None:
        """Add the fill's part of the time to the usage of the node; safe to repeat."""
        if self._mark is not None:
            self._state.usage.fill_s += self._clock.end(now, self._mark)
            self._mark = None
            self._ended_busy_s = self._clock.read(now).busy_s

    def busy_s_since_end(self, now: float) -> float:
        """Return the time since the end of the fill in which the engine filled prompts."""
        return self._clock.read(now).busy_s - self._ended_busy_s
