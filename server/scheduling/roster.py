"""All engines, so ordered that the few worth looking at are found without asking each.

A call is offered, of a thousand engines, at most a dozen: the roomiest of every class (empty,
with a strict call, without one), those that hold its prefixes, those that run its task group,
and its home. Room is what an engine's peak leaves. No engine is roomier than the roomiest of its
class, so if none of these fits, hardly another does: one that holds its prefix among many and
was not looked at this time, or one whose peak comes when this call would be gone.

Knows loads and their order. Refuses to know ranks and prices.

Kept true: `offers` costs no more than a logarithm in the engines, amortised; an engine that
is kept for one call is offered to no other.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .demand import Demand
from .load import Booking, Load
from .policy import Offer

MAX_HOLDERS = 4
"""Engines looked at because they hold a prefix. Where more hold it, the roomiest of all
engines do so most likely, and others are looked at in turn."""
MAX_MATE_ENGINES = 2
NUM_STALE = 64
"""Entries of an order that may be out of date, or as many as there are engines."""

EMPTY, STRICT, LOOSE = range(3)


@dataclass(slots=True, eq=False)
class Gang:
    """A task group: who waits of it, and where the others run."""

    waiting_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    running: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        """Whether nobody of it is here."""
        return not self.num_waiting and not self.running


class Roster:
    """Engines by name, by room, by prefix."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self._orders = [[_Order(), _Order()] for _ in (EMPTY, STRICT, LOOSE)]
        """By class, then by whether the asker is strict."""
        self._versions: dict[str, int] = {}
        self._next_version = itertools.count(1)
        self._holders: dict[bytes, dict[str, None]] = {}
        self._kept: set[str] = set()

    def add(self, load: Load) -> None:
        """An engine arrived."""
        self.remove(load.engine)
        self.loads[load.engine] = load
        self._place(load)

    def remove(self, engine: str) -> None:
        """An engine is gone; safe if it is not here."""
        load = self.loads.pop(engine, None)
        self._versions.pop(engine, None)
        self._kept.discard(engine)
        if load is not None:
            self._forget(engine, [*load.held, *load.cached])

    def keep(self, engine: str) -> None:
        """Offer this engine to nobody until it is released."""
        self._kept.add(engine)
        self._versions.pop(engine, None)

    def release(self, engine: str) -> None:
        """Offer this engine again; safe to repeat."""
        if engine in self._kept:
            self._kept.discard(engine)
            self._place(self.loads[engine])

    def book(self, engine: str, demand: Demand) -> Booking:
        """A call starts on an engine."""
        load = self.loads[engine]
        booking = load.book(demand)
        for prefix in demand.prefixes:
            self._holders.setdefault(prefix.key, {})[engine] = None
        self._forget(engine, booking.evicted)
        self._place(load)
        return booking

    def filled(self, load: Load, booking: Booking) -> None:
        """The prompt of a call is there."""
        if load.filled(booking):
            self._place(load)

    def leave(self, load: Load, booking: Booking) -> None:
        """A call is over."""
        self._forget(load.engine, load.leave(booking))
        self._place(load)

    def offers(
        self,
        demand: Demand,
        gang: Gang | None,
        kept_for_it: str | None,
        only: Iterable[str] | None = None,
    ) -> tuple[list[Offer], int]:
        """What the engines worth looking at offer to a call, and how many were looked at.

        Those that have room, or, if none has, all of them.

        Args:
            demand: what it asks.
            gang: its task group.
            kept_for_it: the engine that is kept for it alone.
            only: engines that are to be looked at; None: whichever are worth it.
        """
        names: dict[str, None] = {}
        versions = self._versions
        for name in self._worthwhile(demand, gang) if only is None else only:
            if name in versions:
                names[name] = None
        if kept_for_it is not None and (only is None or kept_for_it in only):
            names[kept_for_it] = None
        loads, is_strict = self.loads, demand.is_strict
        running = {} if gang is None else gang.running
        mate_tokens = demand.num_tokens if gang is None else gang.waiting_tokens
        num_group = 1 if gang is None else max(gang.num_waiting + gang.num_running, 1)
        looked_at = []
        for name in names:
            load = loads[name]
            room, num_added = load.room(is_strict=is_strict), load.num_added(demand)
            looked_at.append((load, num_added, room, load.fits(demand, num_added, room)))
        found = [each for each in looked_at if each[3]] or looked_at
        offers = [
            Offer(
                load,
                num_added,
                room,
                load.num_shared(demand),
                running.get(load.engine, 0),
                mate_tokens,
                num_group,
                is_fit,
            )
            for load, num_added, room, is_fit in found
        ]
        return offers, len(looked_at)

    def _worthwhile(self, demand: Demand, gang: Gang | None) -> Iterable[str]:
        for orders in self._orders:
            if (best := orders[demand.is_strict].first(self._versions)) is not None:
                yield best
        yield from self._related(demand, gang)

    def _related(self, demand: Demand, gang: Gang | None) -> Iterable[str]:
        if demand.home is not None:
            yield demand.home
        if gang is not None:
            yield from itertools.islice(gang.running, MAX_MATE_ENGINES)
        num_left = MAX_HOLDERS
        for prefix in reversed(demand.prefixes):
            holders = self._holders.get(prefix.key)
            if holders is None:
                continue
            looked_at = list(itertools.islice(holders, num_left))
            yield from looked_at
            if len(holders) > len(looked_at):
                for name in looked_at:  # to the end, so that the next call sees others
                    del holders[name]
                    holders[name] = None
            num_left -= len(looked_at)
            if not num_left:
                return

    def _place(self, load: Load) -> None:
        """Put an engine where it belongs now; its older entries are out of date by that."""
        name = load.engine
        if name in self._kept:
            return
        if load.num_calls >= load.max_calls:
            self._versions.pop(name, None)
            return
        version = self._versions[name] = next(self._next_version)
        kind = LOOSE if load.num_calls else EMPTY
        if load.num_strict:
            kind = STRICT
        for is_strict in (False, True):
            order = self._orders[kind][is_strict]
            order.put(load.room(is_strict=is_strict), version, name)
            order.compact(self._versions, len(self.loads))

    def _forget(self, engine: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            holders = self._holders.get(key)
            if holders is not None:
                holders.pop(engine, None)
                if not holders:
                    del self._holders[key]


class _Order:
    """Engines of one class, roomiest first; entries that are out of date are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []

    def put(self, room: int, version: int, engine: str) -> None:
        heapq.heappush(self._heap, (-room, version, engine))

    def first(self, versions: dict[str, int]) -> str | None:
        heap = self._heap
        while heap:
            _, version, engine = heap[0]
            if versions.get(engine) == version:
                return engine
            heapq.heappop(heap)
        return None

    def compact(self, versions: dict[str, int], num_engines: int) -> None:
        if len(self._heap) > 2 * num_engines + NUM_STALE:
            self._heap = [entry for entry in self._heap if versions.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
