"""The quota of LLM calls across all programs, and the map items that wait for it.

A new program is accepted or rejected (429) immediately. Items of maps with LLM calls queue
instead: their maps share the free quota round-robin. Items are admitted while the open calls of
all programs take less than `BACKGROUND_SHARE` of the quota, or `READER_SHARE` if a reader waits for
the map's program. So a wide map cannot block new programs, and maps without a reader leave quota
for maps with one.

Out of scope: graphs. A program reports how many calls it has open, a map how many an item has.

Invariants: `num_calls` is the number of open calls of all programs. Free quota goes to the first
map of a queue, once one of its items fits; maps with a reader go before all others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...program.errors import UnavailableError
from ..program_state import ProgramState

BACKGROUND_SHARE = 3 / 4
"""Share of the quota up to which items are admitted if no reader waits for their program."""
READER_SHARE = 7 / 8
"""Share of the quota up to which items are admitted if a reader waits for their program."""
MIN_FREE_SHARE = 1 / 16
"""Part of a share that must be free before more items are admitted. Admitting one item per
ended call would be slower, because every extension of a graph has a fixed cost."""


class QuotaWaiter(Protocol):
    """A map whose items wait for quota."""

    @property
    def num_calls(self) -> int:
        """LLM calls that an item may have open; at least 1."""
        ...

    @property
    def num_waiting_calls(self) -> int:
        """LLM calls of all items that are not added yet."""
        ...

    @property
    def is_background(self) -> bool:
        """Whether no reader waits for the map's program."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether no more items need to be admitted."""
        ...

    def admit(self, num_items: int) -> bool:
        """Add up to `num_items` items; return whether items remain."""
        ...


class _MapQueue:
    """Maps that wait, in order, and the number of calls up to which their items are admitted."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self.maps: deque[QuotaWaiter] = deque()
        self.is_blocked = False
        """Whether the first map waits until several items fit."""
        self._num_left = 0
        """Maps at the front of the queue that still have to get the share of this round."""
        self._share = 0
        """Calls that each map of the round may add."""

    def share_of_first(self, num_free: int) -> int:
        """Return the calls that the first map may add; divide the free quota if a round begins."""
        if self._num_left == 0:
            self._num_left = len(self.maps)
            self._share = num_free // self._num_left
        return min(self._share, num_free)

    def end_round(self) -> None:
        """Divide the free quota again before the first map gets items."""
        self._num_left = 0

    def pop(self) -> QuotaWaiter:
        """Remove the first map, from the round as well."""
        self._num_left = max(0, self._num_left - 1)
        return self.maps.popleft()

    def prune(self) -> None:
        """Remove maps that are gone, from the round as well."""
        first = itertools.islice(self.maps, self._num_left)
        self._num_left = sum(not waiter.is_gone for waiter in first)
        self.maps = deque(waiter for waiter in self.maps if not waiter.is_gone)


class CallQuota:
    """Counts the open calls of all programs against a limit."""

    def __init__(self, max_calls: int) -> None:
        self.num_calls = 0
        """Calls that have not ended."""
        self.num_added = 0
        """Programs that were ever added."""
        self._max_calls = max_calls
        self._num_reserved = 0
        self._counts: dict[str, tuple[int, int]] = {}
        self._states: dict[str, ProgramState] = {}
        self._with_reader = _MapQueue(int(max_calls * READER_SHARE))
        self._in_background = _MapQueue(int(max_calls * BACKGROUND_SHARE))
        self._is_scheduled = False
        self._num_removed = 0
        """Programs removed since the queues were last pruned."""

    def add(self, state: ProgramState) -> None:
        """Add a program."""
        self.num_added += 1
        self._counts[state.id] = (0, 0)
        self._states[state.id] = state
        self.count(state)

    def count(self, state: ProgramState) -> None:
        """Update the calls of a program; does nothing for a program that was not added."""
        if state.id in self._counts:
            self._set(state.id, (state.num_open_calls, state.num_reserved_calls))

    def remove(self, state: ProgramState) -> None:
        """Remove a program that has ended or was not accepted."""
        if state.id in self._counts:
            self._set(state.id, (0, 0))
            del self._counts[state.id], self._states[state.id]
            self._prune()

    def _set(self, program: str, counts: tuple[int, int]) -> None:
        (num_open, num_reserved), before = counts, self._counts[program]
        self._counts[program] = counts
        self.num_calls += num_open - before[0]
        self._num_reserved += num_reserved - before[1]
        if self._num_waiting and sum(counts) < sum(before):
            self._schedule()

    # --- programs -------------------------------------------------------------------------

    def check(self, more: int) -> None:
        """Check that a number of further calls fits.

        Raises:
            UnavailableError: `queue.full` (429).
        """
        if self.num_calls + more > self._max_calls:
            raise UnavailableError(
                "queue.full",
                f"{self.num_calls} calls are open; {more} more would exceed the limit of "
                f"{self._max_calls}: retry later",
                retry_after_s=2,
                status=429,
            )

    def num_calls_of(self, is_counted: Callable[[ProgramState], bool]) -> int:
        """Return the number of open calls of some programs."""
        return sum(
            num_open
            for program, (num_open, _) in self._counts.items()
            if num_open and is_counted(self._states[program])
        )

    # --- items of maps --------------------------------------------------------------------

    def request(self, waiter: QuotaWaiter) -> None:
        """Admit items of a map: the first ones now if no map goes before it, the others in turn."""
        queue = self._queue_of(waiter)
        is_first = not queue.maps and not self._with_reader.maps and self._fits(waiter, queue)
        has_more = _admit(waiter, self._num_free(queue)) if is_first else True
        if has_more:
            queue.maps.append(waiter)
            self._schedule()

    def _queue_of(self, waiter: QuotaWaiter) -> _MapQueue:
        return self._in_background if waiter.is_background else self._with_reader

    @property
    def _num_waiting(self) -> int:
        return len(self._with_reader.maps) + len(self._in_background.maps)

    def _prune(self) -> None:
        """Remove maps that are gone, once they may be half of the waiting ones."""
        self._num_removed += 1
        if 2 * self._num_removed > self._num_waiting:
            self._with_reader.prune()
            self._in_background.prune()
            self._num_removed = 0

    def _num_free(self, queue: _MapQueue) -> int:
        return queue.limit - self.num_calls - self._num_reserved

    def _fits(self, waiter: QuotaWaiter, queue: _MapQueue) -> bool:
        """Whether an item fits. An item larger than the share fits when the quota is unused."""
        return self._num_free(queue) >= min(waiter.num_calls, queue.limit)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Admit items of the first map that may have some, one map per turn of the event loop."""
        self._is_scheduled = False
        queue = self._next_queue()
        if queue is None:
            return
        share = queue.share_of_first(self._num_free(queue))
        waiter = queue.pop()
        try:
            if _admit(waiter, share):
                self._queue_of(waiter).maps.append(waiter)
        finally:
            self._schedule()  # an error in one program must not block the others

    def _next_queue(self) -> _MapQueue | None:
        """Return the queue whose first map gets items now; None if no map gets any.

        Maps without a reader wait for all maps with one.
        """
        background = self._in_background
        while background.maps and not background.maps[0].is_background:  # its reader came later
            self._with_reader.maps.append(background.pop())
        for queue in (self._with_reader, self._in_background):
            while queue.maps and queue.maps[0].is_gone:
                queue.pop()
            if not queue.maps:
                queue.is_blocked = False
                continue
            num_needed = min(queue.limit * MIN_FREE_SHARE, queue.maps[0].num_waiting_calls)
            if queue.is_blocked and self._num_free(queue) < num_needed:
                return None
            queue.is_blocked = not self._fits(queue.maps[0], queue)
            if queue.is_blocked:
                queue.end_round()
                return None
            return queue
        return None


def _admit(waiter: QuotaWaiter, share: int) -> bool:
    return waiter.admit(max(1, share // waiter.num_calls))
