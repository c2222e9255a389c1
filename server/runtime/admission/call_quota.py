"""The quota of LLM calls across all programs, and the map items that wait for it.

A new program is accepted or rejected (429) immediately. Items of maps with LLM calls queue
instead: their maps share the free quota round-robin, and may use at most `MAP_SHARE` of it, so
that a wide map cannot block new programs.

Out of scope: graphs. A program reports how many calls it has open, a map how many an item has.

Invariants: `num_calls` is the number of open calls of all programs. Free quota goes to the first
map in the queue, once one of its items fits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...program.errors import UnavailableError
from ..program_state import ProgramState

MAP_SHARE = 0.75
"""Share of the quota that map items may use."""
MIN_FREE_SHARE = 1 / 16
"""Part of that share that must be free before more items are admitted. Admitting one item per
ended call would be slower, because every extension of a graph has a fixed cost."""


class QuotaWaiter(Protocol):
    """A map whose items wait for quota."""

    @property
    def num_calls(self) -> int:
        """LLM calls that an item may have open; at least 1."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether no more items need to be admitted."""
        ...

    def admit(self, num_items: int) -> bool:
        """Add up to `num_items` items; return whether items remain."""
        ...


class CallQuota:
    """Counts the open calls of all programs against a limit."""

    def __init__(self, max_calls: int) -> None:
        self.num_calls = 0
        """Calls that have not ended."""
        self._max_calls = max_calls
        self._map_limit = max(1, int(max_calls * MAP_SHARE))
        self._num_reserved = 0
        self._counts: dict[str, tuple[int, int]] = {}
        self._states: dict[str, ProgramState] = {}
        self._queue: deque[QuotaWaiter] = deque()
        self._is_blocked = False
        """Whether the first map in the queue waits until several items fit."""
        self._is_scheduled = False
        self._num_removed = 0
        """Programs removed since the queue was last pruned."""

    def add(self, state: ProgramState) -> None:
        """Add a program."""
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
        if self._queue and sum(counts) < sum(before):
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
        """Admit items of a map: the first ones now if the queue is empty, the others in turn."""
        is_first = not self._queue and self._fits(waiter)
        has_more = self._admit(waiter) if is_first else True
        if has_more:
            self._queue.append(waiter)
            self._schedule()

    def _prune(self) -> None:
        """Remove maps that are gone, once they may be half of the queue."""
        self._num_removed += 1
        if 2 * self._num_removed > len(self._queue):
            self._queue = deque(waiter for waiter in self._queue if not waiter.is_gone)
            self._num_removed = 0

    def _num_free(self) -> int:
        return self._map_limit - self.num_calls - self._num_reserved

    def _fits(self, waiter: QuotaWaiter) -> bool:
        """Whether an item fits. An item larger than the quota fits when the quota is unused."""
        return self._num_free() >= min(waiter.num_calls, self._map_limit)

    def _admit(self, waiter: QuotaWaiter) -> bool:
        share = self._num_free() // (len(self._queue) + 1)
        return waiter.admit(max(1, share // waiter.num_calls))

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Admit items of the first map in the queue, one map per turn of the event loop."""
        self._is_scheduled = False
        while self._queue and self._queue[0].is_gone:
            self._queue.popleft()
        if self._is_blocked and self._num_free() < self._map_limit * MIN_FREE_SHARE:
            return
        self._is_blocked = bool(self._queue) and not self._fits(self._queue[0])
        if not self._queue or self._is_blocked:
            return
        waiter = self._queue.popleft()
        try:
            if self._admit(waiter):
                self._queue.append(waiter)
        finally:
            self._schedule()  # an error in one program must not block the others
