"""Planned calls that an application makes side by side: the items of one stage.

The application computes the values of siblings in threads or tasks of its own, a millisecond or two
after each other. A call that reaches an engine after the others may have to wait for a whole step.
So the run delays the first call that is ready until its siblings are ready. The call waits no
longer than the plan has existed, so waiting at most doubles the time until the request is sent. It
never waits longer than `MAX_WAIT_S`.

Out of scope: values that depend on answers. Siblings wait once, for their first values.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Container, Iterable, Set
from contextlib import AbstractContextManager
from typing import Any, Final

from .planned_call import PlannedCall

MAX_WAIT_S: Final = 0.003
"""How long a value waits at most for those of siblings."""


class Siblings:
    """The calls of one plan that the same part of an application makes."""

    def __init__(self, calls: Iterable[PlannedCall], planned_at_s: float) -> None:
        """Observe the calls of one part.

        Args:
            calls: calls that read values that the application computes.
            planned_at_s: time of the plan.
        """
        self._reads = [call.reads for call in calls]
        self._planned_at_s = planned_at_s
        self._until_s: float | None = None
        """When the first values wait no longer."""

    @property
    def has_begun(self) -> bool:
        """Whether at least one call has all its values."""
        return self._until_s is not None

    def wait_s(self, known: Container[str], now_s: float) -> float:
        """Return how long the values of siblings that are known should wait for the others.

        Args:
            known: variables with a value.
            now_s: seconds on the clock of `planned_at_s`.
        """
        are_ready = [all(name in known for name in reads) for reads in self._reads]
        if not any(are_ready):
            return 0.0
        if self._until_s is None:
            self._until_s = now_s + min(now_s - self._planned_at_s, MAX_WAIT_S)
        return 0.0 if all(are_ready) else max(0.0, self._until_s - now_s)


class SiblingGroups:
    """The siblings of one run whose first values are not sent yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: list[Siblings] = []

    def add(self, calls: Iterable[PlannedCall], known: Set[str], answers: Container[str]) -> None:
        """Add the calls of one plan.

        Args:
            calls: planned calls.
            known: variables with a value.
            answers: variables that calls write, which are known much later.
        """
        by_place: dict[str, list[PlannedCall]] = {}
        for call in calls:
            missing = call.reads - known
            if missing and not any(name in answers for name in missing):
                by_place.setdefault(call.place, []).append(call)
        now_s = self._clock()
        self._groups += [Siblings(each, now_s) for each in by_place.values() if len(each) > 1]

    def wait_s(self, known: Container[str]) -> float:
        """Return how long the known values should wait, and forget siblings that wait no longer."""
        if not self._groups:
            return 0.0
        now_s = self._clock()
        left: list[Siblings] = []
        longest_s = 0.0
        for group in self._groups:
            wait_s = group.wait_s(known, now_s)
            longest_s = max(longest_s, wait_s)
            if wait_s or not group.has_begun:
                left.append(group)
        self._groups = left
        return longest_s


class SiblingWait:
    """The wait of the thread that sends values, ended by the thread that adds the last one."""

    def __init__(self, wait_s: Callable[[], float], lock: AbstractContextManager[object]) -> None:
        """Args: `wait_s` returns how long the known values should wait; `lock` protects it."""
        self._wait_s = wait_s
        self._lock = lock
        self._are_known: asyncio.Event | None = None
        """Set while values wait."""

    async def run(self) -> None:
        """Wait until the values of all siblings are known, or they take too long."""
        with self._lock:
            wait_s = self._wait_s()
            if not wait_s:
                return
            are_known = self._are_known = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(are_known.wait(), wait_s)
        with self._lock:
            self._are_known = None

    def end_if_known(self, start_task: Callable[[Callable[[], Any]], None]) -> None:
        """End the wait if no value is missing. Called under the lock, from any thread.

        Args:
            start_task: starts a coroutine function in the thread that waits.
        """
        are_known = self._are_known
        if are_known is None or self._wait_s():
            return
        self._are_known = None

        async def end() -> None:
            are_known.set()

        with contextlib.suppress(RuntimeError):  # the client is closed
            start_task(end)
