"""The only waiting queue: which call runs next, and on which engine.

Calls wait here, ordered by rank, until an engine has room for them; engines get no more
than they can run plus a small look-ahead, so that the order decided here is the order in
which things happen.

What to prefer is decided by the policy, pure functions of records (`policy`). This file obeys
it: it keeps the queue and the books, and starts calls. Refuses to know programs beyond their
id, and prompts beyond their length and the keys of their prefixes.

There are two lines, one of strict calls (somebody waits for them by themselves, so they need
an engine that is not too full) and one of all others. The first of a line that fits nowhere
gets an engine kept for it: nobody else starts there until it does. The others of its
line may pass it on other engines; the next one that fits nowhere ends the line's turn.

Kept true: a call is either waiting, or booked on exactly one engine, or unknown here;
on the engine that will run it, nobody overtakes a call of better rank in its line; the first
of a line always has an engine that drains for it, so with ranks that age nobody starves; an
empty engine takes any call that its context length allows.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .demand import Demand
from .load import Booking, Load
from .pace import Pace
from .policy import DEFAULT_POLICY, Offer, Policy, explain, policy_named
from .roster import Gang, Roster
from .sessions import Sessions

LOOK_AHEAD = 8
"""Calls beyond what decodes at once that an engine may hold, so that it never idles."""
NUM_STALE = 64
"""Withdrawn calls that may stand in a line, or as many as there are others."""


class Placement(NamedTuple):
    """An engine for a call, and why this one."""

    engine: str
    why: str


def _nobody(_: str) -> None:
    """For tickets that need not hear why they wait."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One call in the queue or on an engine."""

    demand: Demand
    rank: float
    start: Callable[[Placement], None]
    wait: Callable[[str], None] = _nobody
    """Told why the call has to wait, once an engine is kept for it."""
    load: Load | None = None
    booking: Booking | None = None
    """Its entry in the books of that engine."""
    num_filling: int = 0
    """Tokens of its prompt that the engine has yet to fill."""
    kept: str | None = None
    """The engine that drains for it."""
    order: int = 0
    tried_in: int = -1
    """The last turn of its line in which it fitted nowhere."""
    is_withdrawn: bool = False

    def stop_filling(self, load: Load) -> None:
        """Nothing of its prompt is left for its engine to fill; safe to repeat."""
        load.num_filling -= self.num_filling
        self.num_filling = 0


@dataclass(slots=True, eq=False)
class _Line:
    """Calls that wait, best rank first."""

    heap: list[tuple[float, int, Ticket]] = field(default_factory=list)
    num_waiting: int = 0
    kept: Ticket | None = None
    """The first of all that fits nowhere; it stands in the heap while engines are tried."""
    is_stuck: bool = False
    """Nobody in it fits anywhere until some engine has more room, or somebody better comes."""
    turn: int = 0
    changed: dict[str, None] = field(default_factory=dict)
    """Engines whose books are others than at the beginning of its last turn: whoever fitted
    nowhere then can only fit there."""
    changed_next: dict[str, None] = field(default_factory=dict)

    def begin_turn(self) -> None:
        """Engines will be tried; what changes from now on counts for this turn and the next."""
        self.turn += 1
        self.changed, self.changed_next = self.changed_next, {}

    def change(self, engine: str) -> None:
        """The books of an engine are others now."""
        self.changed[engine] = None
        self.changed_next[engine] = None

    def put(self, ticket: Ticket) -> None:
        heapq.heappush(self.heap, (ticket.rank, ticket.order, ticket))

    def first(self) -> tuple[float, int, Ticket] | None:
        """The best entry, without those that were withdrawn."""
        while self.heap and self.heap[0][2].is_withdrawn:
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None

    def compact(self) -> None:
        """Forget withdrawn calls once they are the larger part."""
        if len(self.heap) > 2 * self.num_waiting + NUM_STALE:
            self.heap = [entry for entry in self.heap if not entry[2].is_withdrawn]
            heapq.heapify(self.heap)


class Scheduler:
    """The queue and the books of all engines."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        strict_tokens: int | None = None,
        defer: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """Make an empty queue.

        Args:
            policy: how calls are ordered and placed; None: the default one.
            strict_tokens: tokens that an engine may hold while somebody waits for one of its
                calls by itself; None: as many as fit.
            defer: calls something at the end of the present turn; None: the running event loop.
        """
        self.policy = policy_named(DEFAULT_POLICY) if policy is None else policy
        self.pace = Pace()
        self.sessions = Sessions()
        self.num_decisions = 0
        """Times that an engine was looked for."""
        self._strict_tokens = strict_tokens
        self._defer = defer
        self._roster = Roster()
        self._gangs: dict[tuple[str, str], Gang] = {}
        self._lines = (_Line(), _Line())
        self._order = itertools.count()
        self._is_scheduled = False
        self._is_paused = False
        self._idle: list[asyncio.Future[None]] = []

    @property
    def num_waiting(self) -> int:
        """Calls that wait for room."""
        return sum(line.num_waiting for line in self._lines)

    def engine_arrived(
        self,
        engine: str,
        *,
        capacity: int,
        max_sequences: int,
        steps: Callable[[], int] | None = None,
        block_size: int = 1,
    ) -> None:
        """An engine is there and empty.

        Args:
            engine: its name.
            capacity: tokens that fit into its KV memory.
            max_sequences: calls that decode there at once.
            steps: that it has made so far, by which its calls are taken to advance; None: it does
                not tell, and every call is booked with all it may write.
            block_size: tokens of a block of its memory, the least that a call takes of it.
        """
        max_calls, strict_tokens = max_sequences + LOOK_AHEAD, self._strict_tokens
        self._roster.add(Load(engine, capacity, max_calls, strict_tokens, steps, block_size))
        self._change(engine)
        self._unstick()

    def engine_lost(self, engine: str) -> None:
        """An engine is gone; its calls come back as new tickets."""
        self._roster.remove(engine)
        for key, gang in list(self._gangs.items()):
            gang.num_running -= gang.running.pop(engine, 0)
            if gang.is_over:
                del self._gangs[key]
        for line in self._lines:
            if line.kept is not None and line.kept.kept == engine:
                line.kept.kept = None
        self._unstick()

    def pause(self) -> None:
        """Start nothing more; what runs goes on."""
        self._is_paused = True

    @property
    def num_running(self) -> int:
        """Calls that engines have."""
        return sum(load.num_calls for load in self._roster.loads.values())

    async def wait_idle(self) -> None:
        """Wait until no engine has a call."""
        while self.num_running:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def submit(self, ticket: Ticket) -> None:
        """Let a call wait for an engine; it starts in a later turn of the loop."""
        ticket.demand = demand = self.policy.see(ticket.demand)
        line = self._line(demand)
        first = line.first()
        ticket.order = next(self._order)
        line.put(ticket)
        line.num_waiting += 1
        if demand.group is not None:
            gang = self._gangs.setdefault((demand.program, demand.group), Gang())
            gang.num_waiting += 1
            gang.waiting_tokens += demand.num_own
        if not line.is_stuck or first is None or ticket.rank < first[0]:
            line.is_stuck = False
            self._schedule()

    def filled(self, ticket: Ticket) -> None:
        """The engine has filled the call's prompt; safe to repeat."""
        load, booking = ticket.load, ticket.booking
        if load is not None and booking is not None and ticket.num_filling:
            ticket.stop_filling(load)
            if not ticket.is_withdrawn and self._roster.loads.get(load.engine) is load:
                self._roster.filled(load, booking)

    def withdraw(self, ticket: Ticket) -> None:
        """A call needs no engine any more, or is done with the one it has; safe to repeat."""
        if ticket.is_withdrawn:
            return
        ticket.is_withdrawn = True
        load = ticket.load
        if load is None:
            self._leave_line(ticket)
            line = self._line(ticket.demand)
            line.compact()
            if line.kept is ticket:
                line.kept = None
            if ticket.kept is not None:
                self._unkeep(ticket)
                self._unstick()
            return
        assert ticket.booking is not None
        ticket.stop_filling(load)
        if self._roster.loads.get(load.engine) is load:  # else it is gone, with all its books
            self._roster.leave(load, ticket.booking)
            self._change(load.engine)
            if ticket.demand.group is not None:
                self._leave_gang(ticket.demand, load.engine)
        if self._idle and load.num_calls == 0:
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)
            self._idle.clear()
        self._unstick()

    # --- a turn ---------------------------------------------------------------------------

    def _change(self, engine: str) -> None:
        for line in self._lines:
            line.change(engine)

    def _unstick(self) -> None:
        for line in self._lines:
            line.is_stuck = False
        self._schedule()

    def _schedule(self) -> None:
        """Placing waits for the end of the turn, so that a whole map stage is seen at once."""
        if not self._is_scheduled and not self._is_paused and self.num_waiting:
            self._is_scheduled = True
            defer = self._defer or asyncio.get_running_loop().call_soon
            defer(self.run)

    def _line(self, demand: Demand) -> _Line:
        # Where nothing is bounded for strict calls, they have no reason to wait apart.
        return self._lines[demand.is_strict and self._strict_tokens is not None]

    def run(self) -> None:
        """Start every call that there is room for, best rank first."""
        self._is_scheduled = False
        for line in self._lines:
            if not line.is_stuck:
                line.begin_turn()
            if line.kept is not None and not line.is_stuck:
                kept, line.kept = line.kept, None
                line.put(kept)
                first = line.first()
                assert first is not None
                if first[2] is not kept:
                    self._unkeep(kept)  # somebody of better rank has come
        while not self._is_paused:
            entries = [
                (entry, line)
                for line in self._lines
                if not line.is_stuck and (entry := line.first()) is not None
            ]
            if not entries:
                return
            entry, line = min(entries, key=lambda each: each[0][:2])
            self._serve(entry[2], line)

    def _serve(self, ticket: Ticket, line: _Line) -> None:
        """Start the first of a line, or keep an engine for it, or end the line's turn."""
        demand = ticket.demand
        gang = self._gangs.get((demand.program, demand.group or ""))
        # Who fitted nowhere a turn ago need not ask everybody again, unless to have one kept.
        has_one = ticket.kept is not None or line.kept is not None
        only = line.changed if ticket.tried_in == line.turn - 1 and has_one else None
        offers, num_offers = self._roster.offers(demand, gang, ticket.kept, only)
        self.num_decisions += 1
        if not offers or not offers[0].is_fit:
            ticket.tried_in = line.turn
            if ticket.kept is not None:
                heapq.heappop(line.heap)
                line.kept = ticket
                return
            if line.kept is None and offers:
                heapq.heappop(line.heap)
                self._keep(ticket, line, self._best(demand, offers))
            else:
                line.is_stuck = True
            return
        best = self._best(demand, offers)
        heapq.heappop(line.heap)
        if ticket.kept is not None:
            self._unkeep(ticket)
            for other in self._lines:
                other.is_stuck = False
        self._start(ticket, best, num_able=len(offers), num_offers=num_offers)

    def _best(self, demand: Demand, offers: list[Offer]) -> Offer:
        if len(offers) == 1:
            return offers[0]
        price, pace = self.policy.price, self.pace
        return min(offers, key=lambda offer: price(demand, offer, pace))

    def _keep(self, ticket: Ticket, line: _Line, offer: Offer) -> None:
        line.kept = ticket
        ticket.kept = offer.load.engine
        self._roster.keep(ticket.kept)
        ticket.wait(
            f"first in line: {ticket.kept}, with room for {max(offer.room, 0)} tokens, "
            f"is kept for its {offer.num_added}"
        )

    def _unkeep(self, ticket: Ticket) -> None:
        if ticket.kept is not None:
            self._roster.release(ticket.kept)
            self._change(ticket.kept)
            ticket.kept = None

    def _start(self, ticket: Ticket, offer: Offer, *, num_able: int, num_offers: int) -> None:
        demand, engine = ticket.demand, offer.load.engine
        self._leave_line(ticket)
        ticket.load, ticket.booking = offer.load, self._roster.book(engine, demand)
        self._change(engine)  # who shares a prefix with it needs less there now
        ticket.num_filling = demand.num_prompt - offer.num_shared
        ticket.load.num_filling += ticket.num_filling
        if demand.group is not None:
            gang = self._gangs.setdefault((demand.program, demand.group), Gang())
            gang.num_running += 1
            gang.running[engine] += 1
        why = explain(self.policy.name, demand, offer, num_able, num_offers)
        ticket.start(Placement(engine, why))

    # --- task groups ----------------------------------------------------------------------

    def _leave_line(self, ticket: Ticket) -> None:
        demand = ticket.demand
        self._line(demand).num_waiting -= 1
        if demand.group is not None:
            gang = self._gangs[demand.program, demand.group]
            gang.num_waiting -= 1
            gang.waiting_tokens -= demand.num_own
            if gang.is_over:
                del self._gangs[demand.program, demand.group]

    def _leave_gang(self, demand: Demand, engine: str) -> None:
        assert demand.group is not None
        gang = self._gangs[demand.program, demand.group]
        gang.num_running -= 1
        gang.running[engine] -= 1
        if gang.running[engine] <= 0:
            del gang.running[engine]
        if gang.is_over:
            del self._gangs[demand.program, demand.group]
