"""How often, how soon and for how long a request is repeated."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from .problems import ServerUnreachableError

GRACE_S: Final = 2.0
"""How long the reply of a call may be late: the time limit of the call plus the way."""

CANCEL_TIMEOUT_S: Final = 1.0
"""How long a caller that has been interrupted waits for the cancellation of its program."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, how soon and for how long a request is repeated.

    A refused request (429, 502, 503, 504) is repeated up to `max_retries` times. If a busy server
    refuses a program (`queue.full`), the program is submitted again at the times that the server
    names, any number of times. Both kinds of retries end `refused_timeout_s` after the first
    refusal. A request without an answer is repeated until the server was unreachable for
    `unreachable_timeout_s`, long enough for a restart. For a server that never answered
    this client, which is most likely not running, the limit is `first_contact_timeout_s`.
    """

    max_retries: int = 4
    """Retries of a refused request. 0 disables the retries of unreachable servers, too."""
    base_delay_s: float = 0.1
    """Delay before the first retry. Each further retry doubles the delay."""
    max_delay_s: float = 2.0
    max_retry_after_s: float = 60.0
    """Longest Retry-After to wait for; beyond it the refusal is raised at once."""
    refused_timeout_s: float = 600.0
    unreachable_timeout_s: float = 15.0
    first_contact_timeout_s: float = 2.0
    noise: random.Random = field(default_factory=random.Random)
    """Source of the jitter."""
    clock: Callable[[], float] = time.monotonic
    end_s: float | None = None
    """Time of `clock` at which the caller stops waiting. None: no such time."""

    def within(self, wait_s: float) -> Retry:
        """Return this policy for a caller that waits at most `wait_s`.

        `first_contact_timeout_s` stays the minimum, to survive a short interruption.
        """
        limit_s = max(wait_s, self.first_contact_timeout_s)
        return replace(
            self,
            unreachable_timeout_s=min(self.unreachable_timeout_s, limit_s),
            refused_timeout_s=min(self.refused_timeout_s, limit_s),
            max_retry_after_s=min(self.max_retry_after_s, limit_s),
        )

    def bounded(self, timeout_s: float | None) -> Retry:
        """Return this policy for a call that takes at most `timeout_s`, or itself for None.

        Also limits `first_contact_timeout_s`, unlike `within`.
        """
        if timeout_s is None:
            return self
        first_s = min(self.first_contact_timeout_s, timeout_s)
        return replace(self, first_contact_timeout_s=first_s).within(timeout_s)

    def from_now(self, timeout_s: float | None) -> Retry:
        """Return this policy for a call that begins now and takes at most `timeout_s`.

        Also limits how long a reply is waited for, unlike `bounded`. None: without a limit.
        """
        if timeout_s is None:
            return self
        return replace(self.bounded(timeout_s), end_s=self.clock() + timeout_s)

    def reply_timeout_s(self) -> float | None:
        """Return how long to wait for a reply to a request that is sent now; None: no limit.

        A server ends a call at the call's own time limit. `GRACE_S` is for that reply.
        """
        return None if self.end_s is None else max(self.end_s - self.clock(), 0.0) + GRACE_S

    def delay_s(self, attempt: int, retry_after_s: float | None = None) -> float:
        """Return the jittered delay before retry `attempt` (from 0), at least `retry_after_s`."""
        max_s = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(attempt, 60))
        if retry_after_s is None:
            # At least half, so that no run of short draws spends all retries at once.
            return self.noise.uniform(max_s / 2, max_s)
        return retry_after_s + self.noise.uniform(0, max_s) / 4


class OutageTimer:
    """Measures how long a server has been unreachable for one request or stream."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self.num_tries = 0
        """Tries since the server was lost."""
        self._start_s = 0.0

    def reset(self) -> None:
        """Record that the server has answered."""
        self.num_tries = 0

    def next_delay_s(self, failure: ServerUnreachableError) -> float:
        """Return the delay before the next try.

        Raises:
            ServerUnreachableError: `failure`, if the outage has lasted too long.
        """
        retry, now_s = self._retry, self._retry.clock()
        if self.num_tries == 0:
            self._start_s = now_s
        timeout_s = (
            retry.unreachable_timeout_s if failure.is_known else retry.first_contact_timeout_s
        )
        left_s = timeout_s - (now_s - self._start_s)
        if retry.end_s is not None:
            left_s = min(left_s, retry.end_s - now_s)
        if left_s <= 0 or retry.max_retries == 0:
            raise failure
        delay_s = min(left_s, retry.delay_s(self.num_tries))
        self.num_tries += 1
        return delay_s
