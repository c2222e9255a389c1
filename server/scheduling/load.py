"""The books of one engine: who runs there, what they hold together, what is still cached.

Tokens of a prefix that several running calls share count once. Of what calls may come to hold,
prompt and output, the books keep the sum and the peak (`forecast`). Room is what the peak
leaves: an engine that is not booked beyond it has no need to preempt, if its calls keep pace.

Refuses to choose: which engine a call gets is the policy's business.

Kept true: `used` is what the booked demands hold together, were they all at their ends at once,
each prefix once if those that start with it know the same boundaries; `peak` is never more;
`held` names exactly the prefixes that a booked demand starts with; `cached` names none of
these, and an engine keeps no more in it than there is room for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .demand import Demand
from .forecast import Forecast, Shared, Stay


@dataclass(slots=True, eq=False)
class Booking:
    """One call on an engine."""

    demand: Demand
    stay: Stay
    evicted: Sequence[bytes]
    """Cached prefixes that had to make room for it."""


class Load:
    """What one engine has taken on."""

    def __init__(
        self,
        engine: str,
        capacity: int,
        max_calls: int,
        strict_tokens: int | None = None,
        steps: Callable[[], int] | None = None,
        block_size: int = 1,
    ) -> None:
        """Open the books.

        Args:
            engine: its name.
            capacity: tokens that fit into its KV memory.
            max_calls: that it takes.
            strict_tokens: it may hold while somebody waits for one of its calls by itself; None:
                any.
            steps: that it has made so far; None: it does not tell, and every call counts whole.
            block_size: tokens of a block of that memory. Every call counts for all but one more,
                for its last block may hold a single token.
        """
        self.engine = engine
        self.capacity = capacity
        self.max_calls = max_calls
        self.strict_tokens = strict_tokens
        self._num_spare = block_size - 1
        self.used = 0
        self.num_calls = 0
        self.num_strict = 0
        self.num_filling = 0
        """Tokens of prompts that were sent and are not filled yet."""
        self.held: dict[bytes, Shared] = {}
        """What running calls start with: the last part of each prefix, beyond the one before."""
        self.cached: OrderedDict[bytes, int] = OrderedDict()
        """Prefixes that nobody reads now, least recently used first, and the tokens of each
        beyond the one before it."""
        self.programs: Counter[str] = Counter()
        """Running calls of each program."""
        self.num_cached = 0
        self._forecast = Forecast(steps)

    @property
    def peak(self) -> int:
        """Tokens that the booked demands will come to hold together, at most."""
        return self._forecast.peak

    def bound(self, *, is_strict: bool) -> int:
        """Tokens that it may hold once such a call runs here as well."""
        if self.strict_tokens is None or not (is_strict or self.num_strict):
            return self.capacity
        return min(self.strict_tokens, self.capacity)

    def room(self, *, is_strict: bool) -> int:
        """Tokens that it may take on however long they stay; negative where a strict call would
        have too much company.

        Company is counted by the sum: it is there to keep steps short, those too in which more
        comes than was forecast, while the peak is only what memory has to hold.
        """
        room = self.capacity - self._forecast.peak
        bound = self.bound(is_strict=is_strict)
        return room if bound == self.capacity else min(room, bound - self.used)

    def num_added(self, demand: Demand) -> int:
        """Tokens that would be held on top, in the end."""
        held = self.held
        for prefix in reversed(demand.prefixes):
            if prefix.key in held:
                return demand.num_tokens - prefix.num_tokens + self._num_spare
        return demand.num_tokens + self._num_spare

    def num_shared(self, demand: Demand) -> int:
        """Leading tokens of the prompt whose KV is here already."""
        there = demand.num_home if demand.home == self.engine else 0
        for prefix in reversed(demand.prefixes):
            if prefix.key in self.held or prefix.key in self.cached:
                return max(there, prefix.num_tokens)
        return there

    def fits(self, demand: Demand, num_added: int, room: int) -> bool:
        """Whether it can take a call; an empty engine takes whatever there is.

        Args:
            demand: what the call asks.
            num_added: tokens that it would bring.
            room: for calls like it.
        """
        if self.num_calls >= self.max_calls:
            return False
        if num_added <= room or not self.num_calls:
            return True
        bound = self.bound(is_strict=demand.is_strict)
        if bound < self.capacity and self.used + num_added > bound:
            return False
        if self._forecast.exceeds(self.capacity, demand.num_output, num_added):
            return False
        held = self.held
        shared = [held[prefix.key] for prefix in demand.prefixes if prefix.key in held]
        return self._forecast.peak_with(demand.num_output, num_added, shared) <= self.capacity

    def book(self, demand: Demand) -> Booking:
        """A call starts here."""
        added = self.num_added(demand)
        self.used += added
        shared: list[Shared] = []
        begin = demand.num_tokens + self._num_spare - added
        for prefix in demand.prefixes:
            part = self.held.get(prefix.key)
            if part is None:
                # Of what lies before the longest that is held, nothing is added.
                part = self.held[prefix.key] = Shared(max(prefix.num_tokens - begin, 0))
                begin = max(begin, prefix.num_tokens)
                if prefix.key in self.cached:
                    self.num_cached -= self.cached.pop(prefix.key)
            shared.append(part)
        num_own = demand.num_own + self._num_spare
        stay = self._forecast.enter(demand.num_output, num_own, tuple(shared))
        self.num_calls += 1
        self.num_strict += demand.is_strict
        self.programs[demand.program] += 1
        return Booking(demand, stay, self._evict())

    def filled(self, booking: Booking) -> bool:
        """The prompt of a call is there, and its output begins; returns whether that is late."""
        return self._forecast.postpone(booking.stay, booking.demand.num_output)

    def leave(self, booking: Booking) -> list[bytes]:
        """A call is over; returns the prefixes that are gone from here."""
        demand = booking.demand
        self._forecast.leave(booking.stay)
        gone: list[bytes] = []
        freed = demand.num_own + self._num_spare
        above: Shared | None = None
        # Deepest first: that is what the cache should give up first of one prompt.
        for i in range(len(demand.prefixes) - 1, -1, -1):
            prefix, part = demand.prefixes[i], booking.stay.shared[i]
            if part.readers:
                above = part
                continue
            del self.held[prefix.key]
            if above is None:
                freed += part.num_tokens
            else:  # somebody holds more, and by other boundaries this as well
                self._forecast.grow(above, part.num_tokens)
            if prefix.stays:
                begin = demand.prefixes[i - 1].num_tokens if i else 0
                self.cached[prefix.key] = prefix.num_tokens - begin
                self.num_cached += prefix.num_tokens - begin
            else:
                gone.append(prefix.key)
        self.used -= freed
        self.num_calls -= 1
        self.num_strict -= demand.is_strict
        self.programs[demand.program] -= 1
        if not self.programs[demand.program]:
            del self.programs[demand.program]
        return [*gone, *self._evict()]

    def _evict(self) -> Sequence[bytes]:
        if not self.cached:
            return ()
        gone: list[bytes] = []
        while self.cached and self.num_cached > self.capacity - self._forecast.peak:
            key, num_tokens = self.cached.popitem(last=False)
            self.num_cached -= num_tokens
            gone.append(key)
        return gone
