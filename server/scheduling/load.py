"""The books of one engine: who runs there, what they hold together, what is still cached.

Tokens of a prefix that several running calls share count once. The books are kept by what
calls may come to hold, prompt and output, so an engine that is never overbooked never has
to preempt.

Refuses to choose: which engine a call gets is the policy's business.

Kept true: `used` is what the booked demands hold together, each prefix once; `held` names
exactly the prefixes that a booked demand starts with; `cached` names none of these, and an
engine keeps no more in it than there is room for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from .demand import Demand


@dataclass(slots=True, eq=False)
class Load:
    """What one engine has taken on."""

    engine: str
    capacity: int
    """Tokens that fit into its KV memory."""
    max_calls: int
    strict_tokens: int | None = None
    """Tokens it may hold while somebody waits for one of its calls by itself; None: any."""
    used: int = 0
    num_calls: int = 0
    num_strict: int = 0
    num_filling: int = 0
    """Tokens of prompts that were sent and are not filled yet."""
    held: dict[bytes, int] = field(default_factory=dict)
    """Running calls that start with each prefix."""
    cached: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """Prefixes that nobody reads now, least recently used first, and the tokens of each beyond
    the one before it."""
    programs: Counter[str] = field(default_factory=Counter)
    """Running calls of each program."""
    num_cached: int = 0

    def bound(self, *, is_strict: bool) -> int:
        """Tokens that it may hold once such a call runs here as well."""
        if self.strict_tokens is None or not (is_strict or self.num_strict):
            return self.capacity
        return min(self.strict_tokens, self.capacity)

    def room(self, *, is_strict: bool) -> int:
        """Tokens that it may take on; negative where a strict call would have too much company."""
        return self.bound(is_strict=is_strict) - self.used

    def num_added(self, demand: Demand) -> int:
        """Tokens that would be held on top."""
        held = self.held
        for prefix in reversed(demand.prefixes):
            if prefix.key in held:
                return demand.num_tokens - prefix.num_tokens
        return demand.num_tokens

    def num_shared(self, demand: Demand) -> int:
        """Leading tokens of the prompt whose KV is here already."""
        there = demand.num_home if demand.home == self.engine else 0
        for prefix in reversed(demand.prefixes):
            if prefix.key in self.held or prefix.key in self.cached:
                return max(there, prefix.num_tokens)
        return there

    def fits(self, demand: Demand, num_added: int) -> bool:
        """Whether it has room; an empty engine takes whatever there is."""
        if self.num_calls >= self.max_calls:
            return False
        return self.num_calls == 0 or num_added <= self.room(is_strict=demand.is_strict)

    def book(self, demand: Demand) -> list[bytes]:
        """A call starts here; returns the cached prefixes that had to make room."""
        self.used += self.num_added(demand)
        for prefix in demand.prefixes:
            num_readers = self.held.get(prefix.key, 0)
            self.held[prefix.key] = num_readers + 1
            if not num_readers and prefix.key in self.cached:
                self.num_cached -= self.cached.pop(prefix.key)
        self.num_calls += 1
        self.num_strict += demand.is_strict
        self.programs[demand.program] += 1
        return self._evict()

    def leave(self, demand: Demand) -> list[bytes]:
        """A call that was booked is over; returns the prefixes that are gone from here."""
        gone: list[bytes] = []
        kept = 0
        # Deepest first: that is what the cache should give up first of one prompt.
        for i in range(len(demand.prefixes) - 1, -1, -1):
            prefix = demand.prefixes[i]
            self.held[prefix.key] -= 1
            if self.held[prefix.key]:
                kept = max(kept, prefix.num_tokens)
                continue
            del self.held[prefix.key]
            if prefix.stays:
                begin = demand.prefixes[i - 1].num_tokens if i else 0
                self.cached[prefix.key] = prefix.num_tokens - begin
                self.num_cached += prefix.num_tokens - begin
            else:
                gone.append(prefix.key)
        self.used -= demand.num_tokens - kept
        self.num_calls -= 1
        self.num_strict -= demand.is_strict
        self.programs[demand.program] -= 1
        if not self.programs[demand.program]:
            del self.programs[demand.program]
        return gone + self._evict()

    def _evict(self) -> list[bytes]:
        gone: list[bytes] = []
        while self.cached and self.num_cached > self.capacity - self.used:
            key, num_tokens = self.cached.popitem(last=False)
            self.num_cached -= num_tokens
            gone.append(key)
        return gone
