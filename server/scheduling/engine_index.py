"""An index of all engines that finds the few candidates for a call without a scan of all engines.

Of a thousand engines, a call considers at most a dozen: the engine with the most free tokens of
each class (idle, with a latency-critical call, with other calls only), engines that hold one of its
prefixes, engines that run its task group, and its affinity engine. The free tokens of an engine are
its capacity minus its predicted peak. If none of these engines has room, an engine that
was not considered has room in two cases only: it holds a prefix of the call, but too many engines
hold that prefix; or its predicted peak is after the end of this call.

Out of scope: ranks and costs.

Invariants: `candidates` costs at most the logarithm of the number of engines, amortised; an engine
that is reserved for one call is a candidate for no other.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .policy import EngineCandidate
from .request import ResourceRequest
from .reservations import EngineReservations, Reservation

MAX_PREFIX_HOLDERS = 4
"""Maximum number of engines considered because they hold a prefix. If more hold it, the engine with
the most free tokens is probably one of them; the others are considered in rotation."""
MAX_GROUP_ENGINES = 2
MAX_STALE_ENTRIES = 64
"""Outdated entries that a heap may contain, in addition to one per engine."""

IDLE, LATENCY_CRITICAL, BATCH = range(3)


@dataclass(slots=True, eq=False)
class TaskGroupState:
    """How many calls of a task group wait, and on which engines its other calls run."""

    waiting_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    running_by_engine: Counter[str] = field(default_factory=Counter)

    def end(self, engine: str) -> None:
        """Count a call that ended on an engine."""
        self.num_running -= 1
        self.running_by_engine[engine] -= 1
        if self.running_by_engine[engine] <= 0:
            del self.running_by_engine[engine]

    @property
    def is_empty(self) -> bool:
        """Return whether no call of the group waits or runs."""
        return not self.num_waiting and not self.running_by_engine


class EngineIndex:
    """Engines by name, by free tokens and by prefix."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineReservations] = {}
        self._heaps = [[_EngineHeap(), _EngineHeap()] for _ in (IDLE, LATENCY_CRITICAL, BATCH)]
        """Indexed by engine class, then by whether the call is latency-critical."""
        self._versions: dict[str, int] = {}
        """Version of each engine's valid heap entries. Engines without one are not candidates."""
        self._next_version = itertools.count(1)
        self._prefix_holders: dict[bytes, dict[str, None]] = {}
        self._reserved: set[str] = set()

    def add(self, reservations: EngineReservations) -> None:
        """Add an engine, or replace the one of the same name."""
        self.remove(reservations.engine)
        self.engines[reservations.engine] = reservations
        # An engine alone is not in the heaps, so the second one adds both.
        for each in self.engines.values() if len(self.engines) == 2 else (reservations,):
            self._reindex(each)

    def remove(self, engine: str) -> None:
        """Remove an engine; a no-op if the index does not contain it."""
        reservations = self.engines.pop(engine, None)
        self._versions.pop(engine, None)
        self._reserved.discard(engine)
        if reservations is not None:
            held = [*reservations.active_prefixes, *reservations.cached_prefixes]
            self._remove_holder(engine, held)

    def reserve_for_head_of_line(self, engine: str) -> None:
        """Hide an engine from all other calls until `release_from_head_of_line`."""
        self._reserved.add(engine)
        self._versions.pop(engine, None)

    def release_from_head_of_line(self, engine: str) -> None:
        """Make a reserved engine a candidate again; safe to repeat."""
        if engine in self._reserved:
            self._reserved.discard(engine)
            self._reindex(self.engines[engine])

    def reserve(self, engine: str, request: ResourceRequest, rank: float) -> Reservation:
        """Reserve the tokens of a call that starts on an engine."""
        reservations = self.engines[engine]
        reservation = reservations.reserve(request, rank)
        for prefix in request.prefixes:
            self._prefix_holders.setdefault(prefix.key, {})[engine] = None
        self._remove_holder(engine, reservation.evicted)
        self._reindex(reservations)
        return reservation

    def prefill_done(self, reservations: EngineReservations, reservation: Reservation) -> None:
        """Note that an engine has prefilled the prompt of a call."""
        if reservations.on_prefill_done(reservation):
            self._reindex(reservations)

    def release(self, reservations: EngineReservations, reservation: Reservation) -> None:
        """Release the tokens of a call that ended."""
        self._remove_holder(reservations.engine, reservations.release(reservation))
        self._reindex(reservations)

    def candidates(
        self,
        request: ResourceRequest,
        group: TaskGroupState | None,
        reserved_engine: str | None,
        only: Iterable[str] | None = None,
    ) -> tuple[list[EngineCandidate], int]:
        """Return the candidates for a call, and how many engines were considered.

        The candidates are the considered engines that have room for the call; all considered
        engines if none has.

        Args:
            request: the tokens that the call needs.
            group: the call's task group.
            reserved_engine: the engine that is reserved for this call.
            only: consider these engines only; None considers the usual ones.
        """
        names: dict[str, None] = {}
        versions = self._versions
        for name in self._worth_considering(request, group) if only is None else only:
            if name in versions:
                names[name] = None
        if reserved_engine is not None and (only is None or reserved_engine in only):
            names[reserved_engine] = None
        is_critical = request.is_latency_critical
        running = {} if group is None else group.running_by_engine
        waiting_tokens = request.num_tokens if group is None else group.waiting_tokens
        group_size = 1 if group is None else max(group.num_waiting + group.num_running, 1)
        considered = []
        for name in names:
            engine = self.engines[name]
            num_free = engine.num_free_tokens(is_latency_critical=is_critical)
            num_new = engine.num_new_tokens(request)
            considered.append(
                EngineCandidate(
                    engine,
                    num_new_tokens=num_new,
                    num_free_tokens=num_free,
                    num_shared_tokens=engine.num_shared_tokens(request),
                    num_group_members=running.get(engine.engine, 0),
                    group_waiting_tokens=waiting_tokens,
                    group_size=group_size,
                    has_room=engine.fits(request, num_new, num_free),
                )
            )
        return [each for each in considered if each.has_room] or considered, len(considered)

    def _worth_considering(
        self, request: ResourceRequest, group: TaskGroupState | None
    ) -> Iterable[str]:
        if len(self.engines) == 1:
            yield from self.engines
            return
        for heaps in self._heaps:
            most_free = heaps[request.is_latency_critical].peek(self._versions)
            if most_free is not None:
                yield most_free
        yield from self._related(request, group)

    def _related(self, request: ResourceRequest, group: TaskGroupState | None) -> Iterable[str]:
        """Yield the affinity engine, engines that run the group, and engines that hold a prefix."""
        if request.affinity_engine is not None:
            yield request.affinity_engine
        if group is not None:
            yield from itertools.islice(group.running_by_engine, MAX_GROUP_ENGINES)
        num_left = MAX_PREFIX_HOLDERS
        for prefix in reversed(request.prefixes):
            holders = self._prefix_holders.get(prefix.key)
            if holders is None:
                continue
            considered = list(itertools.islice(holders, num_left))
            yield from considered
            if len(holders) > len(considered):
                for name in considered:  # Rotate, so that the next call considers other holders.
                    del holders[name]
                    holders[name] = None
            num_left -= len(considered)
            if not num_left:
                return

    def _reindex(self, reservations: EngineReservations) -> None:
        """Push an engine's current free tokens, which invalidates its older heap entries."""
        name = reservations.engine
        if name in self._reserved:
            return
        if reservations.num_calls >= reservations.max_calls:
            self._versions.pop(name, None)
            return
        version = self._versions[name] = next(self._next_version)
        if len(self.engines) == 1:
            return  # the only candidate
        kind = BATCH if reservations.num_calls else IDLE
        if reservations.num_latency_critical:
            kind = LATENCY_CRITICAL
        for is_critical in (False, True):
            heap = self._heaps[kind][is_critical]
            num_free = reservations.num_free_tokens(is_latency_critical=is_critical)
            heap.push(num_free, version, name)
            heap.compact(self._versions, len(self.engines))

    def _remove_holder(self, engine: str, keys: Iterable[bytes]) -> None:
        """Note that an engine no longer holds these prefixes."""
        for key in keys:
            holders = self._prefix_holders.get(key)
            if holders is not None:
                holders.pop(engine, None)
                if not holders:
                    del self._prefix_holders[key]


class _EngineHeap:
    """Engines of one class, most free tokens first. Outdated entries are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []

    def push(self, num_free: int, version: int, engine: str) -> None:
        heapq.heappush(self._heap, (-num_free, version, engine))

    def peek(self, versions: dict[str, int]) -> str | None:
        heap = self._heap
        while heap:
            _, version, engine = heap[0]
            if versions.get(engine) == version:
                return engine
            heapq.heappop(heap)
        return None

    def compact(self, versions: dict[str, int], num_engines: int) -> None:
        if len(self._heap) > 2 * num_engines + MAX_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if versions.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
