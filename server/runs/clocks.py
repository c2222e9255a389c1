"""What ends by the clock: nodes, jobs, whole programs, and programs that nobody reads.

Arms timers and says what has run out; what follows is the program's business.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from ..program.errors import ConureError, RunError
from ..program.ir import Client, Placed
from ..program.status import Phase, Problem
from .execution import Execution
from .feed import Feed
from .outbox import Outbox

LEASE_S = 10.0
"""How long an attached program lives without a reader."""
NUM_LOOKS = 5
"""How often it is looked for one in that time."""
DEADLINE, LEASE = "the deadline", "the lease"
"""Timers of a whole program, by names that no node can have."""


class ClockHost(Protocol):
    """Whom the clocks tell."""

    is_over: bool

    def fail(self, node_id: str, error: ConureError) -> None:
        """A node is out of time."""
        ...

    def stop(self, phase: Phase, problem: Problem) -> None:
        """The whole program is out of time."""
        ...


class Clocks:
    """The timers of one program."""

    def __init__(
        self, execution: Execution, host: ClockHost, *, feed: Feed, outbox: Outbox
    ) -> None:
        self._execution = execution
        self._host = host
        self._feed = feed
        self._outbox = outbox
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._num_unread = 0
        """Looks since somebody read the program. Looks are counted and not seconds: while this
        process is suspended nobody can read, and nobody is gone for that."""

    def start(self) -> None:
        """The program starts: arm what concerns all of it."""
        loop = asyncio.get_running_loop()
        execution = self._execution
        deadline_s = execution.options.deadline_s
        if deadline_s is not None:
            left_s = max(execution.created_at + deadline_s - time.time(), 0)
            self._timers[DEADLINE] = loop.call_later(left_s, self._deadline, deadline_s)
        for name, job in execution.graph.jobs.items():
            if job.timeout_s is not None:
                self._timers[f"job {name}"] = loop.call_later(
                    job.timeout_s, self._job_timeout, name
                )
        if not execution.options.detach:
            self._check_lease()

    def touch(self) -> None:
        """Somebody asked about the program; it need not be for long."""
        self._num_unread = 0

    def watch(self, node: Placed) -> None:
        """A node starts. A client step counts the time of each question by itself."""
        if node.timeout_s is not None and not isinstance(node, Client):
            self._timers[node.id] = asyncio.get_running_loop().call_later(
                node.timeout_s, self._node_timeout, node.id, node.timeout_s
            )

    def forget(self, node_id: str) -> None:
        """A node has ended; safe to repeat."""
        if (timer := self._timers.pop(node_id, None)) is not None:
            timer.cancel()

    def stop(self) -> None:
        """The program has ended; safe to repeat."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _node_timeout(self, node_id: str, timeout_s: float) -> None:
        del self._timers[node_id]
        message = f"node {node_id} took over {timeout_s:g} s"
        self._host.fail(node_id, RunError("node.timeout", message))

    def _job_timeout(self, job: str) -> None:
        for node_id, state in list(self._execution.nodes.items()):
            if self._host.is_over:
                return
            if not state.has_ended and self._execution.is_within(state.node.job, job):
                self._host.fail(node_id, RunError("job.timeout", f"job {job} ran out of time"))

    def _deadline(self, deadline_s: float) -> None:
        message = f"the program did not end within {deadline_s:g} s"
        problem = Problem(code="program.deadline_exceeded", message=message)
        self._host.stop("deadline_exceeded", problem)

    def _check_lease(self) -> None:
        """An attached program lives as long as somebody reads it."""
        if self._feed.num_readers or self._outbox.has_waiters:
            self._num_unread = 0
        if self._num_unread >= NUM_LOOKS:
            message = f"nobody read the attached program for {LEASE_S:g} s"
            self._host.stop("cancelled", Problem(code="program.lease_lost", message=message))
            return
        self._num_unread += 1
        loop = asyncio.get_running_loop()
        self._timers[LEASE] = loop.call_later(LEASE_S / NUM_LOOKS, self._check_lease)
