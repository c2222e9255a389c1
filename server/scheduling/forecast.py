"""What the calls of one engine will hold together, step after step, at most.

In every step each running call gets one token. So a call that may write `num_output` tokens is
gone that many steps after it began, and in a step before that it holds its size at the end,
less one token for every step in between. Calls that began at different times do not come to
their ends together; what they hold at once is largest in the last step of one of them, and
that peak, not the sum of their sizes, is the room they need (Past-Future scheduler, ASPLOS'25,
section 3).

Sizes are the longest that calls may come to, for nobody knows when one will stop. The peak is
sound nevertheless: a call that stops sooner takes its own part away and adds nothing. It is
exact for calls of equal pace. One that falls behind, waiting for its prompt or preempted, is
counted whole once it is late. Where an estimate is too low the engine preempts and computes
again: that costs time, never an answer.

Knows steps and sizes. Refuses to know prompts, prefixes and what room there is.

Kept true: at a standing clock, `peak` falls when a stay leaves and rises when one comes, and
is never more than the sum of all sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import add, mul


@dataclass(slots=True, eq=False)
class Stay:
    """Tokens that one call accounts for, until a certain step."""

    ends_at: int
    """The last step in which it is there; it grows by a token in each until then."""
    size: int
    """Tokens in that step."""
    is_late: bool = False
    """It should be gone, or nobody can tell when it will be: it counts whole until it is."""


class Forecast:
    """The stays of one engine. Reading costs time linear in them, and only after a change."""

    def __init__(self, steps: Callable[[], int] | None = None) -> None:
        """Expect nobody.

        Args:
            steps: steps that the engine has made so far; None: it does not tell, so all
                calls count whole as long as they are there.
        """
        self._steps = steps
        self._late_size = 0
        # Side by side, in the order of their ends; a weight is a size less its end, so that
        # weight plus step is what the call holds in that step.
        self._ends: list[int] = []
        self._weights: list[int] = []
        self._stays: list[Stay] = []
        self._is_stale = False
        self._held: list[int] = []
        """By stay: what all that are there hold in its last step, without the late ones."""
        self._peak = 0
        self._peak_at = 0
        """The step in which it comes."""

    @property
    def now(self) -> int:
        """Steps made so far."""
        return 0 if self._steps is None else self._steps()

    @property
    def peak(self) -> int:
        """Tokens that all may come to hold together."""
        self._refresh()
        return self._peak + self._late_size

    def enter(self, num_steps: int, size: int) -> Stay:
        """A call comes, and will have so many tokens after so many steps."""
        stay = Stay(self.now + num_steps, size, is_late=self._steps is None)
        if stay.is_late:
            self._late_size += size
        else:
            self._insert(stay)
        return stay

    def leave(self, stay: Stay) -> None:
        """It is gone."""
        if stay.is_late:
            self._late_size -= stay.size
        else:
            self._delete(self._place(stay))

    def resize(self, stay: Stay, num_tokens: int) -> None:
        """It accounts for so many tokens more (or fewer) in all its steps."""
        stay.size += num_tokens
        if stay.is_late:
            self._late_size += num_tokens
        else:
            self._weights[self._place(stay)] += num_tokens
            self._is_stale = True

    def postpone(self, stay: Stay, num_steps: int) -> bool:
        """It has so many steps before it, from now on; returns whether it had others."""
        ends_at = self.now + num_steps
        if self._steps is None or ends_at == stay.ends_at:
            return False
        self.leave(stay)
        stay.ends_at, stay.is_late = ends_at, False
        self._insert(stay)
        return True

    def exceeds(self, capacity: int, num_steps: int, size: int) -> bool:
        """Whether another call would surely be too much: by one look, at the peak."""
        self._refresh()
        missing = self.now + num_steps - self._peak_at
        added = max(size - missing, 0) if missing >= 0 else 0
        return self._peak + self._late_size + added > capacity

    def peak_with(self, num_steps: int, size: int, outlasted: Iterable[tuple[int, int]]) -> int:
        """The peak, from now to its end, if another call came now.

        Args:
            num_steps: after which it is gone.
            size: its tokens by then, without what it shares with others.
            outlasted: of what it shares, the last steps of those that account for it, and how many
                tokens: from there on they are there because of this call alone.
        """
        self._refresh()
        ends, held, now = self._ends, self._held, self.now
        end = now + num_steps
        last = bisect_left(ends, end)
        # In a step before its end this call lacks one token for each step in between.
        weight = size - end
        first, peak = 0, 0
        for ends_at, num_tokens in [*sorted(outlasted), (end, 0)]:
            cut = bisect_left(ends, min(ends_at + 1, end), first, last)
            if first < cut:
                peak = max(peak, weight + max(map(add, held[first:cut], ends[first:cut])))
            first = cut
            weight += num_tokens
        sum_after = held[last] - (len(ends) - last) * (ends[last] - end) if last < len(ends) else 0
        return self._late_size + max(peak, weight + end + sum_after)

    def _refresh(self) -> None:
        """Bring what was worked out up to the present."""
        ends = self._ends
        if ends and ends[0] < self.now:
            num_late = bisect_left(ends, self.now)
            for stay in self._stays[:num_late]:
                stay.is_late = True
                self._late_size += stay.size
            del ends[:num_late], self._weights[:num_late], self._stays[:num_late]
            self._is_stale = True
        if self._is_stale:
            self._is_stale = False
            sums = list(accumulate(reversed(self._weights)))
            sums.reverse()
            self._held = list(map(add, sums, map(mul, range(len(ends), 0, -1), ends)))
            self._peak = max(self._held, default=0)
            self._peak_at = ends[self._held.index(self._peak)] if ends else 0

    def _insert(self, stay: Stay) -> None:
        place = bisect_left(self._ends, stay.ends_at)
        self._ends.insert(place, stay.ends_at)
        self._weights.insert(place, stay.size - stay.ends_at)
        self._stays.insert(place, stay)
        self._is_stale = True

    def _delete(self, place: int) -> None:
        del self._ends[place], self._weights[place], self._stays[place]
        self._is_stale = True

    def _place(self, stay: Stay) -> int:
        place = bisect_left(self._ends, stay.ends_at)
        while self._stays[place] is not stay:
            place += 1
        return place
