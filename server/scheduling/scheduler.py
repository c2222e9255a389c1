"""The wait queues: which call starts next, and on which engine.

Calls wait here, ordered by rank, until an engine has room for them. An engine is given only as many
calls as it can run plus a small look-ahead, so the order decided here is the order of execution.
The policy (pure functions of records, see `policy`) ranks calls and costs engines; the scheduler
keeps the queues and reservations, and starts calls.

There are two queues: one for latency-critical calls, which need an engine with few tokens, and one
for all others. The first call of a queue that fits on no engine reserves an engine: no other call
starts on that engine before the reserving call. Later calls of the queue may start on other
engines. The first of them that fits on no engine blocks the queue until the next round.

Out of scope: programs beyond their id, and prompts beyond their length and prefix keys.

Invariants:
- A call waits, is reserved on exactly one engine, or is unknown here.
- On the engine that will run it, no call overtakes a call of better rank in its queue.
- The head of a queue always has an engine that drains for it. As ranks age, no call starves.
- A program that has not begun may be held while programs of better rank run (see `holds`).
- An idle engine accepts any call that its context length allows.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .engine_index import EngineIndex, TaskGroupState
from .holds import OpeningPrograms, ProgramsAhead
from .policy import DEFAULT_POLICY, EngineCandidate, Policy, explain, policy_named
from .request import ResourceRequest
from .reservations import EngineReservations, Reservation
from .service_time import ServiceTimeEstimator
from .session_usage import SessionTable

MAX_LOOKAHEAD_CALLS = 8
"""Calls that an engine may hold beyond those that it decodes at once, so that it never idles."""
MAX_RELEASED_ENTRIES = 64
"""Released calls that a queue's heap may contain, in addition to one per waiting call."""


class Placement(NamedTuple):
    """The engine chosen for a call, and the reason."""

    engine: str
    why: str


def _ignore(_: str) -> None:
    """Ignore why a call waits."""


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call in a wait queue or on an engine."""

    request: ResourceRequest
    rank: float
    on_start: Callable[[Placement], None]
    on_wait: Callable[[str], None] = _ignore
    """Called with the reason when the call has to wait and an engine is reserved for it."""
    reservations: EngineReservations | None = None
    """The engine that the call was started on."""
    reservation: Reservation | None = None
    """The call's reservation on that engine."""
    num_prefilling_tokens: int = 0
    """Prompt tokens that the engine has not prefilled yet."""
    reserved_engine: str | None = None
    """The engine that drains for this call."""
    order: int = 0
    last_failed_round: int = -1
    """The last scheduling round of the queue in which the call fitted no engine."""
    is_released: bool = False

    def clear_prefilling(self, reservations: EngineReservations) -> None:
        """Stop counting the prompt as prefilling on its engine; safe to repeat."""
        reservations.num_prefilling_tokens -= self.num_prefilling_tokens
        self.num_prefilling_tokens = 0


@dataclass(slots=True, eq=False)
class _WaitQueue:
    """Waiting calls, best rank first."""

    heap: list[tuple[float, int, QueuedCall]] = field(default_factory=list)
    num_waiting: int = 0
    head_of_line: QueuedCall | None = None
    """The first call that fits no engine. It is in the heap while a round tries engines for it."""
    is_blocked: bool = False
    """No waiting call fits until an engine has more room or a call of better rank arrives."""
    scheduling_round: int = 0
    dirty_engines: dict[str, None] = field(default_factory=dict)
    """Engines whose reservations changed since the start of this queue's last round. A call that
    fitted no engine in that round only needs to check these."""
    dirty_next_round: dict[str, None] = field(default_factory=dict)

    def begin_round(self) -> None:
        """Start a round. Engines that change from now on are dirty in this round and the next."""
        self.scheduling_round += 1
        self.dirty_engines, self.dirty_next_round = self.dirty_next_round, {}

    def mark_dirty(self, engine: str) -> None:
        """Note that the reservations of an engine changed."""
        self.dirty_engines[engine] = None
        self.dirty_next_round[engine] = None

    def push(self, call: QueuedCall) -> None:
        heapq.heappush(self.heap, (call.rank, call.order, call))

    def peek(self) -> tuple[float, int, QueuedCall] | None:
        """Return the best entry, after dropping released calls before it."""
        while self.heap and self.heap[0][2].is_released:
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None

    def compact(self) -> None:
        """Drop released calls once they are the larger part of the heap."""
        if len(self.heap) > 2 * self.num_waiting + MAX_RELEASED_ENTRIES:
            self.heap = [entry for entry in self.heap if not entry[2].is_released]
            heapq.heapify(self.heap)


class Scheduler:
    """Assigns waiting calls to engines."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        latency_tokens: int | None = None,
        defer: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """Start without calls and engines.

        Args:
            policy: ranks calls and costs engines; None for the default policy.
            latency_tokens: maximum number of tokens that an engine holds while it runs a
                latency-critical call; None for no limit.
            defer: calls a function at the end of the current turn; None uses the event loop.
        """
        self.policy = policy_named(DEFAULT_POLICY) if policy is None else policy
        self.service_time = ServiceTimeEstimator()
        self.sessions = SessionTable()
        self.num_decisions = 0
        """Number of times that candidates were looked for."""
        self._latency_tokens = latency_tokens
        self._defer = defer
        self._index = EngineIndex()
        self._task_groups: dict[tuple[str, str], TaskGroupState] = {}
        self._queues = (_WaitQueue(), _WaitQueue())
        self._openings: OpeningPrograms[QueuedCall] = OpeningPrograms()
        self._order = itertools.count()
        self._is_scheduled = False
        self._is_paused = False
        self._calls_ended = asyncio.Event()
        """Set when a call on an engine ends, or is lost with its engine."""

    @property
    def num_waiting(self) -> int:
        """Return the number of calls that wait for an engine."""
        return sum(queue.num_waiting for queue in self._queues)

    @property
    def num_running(self) -> int:
        """Return the number of calls on engines."""
        return sum(engine.num_calls for engine in self._index.engines.values())

    def first_waiting(self, limit: int) -> list[ResourceRequest]:
        """Return up to `limit` waiting calls, in the order in which they would start."""
        entries = [entry for queue in self._queues for entry in queue.heap]
        entries += [
            (head.rank, head.order, head)
            for queue in self._queues
            if (head := queue.head_of_line) is not None
        ]
        held = (call for calls in self._openings.held.values() for call in calls)
        entries += [(call.rank, call.order, call) for call in held]
        waiting = (entry for entry in entries if not entry[2].is_released)
        return [call.request for _, _, call in heapq.nsmallest(limit, waiting)]

    def reservations(self, engine: str) -> EngineReservations | None:
        """Return the reservations of an engine; None if the scheduler does not have it."""
        return self._index.engines.get(engine)

    def add_engine(
        self,
        engine: str,
        *,
        capacity: int,
        max_sequences: int,
        steps: Callable[[], int] | None = None,
        block_size: int = 1,
    ) -> None:
        """Add an idle engine.

        Args:
            engine: name of the engine.
            capacity: tokens that fit into its KV memory.
            max_sequences: number of calls that it decodes at once.
            steps: returns the number of steps that the engine has made, by which the forecast
                advances; None if the engine does not report it, so that every call reserves its
                maximum length.
            block_size: tokens per KV block.
        """
        max_calls = max_sequences + MAX_LOOKAHEAD_CALLS
        self._index.add(
            EngineReservations(engine, capacity, max_calls, self._latency_tokens, steps, block_size)
        )
        self._mark_dirty(engine)
        self._unblock_queues()

    def remove_engine(self, engine: str) -> None:
        """Remove a lost engine. Its calls have to be submitted again as new `QueuedCall`s."""
        self._index.remove(engine)
        for key, group in list(self._task_groups.items()):
            group.num_running -= group.running_by_engine.pop(engine, 0)
            if group.is_empty:
                del self._task_groups[key]
        for queue in self._queues:
            if queue.head_of_line is not None and queue.head_of_line.reserved_engine == engine:
                queue.head_of_line.reserved_engine = None
        self._calls_ended.set()
        self._unblock_queues()

    def pause(self) -> None:
        """Start no more calls. Running calls continue."""
        self._is_paused = True

    async def wait_idle(self) -> None:
        """Wait until no engine has a call."""
        while self.num_running:
            self._calls_ended.clear()
            await self._calls_ended.wait()

    def submit(self, call: QueuedCall) -> None:
        """Queue a call. It starts in a later turn of the event loop."""
        call.request = request = self.policy.visible_state(call.request)
        queue = self._queue_of(request)
        first = queue.peek()
        call.order = next(self._order)
        queue.push(call)
        queue.num_waiting += 1
        self._openings.wait(request)
        if request.group is not None:
            key = (request.program, request.group)
            group = self._task_groups.setdefault(key, TaskGroupState())
            group.num_waiting += 1
            group.waiting_tokens += request.num_unshared_tokens
        if not queue.is_blocked or first is None or call.rank < first[0]:
            queue.is_blocked = False
            self._schedule()

    def prefill_done(self, call: QueuedCall) -> None:
        """Note that the engine has prefilled the call's prompt; safe to repeat."""
        engine, reservation = call.reservations, call.reservation
        if engine is not None and reservation is not None and call.num_prefilling_tokens:
            call.clear_prefilling(engine)
            if not call.is_released and self._index.engines.get(engine.engine) is engine:
                self._index.prefill_done(engine, reservation)

    def engine_advanced(self, engine: str) -> None:
        """Start the head of a queue if its reserved engine has room for it by now.

        The peak with one more call falls from step to step, because the calls that run end before
        the new call is long.
        """
        heads = (queue.head_of_line for queue in self._queues)
        if any(
            head is not None
            and head.reserved_engine == engine
            and self._index.engines[engine].has_room(head.request)
            for head in heads
        ):
            self._mark_dirty(engine)
            self._unblock_queues()

    def release(self, call: QueuedCall) -> None:
        """Remove a call from its queue, or release its tokens on its engine; safe to repeat."""
        if call.is_released:
            return
        call.is_released = True
        engine = call.reservations
        if engine is None:
            self._leave_queue(call)
            queue = self._queue_of(call.request)
            queue.compact()
            if queue.head_of_line is call:
                queue.head_of_line = None
            if call.reserved_engine is not None:
                self._release_engine(call)
                self._unblock_queues()
            elif queue.is_blocked:
                # The call may be the one that fits nowhere. The next one may fit.
                queue.is_blocked = False
                self._schedule()
            return
        assert call.reservation is not None
        call.clear_prefilling(engine)
        # A lost engine is not in the index, and its reservations are gone with it.
        if self._index.engines.get(engine.engine) is engine:
            self._index.release(engine, call.reservation)
            self._mark_dirty(engine.engine)
            if call.request.group is not None:
                key = (call.request.program, call.request.group)
                group = self._task_groups[key]
                group.end(engine.engine)
                if group.is_empty:
                    del self._task_groups[key]
        self._calls_ended.set()
        self._unblock_queues()

    # --- scheduling rounds ----------------------------------------------------------------

    def _mark_dirty(self, engine: str) -> None:
        for queue in self._queues:
            queue.mark_dirty(engine)

    def _unblock_queues(self) -> None:
        for queue in self._queues:
            queue.is_blocked = False
        self._schedule()

    def _schedule(self) -> None:
        """Run a round at the end of the turn, when all calls of a map stage have been queued."""
        if not self._is_scheduled and not self._is_paused and self.num_waiting:
            self._is_scheduled = True
            defer = self._defer or asyncio.get_running_loop().call_soon
            defer(self.run_round)

    def _queue_of(self, request: ResourceRequest) -> _WaitQueue:
        # Without a token limit, latency-critical calls need no separate queue.
        return self._queues[request.is_latency_critical and self._latency_tokens is not None]

    def run_round(self) -> None:
        """Start every call that an engine has room for, best rank first."""
        self._is_scheduled = False
        # One call of each held program decides on all of its calls. It joins its queue first: if it
        # ranks before the head of the line, it may need the engine that is reserved for the head.
        for call in self._openings.pop_first():
            self._queue_of(call.request).push(call)
        for queue in self._queues:
            if not queue.is_blocked:
                queue.begin_round()
            if queue.head_of_line is not None and not queue.is_blocked:
                head, queue.head_of_line = queue.head_of_line, None
                queue.push(head)
                first = queue.peek()
                assert first is not None
                if first[2] is not head:
                    self._release_engine(head)  # A call of better rank has arrived.
        while not self._is_paused:
            entries = [
                (entry, queue)
                for queue in self._queues
                if not queue.is_blocked and (entry := queue.peek()) is not None
            ]
            if not entries:
                return
            entry, queue = min(entries, key=lambda each: each[0][:2])
            self._serve_first(entry[2], queue)

    def _serve_first(self, call: QueuedCall, queue: _WaitQueue) -> None:
        """Start the first call of a queue, reserve an engine for it, or block the queue."""
        request = call.request
        group = self._task_groups.get((request.program, request.group or ""))
        # A call that fitted no engine in the last round only checks the dirty ones, unless an
        # engine has to be reserved for it.
        has_reserved = call.reserved_engine is not None or queue.head_of_line is not None
        has_failed = call.last_failed_round == queue.scheduling_round - 1
        only = queue.dirty_engines if has_failed and has_reserved else None
        candidates, num_considered = self._index.candidates(
            request, group, call.reserved_engine, only
        )
        self.num_decisions += 1
        best = self._cheapest(call, candidates)
        if best is None and candidates:
            heapq.heappop(queue.heap)
            self._openings.hold(call)
            return
        if best is None or not best.has_room:
            call.last_failed_round = queue.scheduling_round
            if call.reserved_engine is not None:
                heapq.heappop(queue.heap)
                queue.head_of_line = call
                return
            if queue.head_of_line is None and best is not None:
                heapq.heappop(queue.heap)
                self._reserve_engine(call, queue, best)
            else:
                queue.is_blocked = True
            return
        heapq.heappop(queue.heap)
        if call.reserved_engine is not None:
            self._release_engine(call)
            for other in self._queues:
                other.is_blocked = False
        self._start(call, best, num_with_room=len(candidates), num_considered=num_considered)

    def _cheapest(
        self, call: QueuedCall, candidates: list[EngineCandidate]
    ) -> EngineCandidate | None:
        """Return the cheapest engine on which the call's program may begin or has begun."""
        request, cost, service_time = call.request, self.policy.cost, self.service_time
        may_hold = call.reserved_engine is None and self._openings.may_hold(request)
        if len(candidates) > 1:
            candidates = sorted(
                candidates, key=lambda candidate: cost(request, candidate, service_time)
            )
        for candidate in candidates:
            if not may_hold or not self._is_held(call, candidate):
                return candidate
        return None

    def _is_held(self, call: QueuedCall, candidate: EngineCandidate) -> bool:
        """Return whether the policy holds the program of a call back from an engine."""
        engine, holds, pace = candidate.reservations, self.policy.holds, self.service_time
        num_engines = len(self._index.engines)
        opening = self._openings.opening(call.request, candidate.num_shared_tokens, num_engines)
        # The reason that is strongest for any call on this engine, before looking at each program.
        if not engine.num_programs or not holds(
            opening, ProgramsAhead(engine.num_programs, 1), pace
        ):
            return False
        ahead = engine.programs_ahead(call.rank)
        return bool(ahead.num_programs) and holds(opening, ahead, pace)

    def _reserve_engine(
        self, call: QueuedCall, queue: _WaitQueue, candidate: EngineCandidate
    ) -> None:
        """Reserve an engine for the head of a queue."""
        queue.head_of_line = call
        call.reserved_engine = candidate.reservations.engine
        self._index.reserve_for_head_of_line(call.reserved_engine)
        call.on_wait(
            f"first in queue: {call.reserved_engine} is reserved for it and has room for "
            f"{max(candidate.num_free_tokens, 0)} of {candidate.num_new_tokens} tokens"
        )

    def _release_engine(self, call: QueuedCall) -> None:
        if call.reserved_engine is not None:
            self._index.release_from_head_of_line(call.reserved_engine)
            self._mark_dirty(call.reserved_engine)
            call.reserved_engine = None

    def _start(
        self,
        call: QueuedCall,
        candidate: EngineCandidate,
        *,
        num_with_room: int,
        num_considered: int,
    ) -> None:
        request, engine = call.request, candidate.reservations.engine
        self._leave_queue(call)
        call.reservations = candidate.reservations
        call.reservation = self._index.reserve(engine, request, call.rank)
        if request.opens_program:
            self._openings.begun(request.program)
            for other in self._openings.pop_rest(request.program):
                self._queue_of(other.request).push(other)
        self._mark_dirty(
            engine
        )  # Calls that share a prefix with this one need less room there now.
        call.num_prefilling_tokens = request.num_prompt - candidate.num_shared_tokens
        call.reservations.num_prefilling_tokens += call.num_prefilling_tokens
        if request.group is not None:
            key = (request.program, request.group)
            group = self._task_groups.setdefault(key, TaskGroupState())
            group.num_running += 1
            group.running_by_engine[engine] += 1
        why = explain(self.policy.name, request, candidate, num_with_room, num_considered)
        call.on_start(Placement(engine, why))

    # --- task groups ----------------------------------------------------------------------

    def _leave_queue(self, call: QueuedCall) -> None:
        request = call.request
        self._queue_of(request).num_waiting -= 1
        self._openings.leave(request)
        if request.group is not None:
            group = self._task_groups[request.program, request.group]
            group.num_waiting -= 1
            group.waiting_tokens -= request.num_unshared_tokens
            if group.is_empty:
                del self._task_groups[request.program, request.group]
