"""The bounds on accepted work: programs, and the estimated wait of a new program.

The wait is estimated from the open calls that would go before those of the new program, beyond
those that the engines run at once, and the average time of recent calls on an engine. A program
that a reader waits for may wait for a share of its own duration, a background program for
`max_wait_s`.

Out of scope: the number of calls (`call_quota`), and which calls go first (`backlog`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import NamedTuple

from ...program.errors import UnavailableError

WEIGHT = 0.05
"""Weight of a call in the average."""
MIN_CALLS = 16
"""Calls that must have ended before the average is used."""
MAX_RETRY_AFTER_S = 60.0
WAIT_SHARE = 0.5
"""Part of its own duration that a program with a reader may wait."""
MIN_WAIT_S = 2.0
"""Any program may wait this long: bursts of short requests are no overload."""


class LoadLimits(NamedTuple):
    """Bounds on accepted work. None: without a bound."""

    max_programs: int
    max_wait_s: float | None


class Newcomer(NamedTuple):
    """A program, or an append, that asks to be accepted."""

    num_calls: int = 0
    depth: int = 0
    """LLM calls of its longest chain."""
    is_background: bool = False
    """Whether no reader waits for it: all of its objectives are `throughput`."""


class Load(NamedTuple):
    """What a server has accepted."""

    num_programs: int
    num_calls: int
    """Open calls of all programs."""
    num_sequences: int
    """Calls that the engines run at once."""


class LoadMonitor:
    """Estimates how long a new program waits, and compares the load with its limits."""

    def __init__(
        self,
        limits: LoadLimits,
        *,
        now: Callable[[], float] = time.monotonic,
        noise: random.Random | None = None,
    ) -> None:
        """Create a monitor.

        Args:
            limits: the bounds.
            now: seconds on a monotonic clock.
            noise: spreads the retries of refused programs.
        """
        self.call_s = 0.0
        """Average seconds of a call on an engine."""
        self._limits = limits
        self.num_observed = 0
        """Calls that have been on an engine."""
        self._now = now
        self._noise = noise or random.Random()
        self._refused_s = 0.0
        """Engine time of the programs that were refused, less the time since then."""
        self._refused_at_s = 0.0

    def observe_call(self, seconds: float) -> None:
        """Note how long a call was on an engine."""
        self.num_observed += 1
        weight = max(WEIGHT, 1 / self.num_observed)
        self.call_s += weight * (seconds - self.call_s)

    def wait_s(self, num_calls: int, num_sequences: int) -> float:
        """Return the estimated wait of a new program.

        Args:
            num_calls: open calls that go before those of the program.
            num_sequences: calls that the engines run at once.
        """
        if self.num_observed < MIN_CALLS or not num_sequences:
            return 0.0
        return max(0, num_calls - num_sequences) * self.call_s / num_sequences

    def limit_s(self, newcomer: Newcomer) -> float:
        """Return how long a program may wait."""
        max_wait_s = self._limits.max_wait_s
        if max_wait_s is None:
            return math.inf
        if newcomer.is_background:
            return max_wait_s
        return min(max_wait_s, max(MIN_WAIT_S, WAIT_SHARE * newcomer.depth * self.call_s))

    def is_busy(self, load: Load) -> bool:
        """Return whether the wait is so long that the length of a program decides on its
        acceptance.
        """
        return self.wait_s(load.num_calls, load.num_sequences) > MIN_WAIT_S

    def check(self, newcomer: Newcomer, load: Load, num_ahead: Callable[[], int]) -> None:
        """Check that a new program can be accepted.

        Args:
            newcomer: the program.
            load: what was accepted before.
            num_ahead: returns how many of the open calls go before those of the program.

        Raises:
            UnavailableError: `queue.full` (429).
        """
        limits = self._limits
        if load.num_programs >= limits.max_programs:
            raise UnavailableError(
                "queue.full",
                f"{load.num_programs} programs are open, the limit is {limits.max_programs}: retry "
                "later",
                retry_after_s=2,
                status=429,
            )
        limit_s = self.limit_s(newcomer)
        if self.wait_s(load.num_calls, load.num_sequences) <= limit_s:
            return
        wait_s = self.wait_s(num_ahead(), load.num_sequences)
        if wait_s > limit_s:
            work_s = newcomer.num_calls * self.call_s / load.num_sequences
            raise UnavailableError(
                "queue.full",
                f"a new program would wait about {wait_s:,.1f} s, the limit for this one is "
                f"{limit_s:,.1f} s: retry later, or submit it with the objective `throughput` "
                "(OpenAI clients: service_tier='flex'), which may wait longer",
                retry_after_s=self._retry_after_s(wait_s - limit_s, work_s),
                status=429,
            )

    def _retry_after_s(self, excess_s: float, work_s: float) -> int:
        """Return when to try again: spread over the time that all refused programs take."""
        now = self._now()
        before_s = max(0.0, self._refused_s - (now - self._refused_at_s))
        self._refused_s, self._refused_at_s = min(MAX_RETRY_AFTER_S, before_s + work_s), now
        asked_s = excess_s + self._noise.uniform(0.0, before_s)
        return math.ceil(min(MAX_RETRY_AFTER_S, asked_s))
