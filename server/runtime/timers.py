"""The timers of one program: timeouts of nodes and jobs, deadlines, and the leases.

Starts timers and reports the ones that expire; the program decides what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..program.errors import ConureError, RunError
from ..program.graph.graph import bodies_around
from ..program.ir import CallNode, ClientNode, GraphNode, WaitNode
from ..program.nodes.control.base import NodeWithBodies
from ..program.status import Phase, Problem
from .clock import SteadyClock
from .program_state import ProgramState
from .timed_jobs import JobInstance

LEASE_S = 20.0
"""How long an attached program runs without a reader. Clients try for 15 s to reach a server."""
LEASE_CHECKS = 5
"""Number of checks within the duration of a lease."""
DEADLINE, LEASE, IDLE_TIMEOUT = "the deadline", "the lease", "the idle timeout"
"""Keys of the program's own timers. They contain a space, so no node can have the same name."""
WAITING_NODES = (ClientNode, WaitNode, NodeWithBodies)
"""Nodes that are `running` while they only wait: for the client, for values or for their bodies."""


@dataclass(slots=True)
class _Lease:
    """The time that a program runs without being used."""

    key: str
    duration_s: float
    take_usage: Callable[[], bool]
    """Returns whether the program was used since the last check."""
    problem: Problem
    """Why the program ends with the lease."""
    num_unused_checks: int = 0
    """Checks since the last use. Counted instead of seconds, so that the lease does not end while
    this process is suspended and no client can read."""


class Timers:
    """The timers of one program."""

    def __init__(
        self,
        state: ProgramState,
        clock: SteadyClock,
        *,
        idle_s: float | None,
        fail: Callable[[str, ConureError], None],
        stop: Callable[[Phase, Problem], None],
        close: Callable[[], bool],
        miss: Callable[[str, float], None],
        has_reader: Callable[[], bool],
        num_changes: Callable[[], int],
    ) -> None:
        """Create the timers of a program.

        Args:
            state: the program.
            clock: the server's clock.
            idle_s: seconds after which a program that no client uses ends. None: never.
            fail: fails a node with an error.
            stop: ends the program.
            close: ends the program if all of its nodes have ended; returns whether it has ended.
            miss: reports an output that missed its deadline, given in seconds.
            has_reader: returns whether a client reads the program.
            num_changes: returns the number of changes of the program so far.
        """
        self._state = state
        self._clock = clock
        self._idle_s = idle_s
        self._fail = fail
        self._stop = stop
        self._close = close
        self._miss = miss
        self._has_reader = has_reader
        self._num_changes = num_changes
        self._num_seen_changes = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._deadlines: dict[str, float] = {}
        """The deadlines of outputs that have a timer, in seconds after the program's creation."""
        self._leases = self._make_leases()

    def start(self) -> None:
        """Start the timers of the program."""
        loop = asyncio.get_running_loop()
        deadline_s = self._state.options.deadline_s
        if deadline_s is not None:
            self._timers[DEADLINE] = loop.call_later(
                self._remaining_s(deadline_s), self._deadline_exceeded, deadline_s
            )
        self.start_objectives()
        for job in self._state.job_starts:  # of an earlier server process
            self._start_job(job)
        for lease in self._leases:
            self._check_lease(lease)

    def start_objectives(self) -> None:
        """Start a timer for the deadline of each output; safe to repeat after changes."""
        loop = asyncio.get_running_loop()
        for output, deadline_s in self._state.graph.deadlines.items():
            is_missed = output in self._state.missed_deadlines
            if not is_missed and self._deadlines.get(output) != deadline_s:
                self._deadlines[output] = deadline_s
                key = f"deadline {output}"
                self.cancel(key)
                self._timers[key] = loop.call_later(
                    self._remaining_s(deadline_s), self._miss, output, deadline_s
                )

    def _remaining_s(self, deadline_s: float) -> float:
        return max(self._state.created_at + deadline_s - self._clock.now(), 0)

    def _make_leases(self) -> list[_Lease]:
        options, leases = self._state.options, []
        if not options.detach:
            message = f"the attached program had no reader for {LEASE_S:g} s"
            problem = Problem(code="program.lease_lost", message=message)
            leases.append(_Lease(LEASE, LEASE_S, self._has_reader, problem))
        idle_s = self._idle_s if options.idle_timeout_s is None else options.idle_timeout_s
        if idle_s is not None:
            message = f"no client used the program for {idle_s:g} s"
            problem = Problem(code="program.idle", message=message)
            leases.append(_Lease(IDLE_TIMEOUT, idle_s, self._take_usage, problem))
        return leases

    def renew_leases(self) -> None:
        """Restart the leases: a client has sent a request for the program."""
        for lease in self._leases:
            lease.num_unused_checks = 0

    def start_node(self, node: GraphNode) -> None:
        """Start the timer of a node, and those of its jobs whose first node it is.

        Client steps and functions have timers of their own, one per attempt. The time may be over
        already, if the node started in an earlier server process.
        """
        now = self._clock.now()
        for job in start_jobs(self._state, node, now):
            self._start_job(job)
        started_at = start_timed_node(self._state, node, now)
        if started_at is not None:
            assert node.timeout_s is not None
            self._timers[node.id] = asyncio.get_running_loop().call_later(
                max(started_at + node.timeout_s - now, 0),
                self._node_timed_out,
                node.id,
                node.timeout_s,
            )

    def _start_job(self, instance: JobInstance) -> None:
        """Start the timer of a job, unless it has started; the time may be over already."""
        timeout_s, key = self._state.graph.jobs[instance.job].timeout_s, _key_of(instance)
        assert timeout_s is not None
        if key not in self._timers:
            left_s = self._state.job_starts[instance] + timeout_s - self._clock.now()
            self._timers[key] = asyncio.get_running_loop().call_later(
                max(left_s, 0), self._job_timed_out, instance, timeout_s
            )

    def cancel(self, key: str) -> None:
        """Cancel the timer of a node or an output; safe to repeat."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def stop(self) -> None:
        """Cancel all timers; safe to repeat."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def break_cycles(self) -> None:
        """Drop the callbacks, which refer to the run of the program: it has ended."""
        self._fail = self._stop = self._miss = _ignore
        self._close = self._has_reader = bool
        self._num_changes = int
        self._leases.clear()

    def _node_timed_out(self, node_id: str, timeout_s: float) -> None:
        del self._timers[node_id]
        message = f"node {node_id} took longer than {timeout_s:g} s"
        self._fail(node_id, RunError("node.timeout", message))

    def _job_timed_out(self, instance: JobInstance, timeout_s: float) -> None:
        # A node that starts in the job later, in a retry or an append, fails as well.
        del self._timers[_key_of(instance)]
        message = f"job {instance.job} took longer than {timeout_s:g} s"
        nodes, timed_jobs = self._state.nodes, self._state.timed_jobs
        for node_id in list(timed_jobs.nodes_in(instance)):
            # The nodes in a body end with the node around them, those of a large body in turns.
            around = (body.control for body in bodies_around(self._state.graph, node_id))
            if not any(nodes[each].has_ended for each in (node_id, *around)):
                self._fail(node_id, RunError("job.timeout", message))

    def _deadline_exceeded(self, deadline_s: float) -> None:
        message = f"the program did not end within {deadline_s:g} s"
        self._stop("deadline_exceeded", Problem(code="program.deadline_exceeded", message=message))

    def _take_usage(self) -> bool:
        """Return whether the program is in use: a client reads it, a node is queued or works, or
        something has changed since the last call.
        """
        before, self._num_seen_changes = self._num_seen_changes, self._num_changes()
        if self._has_reader() or before != self._num_seen_changes:
            return True
        return any(
            each.phase in ("queued", "running") and not isinstance(each.node, WAITING_NODES)
            for each in self._state.nodes.values()
        )

    def _check_lease(self, lease: _Lease) -> None:
        """Stop a program whose lease has ended; close it if all of its nodes have ended."""
        if lease.take_usage():
            lease.num_unused_checks = 0
        if lease.num_unused_checks >= LEASE_CHECKS:
            # A program whose nodes have all ended is complete without its reader.
            if lease.key != LEASE or not self._close():
                self._stop("cancelled", lease.problem)
            return
        lease.num_unused_checks += 1
        self._timers[lease.key] = asyncio.get_running_loop().call_later(
            lease.duration_s / LEASE_CHECKS, self._check_lease, lease
        )


def start_jobs(state: ProgramState, node: GraphNode, at: float) -> list[JobInstance]:
    """Record the start of a node in its jobs; return those that have a timeout."""
    instances = state.timed_jobs.instances_of(node)
    for instance in instances:
        state.job_starts[instance] = min(at, state.job_starts.get(instance, at))
    return instances


def start_timed_node(state: ProgramState, node: GraphNode, at: float) -> float | None:
    """Record the first start of a node with a timeout that all attempts share, and return it.

    Return None for other nodes.
    """
    if node.timeout_s is None or isinstance(node, ClientNode | CallNode):
        return None
    return state.node_starts.setdefault(node.id, at)


def _key_of(instance: JobInstance) -> str:
    return f"job {instance.job} {instance.body}"


def _ignore(*_: object) -> None:
    """Do nothing: the program has ended."""
