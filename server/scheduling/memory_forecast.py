"""Forecast of the peak KV memory of one engine's running calls.

In every step each running call generates one token. A call that may write `num_output` tokens thus
ends at most that many steps after its start, and `k` steps before its end it holds its final size
minus `k` tokens. Calls that started at different times do not reach their final sizes together, so
the memory that they need is the maximum over time of their sum, not the sum of their sizes
(Past-Future scheduler, ASPLOS'25, section 3). The sum only drops when a call ends, so the
maximum is in the last step of some call. An example, with A (ends in step 3, final size 5) and B
(ends in step 5, final size 6):

    step      1  2  3  4  5
    A         3  4  5
    B         2  3  4  5  6
    together  5  7  9  5  6      peak 9, while 5 + 6 = 11

`_last_steps` is [3, 5] here, and `_totals` [9, 6]: what all calls still running then hold together.

Sizes are upper bounds, because the length of an output is unknown. The peak is a sound bound
nevertheless: a call that stops early removes its own tokens and adds none. A call that falls behind
(it waits for its prefill, or was preempted) is overdue once its last step has passed, and then
counts with its final size until it ends. If an estimate is too low, the engine preempts and
recomputes: that costs time but does not change outputs.

Tokens shared by several calls stay until the last of them ends. They are counted once: accounted to
the reader that is expected to run longest.

Out of scope: prompts, prefixes and the capacity of the engine.

Invariant: `peak` is exactly the maximum number of tokens held in any step from now on, if every
call that is not overdue runs to its last step and every overdue call stays. It falls when a call
ends, rises when one starts, and never exceeds the sum of all sizes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add, sub


@dataclass(slots=True, eq=False)
class Residency:
    """The tokens accounted to one call until its last step."""

    last_step: int
    """The call grows by one token per step until then."""
    size: int
    """Tokens in the last step, including shared tokens that are accounted to this call."""
    shared: tuple[SharedResidency, ...]
    """Shared tokens that the call reads."""
    is_overdue: bool = False
    """Whether the last step has passed or is unknown. Counts with the full size until it ends."""


@dataclass(slots=True, eq=False)
class SharedResidency:
    """Tokens that are held as long as one of their readers runs."""

    num_tokens: int
    readers: list[Residency] = field(default_factory=list)
    accounted_to: Residency = field(init=False)
    """The reader that runs longest. Set with the first reader."""


class PeakMemoryForecast:
    """Peak of one engine's running calls.

    A change takes time linear in the number of calls; reading the peak takes constant time.
    """

    def __init__(self, steps: Callable[[], int] | None = None) -> None:
        """Start without calls.

        Args:
            steps: returns the number of steps that the engine has made; None if the engine does not
                report it, so that all calls count with their full size until they end.
        """
        self._has_step_count = steps is not None
        self._get_step = steps or int
        self._overdue_tokens = 0
        # Calls that are not overdue, as parallel lists ordered by last step.
        self._residencies: list[Residency] = []
        self._last_steps: list[int] = []
        self._totals: list[int] = []
        """Tokens that all calls hold together in each last step."""
        self._max_total: int | None = 0
        """The maximum of `_totals`; None if it has to be recomputed."""

    @property
    def peak(self) -> int:
        """Return the maximum number of tokens that all calls may hold together."""
        if self._last_steps and self._last_steps[0] < self._get_step():
            self._mark_overdue()
        return self._get_max_total() + self._overdue_tokens

    def num_steps_left(self, residency: Residency) -> int | None:
        """Return the steps until a call ends at the latest; None if its last step is unknown."""
        num_left = residency.last_step - self._get_step()
        return None if residency.is_overdue or num_left < 0 else num_left

    def add(self, num_steps: int, size: int, shared: tuple[SharedResidency, ...] = ()) -> Residency:
        """Add a call that starts now.

        Args:
            num_steps: steps until it ends.
            size: its tokens by then, without shared ones.
            shared: shared tokens that it reads, new or known to this forecast.
        """
        now = self._mark_overdue()
        residency = Residency(now + num_steps, size, shared, is_overdue=not self._has_step_count)
        for part in shared:
            if not part.readers:
                part.accounted_to = residency
                residency.size += part.num_tokens
            part.readers.append(residency)
        self._insert(residency)
        return residency

    def remove(self, residency: Residency) -> None:
        """Remove a call that ended, and the shared tokens that no other call reads."""
        self._mark_overdue()
        for part in residency.shared:
            part.readers.remove(residency)
            if part.accounted_to is residency and part.readers:
                self._account_to(part, max(part.readers, key=_end_of))
        self._delete(residency)

    def grow_shared(self, part: SharedResidency, num_tokens: int) -> None:
        """Add tokens to those that the readers of a part share."""
        self._mark_overdue()
        part.num_tokens += num_tokens
        self._resize(part.accounted_to, num_tokens)

    def extend(self, residency: Residency, num_steps: int) -> bool:
        """Let a call run for at least `num_steps` more steps; return whether it ends later now."""
        now = self._mark_overdue()
        last_step = now + num_steps
        if not self._has_step_count or last_step <= residency.last_step:
            return False
        if residency.is_overdue:
            self._delete(residency)
            residency.last_step, residency.is_overdue = last_step, False
            self._insert(residency)
            for part in residency.shared:
                if part.accounted_to is residency:  # Another reader may run longer now.
                    self._account_to(part, max(part.readers, key=_end_of))
        else:
            self._postpone(residency, last_step)
            for part in self._outlasted(last_step, residency.shared):
                self._account_to(part, residency)
        return True

    def surely_exceeds(self, capacity: int, num_steps: int, size: int) -> bool:
        """Return whether another call exceeds the capacity in the step of the current peak.

        A cheap check: if it is False, the call may still exceed the capacity in another step.
        """
        peak, added = self.peak, 0
        if self._last_steps:
            peak_step = self._last_steps[self._totals.index(self._get_max_total())]
            num_missing = self._mark_overdue() + num_steps - peak_step
            added = max(size - num_missing, 0) if num_missing >= 0 else 0
        return peak + added > capacity

    def peak_with(self, num_steps: int, size: int, shared: Iterable[SharedResidency]) -> int:
        """Return the peak, until the call's last step, if another call started now.

        Args:
            num_steps: steps until the call ends.
            size: its tokens by then, without those that it shares with others.
            shared: known shared tokens that it reads.
        """
        last_step = self._mark_overdue() + num_steps
        totals, last = self._totals_with(last_step, size, self._outlasted(last_step, shared))
        return self._overdue_tokens + max(last, max(totals, default=0))

    def _get_max_total(self) -> int:
        if self._max_total is None:
            self._max_total = max(self._totals, default=0)
        return self._max_total

    # --- accounting of shared tokens ------------------------------------------------------

    def _outlasted(
        self, last_step: int, shared: Iterable[SharedResidency]
    ) -> list[SharedResidency]:
        """Return the parts that a call until `last_step` outlasts, so that it accounts for them."""
        return [
            part
            for part in shared
            if part.readers
            and not part.accounted_to.is_overdue
            and part.accounted_to.last_step < last_step
        ]

    def _account_to(self, part: SharedResidency, residency: Residency) -> None:
        """Move a part's tokens to another reader."""
        before = part.accounted_to
        if residency is before:
            return
        part.accounted_to = residency
        if residency.is_overdue or before.is_overdue:
            self._resize(before, -part.num_tokens)
            self._resize(residency, part.num_tokens)
            return
        residency.size += part.num_tokens
        before.size -= part.num_tokens
        if before.last_step < residency.last_step:
            self._add_to_totals(part.num_tokens, before.last_step, residency.last_step)
        else:
            self._add_to_totals(-part.num_tokens, residency.last_step, before.last_step)

    def _resize(self, residency: Residency, num_tokens: int) -> None:
        """Add tokens to a call in all its steps; negative to remove them."""
        residency.size += num_tokens
        if residency.is_overdue:
            self._overdue_tokens += num_tokens
        else:
            self._add_to_totals(num_tokens, -1, residency.last_step)

    def _add_to_totals(self, num_tokens: int, after: int, until: int) -> None:
        """Add tokens to the totals of the steps after `after`, up to and including `until`."""
        first = bisect_right(self._last_steps, after)
        end = bisect_right(self._last_steps, until, first)
        if first < end:
            self._totals[first:end] = [total + num_tokens for total in self._totals[first:end]]
            self._max_total = None

    # --- calls ----------------------------------------------------------------------------

    def _mark_overdue(self) -> int:
        """Mark calls whose last step has passed; return the current step."""
        now, last_steps = self._get_step(), self._last_steps
        if last_steps and last_steps[0] < now:
            num_overdue = bisect_left(last_steps, now)
            overdue = self._residencies[:num_overdue]
            del last_steps[:num_overdue], self._totals[:num_overdue]
            del self._residencies[:num_overdue]
            for residency in overdue:
                residency.is_overdue = True
                self._overdue_tokens += residency.size
            self._max_total = None
            for residency in overdue:
                for part in residency.shared:
                    if not part.accounted_to.is_overdue:
                        self._account_to(part, residency)
        return now

    def _insert(self, residency: Residency) -> None:
        if residency.is_overdue:
            self._overdue_tokens += residency.size
            return
        outlasted = self._outlasted(residency.last_step, residency.shared)
        totals, last = self._totals_with(residency.last_step, residency.size, outlasted)
        for part in outlasted:
            part.accounted_to.size -= part.num_tokens
            residency.size += part.num_tokens
            part.accounted_to = residency
        index = len(totals)
        totals.append(last)
        self._totals[:index] = totals
        self._last_steps.insert(index, residency.last_step)
        self._residencies.insert(index, residency)
        self._max_total = None

    def _delete(self, residency: Residency) -> None:
        if residency.is_overdue:
            self._overdue_tokens -= residency.size
            return
        last_steps, totals = self._last_steps, self._totals
        end = bisect_right(last_steps, residency.last_step)
        index = self._index_of(residency, end)
        offset = residency.size - residency.last_step
        totals[:end] = [each - offset for each in map(sub, totals[:end], last_steps)]
        del last_steps[index], totals[index], self._residencies[index]
        self._max_total = None

    def _postpone(self, residency: Residency, last_step: int) -> None:
        """Move the last step of a call: it holds less until the former one, and stays after it."""
        last_steps, totals = self._last_steps, self._totals
        delay, offset = last_step - residency.last_step, residency.size - last_step
        first = bisect_right(last_steps, residency.last_step)
        end = bisect_right(last_steps, last_step, first)
        index = self._index_of(residency, first)
        last = self._total_in(last_step) + residency.size
        totals[:end] = [
            *[each - delay for each in totals[:first]],
            *[each + offset for each in map(add, totals[first:end], last_steps[first:end])],
            last,
        ]
        last_steps.insert(end, last_step)
        self._residencies.insert(end, residency)
        del last_steps[index], totals[index], self._residencies[index]
        residency.last_step = last_step
        self._max_total = None

    def _index_of(self, residency: Residency, end: int) -> int:
        """Return a call's index, given the end of the range of calls with its last step."""
        index = end - 1
        while self._residencies[index] is not residency:
            index -= 1
        return index

    # --- totals ---------------------------------------------------------------------------

    def _total_in(self, step: int) -> int:
        """Return the tokens that all calls hold in a future step."""
        index = bisect_left(self._last_steps, step)
        if index == len(self._last_steps):
            return 0
        num_running = len(self._last_steps) - index
        return self._totals[index] - num_running * (self._last_steps[index] - step)

    def _totals_with(
        self, last_step: int, size: int, outlasted: list[SharedResidency]
    ) -> tuple[list[int], int]:
        """Return the totals with one more call.

        The call accounts for each outlasted part once that part's present reader has ended.

        Returns:
            The totals in each last step up to the call's own, and the total in its own.
        """
        last_steps, totals = self._last_steps, self._totals
        # In a step s the call holds size - (last_step - s) = offset + s tokens.
        offset = size - last_step
        end = bisect_right(last_steps, last_step)
        found: list[int] = []
        for part in sorted(outlasted, key=lambda part: part.accounted_to.last_step):
            begin = len(found)
            cut = bisect_right(last_steps, part.accounted_to.last_step, begin, end)
            found += [offset + each for each in map(add, totals[begin:cut], last_steps[begin:cut])]
            offset += part.num_tokens
        begin = len(found)
        found += [offset + each for each in map(add, totals[begin:end], last_steps[begin:end])]
        return found, self._total_in(last_step) + offset + last_step


def _end_of(residency: Residency) -> float:
    """Return the step in which a call ends, for comparison; unknown for overdue calls."""
    return float("inf") if residency.is_overdue else residency.last_step
