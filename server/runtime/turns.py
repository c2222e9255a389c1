"""Turns of the event loop, shared by all programs.

A turn has a number of steps (see `program.expressions.budget`). A program whose work would take
longer continues in a later turn. Requests, timers, signals and engines are served between turns.

Responsibility: decide when a program may work on the event loop, and run long computations in a
thread.
Out of scope: what the work is.

Invariants: a turn exceeds its steps by one piece of work at most. Programs that wait for a turn
continue in order of arrival.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

STEPS_PER_TURN: Final = 5_000
"""About 5 to 10 ms."""
NUM_THREADS: Final = 1
"""More threads would delay the event loop, because all threads share the GIL."""
SWITCH_INTERVAL_S: Final = 0.0005
"""`sys.setswitchinterval` during a long computation. The event loop releases the GIL at each system
call; with the default of 5 ms, it would wait for the GIL for 0.1 s per request in total. A short
interval slows short programs by a few percent, so it is set only during a long computation."""


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self.num_turns = 0
        """Turns in which a program has worked."""
        self.max_steps = 0
        """Steps of the longest turn so far."""
        self._left = STEPS_PER_TURN
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="work")
        self._usual_switch_s = sys.getswitchinterval()

    @property
    def has_ended(self) -> bool:
        """Whether the steps of this turn are used up."""
        return self._left <= 0

    def spend(self, steps: int) -> None:
        """Count steps of this turn."""
        self._left -= steps
        if not self._is_scheduled:
            self._schedule()

    def call_later(self, work: Callable[[], None]) -> None:
        """Call a function in the next turn that has steps left."""
        self._waiting.append(work)
        if not self._is_scheduled:
            self._schedule()

    async def wait_for_turn(self) -> None:
        """Wait for a later turn if this one has ended."""
        if self.has_ended:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call_later(lambda: None if turn.done() else turn.set_result(None))
            await turn

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a turn. The event loop has polled for input since the last one."""
        self.num_turns += 1
        self.max_steps = max(self.max_steps, STEPS_PER_TURN - self._left)
        self._left = STEPS_PER_TURN
        self._is_scheduled = False
        try:
            while self._waiting and not self.has_ended:
                self._waiting.popleft()()
        finally:
            if self._waiting and not self._is_scheduled:
                self._schedule()

    async def in_thread(self, compute: Callable[[], T]) -> T:
        """Return the result of a long computation, which runs in a thread."""

        def compute_and_switch() -> T:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            try:
                return compute()
            finally:
                sys.setswitchinterval(self._usual_switch_s)

        return await asyncio.get_running_loop().run_in_executor(self._threads, compute_and_switch)

    def stop(self) -> None:
        """Drop all waiting computations. A running computation continues to its end."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
