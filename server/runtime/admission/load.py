"""The bounds on accepted work: programs, and the estimated wait of a new program.

The wait is estimated from the calls that are open, beyond those that the engines run at once, and
the average time of recent calls on an engine. Programs keep their place in line, so a new program
waits for the work before it.

Out of scope: the number of calls (`call_quota`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...program.errors import UnavailableError

WEIGHT = 0.05
"""Weight of a call in the average."""
MIN_CALLS = 16
"""Calls before the average is used."""
MAX_RETRY_AFTER_S = 60.0


class LoadLimits(NamedTuple):
    """Bounds on accepted work. None: without a bound."""

    max_programs: int
    max_wait_s: float | None


class LoadMonitor:
    """Estimates how long a new program waits, and compares the load with its limits."""

    def __init__(self, limits: LoadLimits) -> None:
        self._limits = limits
        self._call_s = 0.0
        self._num_observed = 0

    def observe_call(self, seconds: float) -> None:
        """Note how long a call was on an engine."""
        self._num_observed += 1
        weight = max(WEIGHT, 1 / self._num_observed)
        self._call_s += weight * (seconds - self._call_s)

    def wait_s(self, num_calls: int, num_sequences: int) -> float:
        """Return the estimated wait of a new program.

        Args:
            num_calls: open calls of all programs.
            num_sequences: calls that the engines run at once.
        """
        if self._num_observed < MIN_CALLS or not num_sequences:
            return 0.0
        return max(0, num_calls - num_sequences) * self._call_s / num_sequences

    def check(self, *, num_programs: int, num_calls: int, num_sequences: int) -> None:
        """Check that a new program can be accepted.

        Raises:
            UnavailableError: `queue.full` (429).
        """
        limits = self._limits
        if num_programs >= limits.max_programs:
            raise UnavailableError(
                "queue.full",
                f"{num_programs} programs are open, the limit is {limits.max_programs}: retry "
                "later",
                retry_after_s=2,
                status=429,
            )
        wait_s = self.wait_s(num_calls, num_sequences)
        if limits.max_wait_s is not None and wait_s > limits.max_wait_s:
            raise UnavailableError(
                "queue.full",
                f"a new program would wait about {wait_s:.1f} s, the limit is "
                f"{limits.max_wait_s:g} s: retry later",
                retry_after_s=min(MAX_RETRY_AFTER_S, math.ceil(wait_s - limits.max_wait_s)),
                status=429,
            )
