"""The time in which an engine fills prompts, divided among the calls whose prompts it fills.

Prompts that are filled at the same time wait for each other, so the sum of their fill times exceeds
the elapsed time. A `FillClock` counts each moment once, and divides it equally among the prompts
that are being filled.

Invariant: the parts of all fills add up to `busy_s`.
"""

from __future__ import annotations

from typing import NamedTuple

from ..node_state import NodeState


class FillMark(NamedTuple):
    """A moment of a `FillClock`."""

    busy_s: float
    """Time before this moment in which at least one prompt was being filled."""
    part_s: float
    """The part of `busy_s` that a prompt gets if it is filled from the start of the clock until
    this moment. The part of any other fill is the difference between its two marks."""


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
        """End the fill that began at a mark; return its part of the elapsed time."""
        assert self._num_filling > 0, "a fill that has not begun"
        end = self.read(now)
        self._num_filling -= 1
        return end.part_s - mark.part_s

    def read(self, now: float) -> FillMark:
        """Advance the clock to `now`; return the mark of this moment."""
        if self._num_filling:
            elapsed_s = max(now - self._changed_s, 0.0)
            self._busy_s += elapsed_s
            self._part_s += elapsed_s / self._num_filling
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
        """Add the fill's part of the elapsed time to the usage of the node; safe to repeat."""
        if self._mark is not None:
            self._state.usage.fill_s += self._clock.end(now, self._mark)
            self._mark = None
            self._ended_busy_s = self._clock.read(now).busy_s

    def busy_s_since_end(self, now: float) -> float:
        """Return for how long the engine has filled prompts since this call's fill ended."""
        return self._clock.read(now).busy_s - self._ended_busy_s
