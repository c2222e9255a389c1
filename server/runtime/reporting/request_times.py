"""The time that a single request takes outside the engines, measured on the server's requests.

Responsibility: the medians over the last requests that ran alone and made one call.
Out of scope: the network, and the time on engines (`engines.step_costs`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

MAX_REQUESTS = 32
"""Requests whose median counts: the newest ones, because a server's speed changes with its load."""
MIN_REQUESTS = 8
"""Requests that must have been measured. The first ones of a process are slower."""


class RequestTimes(NamedTuple):
    """Seconds of a request outside the engines, all at least 0."""

    busy_s: float = 0.0
    """Processor time of the event loop, which computes for one request at a time."""
    wait_s: float = 0.0
    """The rest, such as commits of the journal. Requests wait at the same time."""


class CallCounts(NamedTuple):
    """The calls of all programs."""

    num_running: int
    """Calls that are on an engine."""
    num_ended: int
    """Calls that have been on an engine since the start."""


class RequestTimeMeter:
    """Measures requests that run alone."""

    def __init__(
        self,
        count_calls: Callable[[], CallCounts],
        *,
        now: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.thread_time,
    ) -> None:
        """Create a meter.

        Args:
            count_calls: returns the numbers of calls.
            now: seconds on a monotonic clock.
            busy: seconds of processor time of this thread.
        """
        self._count_calls = count_calls
        self._now = now
        self._busy = busy
        self._num_started = 0
        self._num_open = 0
        self._found: deque[RequestTimes] = deque(maxlen=MAX_REQUESTS)

    @property
    def times(self) -> RequestTimes:
        """The medians; zeros before `MIN_REQUESTS` requests."""
        if len(self._found) < MIN_REQUESTS:
            return RequestTimes()
        busy_s, wait_s = zip(*self._found, strict=True)
        return RequestTimes(statistics.median(busy_s), statistics.median(wait_s))

    @contextmanager
    def measure(self) -> Iterator[RequestTimer]:
        """Measure a request from now, or from the last `begin` of its timer, until the block ends.

        It counts if its `engine_s` was set and it was alone: no other measured request was open
        meanwhile, and no other call was on an engine.
        """
        before = self._count_calls()
        is_alone = not self._num_open and not before.num_running
        self._num_open += 1
        self._num_started += 1
        number, timer = self._num_started, RequestTimer(self._now, self._busy)
        try:
            yield timer
        finally:
            self._num_open -= 1
        is_alone &= number == self._num_started
        is_alone &= self._count_calls() == CallCounts(0, before.num_ended + 1)
        if is_alone and timer.engine_s is not None:
            self._found.append(timer.times(timer.engine_s))


class RequestTimer:
    """A request that is being measured."""

    def __init__(self, now: Callable[[], float], busy: Callable[[], float]) -> None:
        self.engine_s: float | None = None
        """Seconds that its only call was on an engine; None if it has not ended or has several."""
        self._now = now
        self._busy = busy
        self.begin()

    def begin(self) -> None:
        """Forget the time so far: the body has arrived only now."""
        self._at_s, self._busy_at_s = self._now(), self._busy()

    def times(self, engine_s: float) -> RequestTimes:
        """Return the times since `begin`, of which the call was on an engine for `engine_s`."""
        outside_s = max(self._now() - self._at_s - engine_s, 0.0)
        # The event loop also computes while the engine does, for the text of the output.
        busy_s = min(self._busy() - self._busy_at_s, outside_s)
        return RequestTimes(busy_s, outside_s - busy_s)
