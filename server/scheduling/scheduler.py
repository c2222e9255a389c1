"""The only waiting queue: which call runs next, and on which engine.

Calls wait here, ordered by rank, until an engine has room for them; engines get no more
than they can run plus a small look-ahead, so that the order decided here is the order in
which things happen.

`place` is the decision, a pure function of records. `Scheduler` obeys it: it keeps the
queue, books what each engine has taken, and starts calls. Refuses to know programs beyond
their id, and prompts beyond their length.

Kept true: a call is either waiting, or booked on exactly one engine, or unknown here;
nobody overtakes a call of better rank that still waits for room; an empty engine takes any
call that its context length allows.

A rank is a point in time (`rank`): when a call came, later by so much the less urgent it is.
So a call ages without being touched, and none starves: whatever comes after its rank stands
behind it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

LOOK_AHEAD = 8
"""Calls beyond what decodes at once that an engine may hold, so that it never idles."""

THROUGHPUT_S = 30.0
"""How much longer a call waits that nobody waits for by itself."""
HEAD_START_S = 10.0
"""How much sooner at most a call comes because its program began long ago."""
PRIORITY_S = 60.0
"""What one step of priority is worth."""
NUM_STALE = 64
"""Withdrawn calls that may stand in the queue, or as many as there are others."""


@dataclass(slots=True)
class Load:
    """What one engine has taken on."""

    engine: str
    capacity: int
    """Tokens that fit into its KV memory."""
    max_calls: int
    used: int = 0
    programs: Counter[str] = field(default_factory=Counter)
    """Calls of each program that run here."""
    num_calls: int = 0


def rank(began_s: float, now_s: float, *, is_latency: bool, priority: int) -> float:
    """Where a call stands in the queue: lower is sooner.

    Calls of older programs come first, within limits: work on what has been started ends
    sooner than a little of everything.

    Args:
        began_s: when its program began, on the clock of `now_s`.
        now_s: when the call came.
        is_latency: whether somebody waits for it; else it may come THROUGHPUT_S later.
        priority: each step is worth PRIORITY_S.
    """
    came_s = max(began_s, now_s - HEAD_START_S)
    return came_s + (0.0 if is_latency else THROUGHPUT_S) - priority * PRIORITY_S


class Placement(NamedTuple):
    """An engine for a call, and why this one."""

    engine: str
    why: str


def place(program: str, need: int, loads: Iterable[Load]) -> Placement | None:
    """Choose an engine with room for `need` tokens, or None.

    The engine that works for the program already is preferred, because the program's
    prefixes are there; then the one with the most free tokens.
    """
    best: Load | None = None
    best_key = (False, 0)
    for load in loads:
        fits = load.used + need <= load.capacity or load.num_calls == 0
        if not fits or load.num_calls >= load.max_calls:
            continue
        key = (load.programs[program] > 0, load.capacity - load.used)
        if best is None or key > best_key:
            best, best_key = load, key
    if best is None:
        return None
    why = "its program's context is here" if best_key[0] else "most room"
    return Placement(best.engine, why)


@dataclass(slots=True, eq=False)
class Ticket:
    """One call in the queue or on an engine."""

    program: str
    rank: float
    need: int
    """Tokens that it may come to hold: prompt and output, less what it shares."""
    start: Callable[[Placement], None]
    load: Load | None = None
    is_withdrawn: bool = False


class Scheduler:
    """The queue and the books of all engines."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._waiting: list[tuple[float, int, Ticket]] = []
        self._order = itertools.count()
        self._num_waiting = 0
        self._is_scheduled = False
        self._is_paused = False
        self._idle: list[asyncio.Future[None]] = []

    @property
    def num_waiting(self) -> int:
        """Calls that wait for room."""
        return self._num_waiting

    def engine_arrived(self, engine: str, *, capacity: int, max_sequences: int) -> None:
        """An engine is there and empty."""
        self._loads[engine] = Load(engine, capacity, max_sequences + LOOK_AHEAD)
        self._schedule()

    def engine_lost(self, engine: str) -> None:
        """An engine is gone; its calls come back as new tickets."""
        self._loads.pop(engine, None)

    def pause(self) -> None:
        """Start nothing more; what runs goes on."""
        self._is_paused = True

    async def wait_idle(self) -> None:
        """Wait until no engine has a call."""
        while any(load.num_calls for load in self._loads.values()):
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def submit(self, ticket: Ticket) -> None:
        """Let a call wait for an engine; it starts in a later turn of the loop."""
        heapq.heappush(self._waiting, (ticket.rank, next(self._order), ticket))
        self._num_waiting += 1
        self._schedule()

    def withdraw(self, ticket: Ticket) -> None:
        """A call needs no engine any more, or is done with the one it has; safe to repeat."""
        if ticket.is_withdrawn:
            return
        ticket.is_withdrawn = True
        load = ticket.load
        if load is None:
            self._num_waiting -= 1
            self._compact()
            return
        load.used -= ticket.need
        load.num_calls -= 1
        load.programs[ticket.program] -= 1
        if not load.programs[ticket.program]:
            del load.programs[ticket.program]
        if self._idle and load.num_calls == 0:
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)
            self._idle.clear()
        self._schedule()

    def _compact(self) -> None:
        """Forget withdrawn calls once they are the larger part of the queue."""
        if len(self._waiting) > 2 * self._num_waiting + NUM_STALE:
            self._waiting = [entry for entry in self._waiting if not entry[2].is_withdrawn]
            heapq.heapify(self._waiting)

    def _schedule(self) -> None:
        """Placing waits for the end of the turn, so that a whole map stage is seen at once."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        while self._waiting and not self._is_paused:
            _, _, ticket = self._waiting[0]
            if ticket.is_withdrawn:
                heapq.heappop(self._waiting)
                continue
            placement = place(ticket.program, ticket.need, self._loads.values())
            if placement is None:
                return
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            load = self._loads[placement.engine]
            load.used += ticket.need
            load.num_calls += 1
            load.programs[ticket.program] += 1
            ticket.load = load
            ticket.start(placement)
