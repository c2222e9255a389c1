"""Room for LLM calls: how many may be open at a time, over all programs, and who may still come.

A program comes in or is refused at once. Items of maps can wait instead: maps whose items make
calls stand in one line and take turns, a share of what is left at a time. They leave a part
of the room to programs, or a wide map would fill whatever gets free, and everybody else would be
refused as long as it runs.

Knows numbers and who waits. Refuses to know graphs: programs say how many of their calls are
open, maps how many an item makes.

Kept true: `num_calls` is what all programs together have open; whoever is first in line gets
the next room that is large enough, and nobody takes it before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from ..program.errors import UnavailableError
from .execution import Execution

MAPS_PART = 0.75
"""Of the room, what items of maps may fill."""
AT_ONCE_PART = 1 / 16
"""Of that, what has to be free before any of them come again: not one by one, each time that a
call ends, as every growth of a graph costs something."""


class Guest(Protocol):
    """A map whose items wait for room."""

    @property
    def num_calls(self) -> int:
        """LLM calls that an item may have open, at least 1."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether its items need not come any more."""
        ...

    def admit(self, num_items: int) -> bool:
        """Let so many items come, or fewer; returns whether more want to."""
        ...


class Room:
    """Calls that were accepted and have not ended, and their bound."""

    def __init__(self, max_calls: int) -> None:
        self.num_calls = 0
        """Calls that have not ended."""
        self._max_calls = max_calls
        self._for_maps = max(1, int(max_calls * MAPS_PART))
        self._num_claimed = 0
        self._counts: dict[str, tuple[int, int]] = {}
        self._line: deque[Guest] = deque()
        self._is_full = False
        """The first in line found too little, and waits until there is enough for several."""
        self._is_scheduled = False
        self._num_gone = 0
        """Programs that left since the line was looked through for guests of theirs."""

    def enter(self, execution: Execution) -> None:
        """A program came."""
        self._counts[execution.id] = (0, 0)
        self.count(execution)

    def count(self, execution: Execution) -> None:
        """Calls of a program came or ended; nothing to do if it is not here, or not any more."""
        if execution.id in self._counts:
            self._set(execution.id, (execution.num_open_calls, execution.num_claimed_calls))

    def leave(self, execution: Execution) -> None:
        """A program has ended, or was not accepted after all."""
        if execution.id in self._counts:
            self._set(execution.id, (0, 0))
            del self._counts[execution.id]
            self._tidy()

    def _set(self, program: str, counts: tuple[int, int]) -> None:
        (num_open, num_claimed), before = counts, self._counts[program]
        self._counts[program] = counts
        self.num_calls += num_open - before[0]
        self._num_claimed += num_claimed - before[1]
        if self._line and sum(counts) < sum(before):
            self._schedule()

    # --- programs -------------------------------------------------------------------------

    def check(self, more: int) -> None:
        """Make sure that so many more calls may come in.

        Raises:
            UnavailableError: `queue.full` (429).
        """
        if self.num_calls + more > self._max_calls:
            raise UnavailableError(
                "queue.full",
                f"{self.num_calls} calls are accepted and not ended, {more} more exceed the "
                f"limit of {self._max_calls}",
                retry_after_s=2,
                status=429,
            )

    # --- items of maps --------------------------------------------------------------------

    def ask(self, guest: Guest) -> None:
        """Let items come: the first at once if there is room and nobody waits, the others, or
        all, when it is their turn.
        """
        if self._line or not self._fits(guest) or self._admit(guest):
            self._line.append(guest)
            self._schedule()

    def _tidy(self) -> None:
        """Let go of guests that are gone, once they may be half of the line."""
        self._num_gone += 1
        if 2 * self._num_gone > len(self._line):
            self._line = deque(guest for guest in self._line if not guest.is_gone)
            self._num_gone = 0

    def _left(self) -> int:
        return self._for_maps - self.num_calls - self._num_claimed

    def _fits(self, guest: Guest) -> bool:
        """Whether an item may come; one that is larger than the room, when nothing else is here."""
        return self._left() >= min(guest.num_calls, self._for_maps)

    def _admit(self, guest: Guest) -> bool:
        share = self._left() // (len(self._line) + 1)
        return guest.admit(max(1, share // guest.num_calls))

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Whoever is first in line comes in, one of them in a turn of the loop."""
        self._is_scheduled = False
        while self._line and self._line[0].is_gone:
            self._line.popleft()
        if self._is_full and self._left() < self._for_maps * AT_ONCE_PART:
            return
        self._is_full = bool(self._line) and not self._fits(self._line[0])
        if not self._line or self._is_full:
            return
        guest = self._line.popleft()
        try:
            if self._admit(guest):
                self._line.append(guest)
        finally:
            self._schedule()  # a mistake in one program holds up no other
