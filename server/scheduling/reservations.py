"""Token accounting of one engine: which calls run there, what they share, and what is cached.

Tokens of a prefix that several running calls share are counted once. Two figures are kept: the sum
of the maximum lengths of the calls, prompt and output, and its peak over time (`memory_forecast`).
Free tokens are the capacity minus the peak: an engine within it has no need to preempt, as long as
its calls generate a token per step.

An example. Calls A and B read the prefixes P1 (first 100 tokens) and P2 (first 150), call C only
P1; each has 20 tokens of its own:

    tokens   0 ........ 100 ... 150
    A, B     [--- P1 --][- P2 -]  + 20 each
    C        [--- P1 --]          + 20

`active_prefixes` has P1 with 100 tokens and P2 with 50 (the part beyond P1), and `reserved_tokens`
is 100 + 50 + 3 * 20. When A and B end, P2 becomes cached, if later readers are expected, until
reserved tokens need its place. P1 stays active until C ends.

Out of scope: choosing an engine, which is up to the policy.

Invariants: `reserved_tokens` is the number of tokens that the reserved calls hold if all reach
their maximum length at once, with each shared prefix counted once if its readers have the same
boundaries; `peak` never exceeds it; `active_prefixes` has exactly the prefixes of reserved calls;
`cached_prefixes` has none of them, and no more tokens than the peak leaves free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .holds import ProgramsAhead, RunningPrograms
from .memory_forecast import PeakMemoryForecast, Residency, SharedResidency
from .request import ResourceRequest


@dataclass(slots=True, eq=False)
class Reservation:
    """The tokens of one call on an engine."""

    request: ResourceRequest
    residency: Residency
    evicted: Sequence[bytes]
    """Keys of cached prefixes that were evicted to make room."""


class EngineReservations:
    """The reservations of one engine."""

    def __init__(
        self,
        engine: str,
        capacity: int,
        max_calls: int,
        latency_tokens: int | None = None,
        steps: Callable[[], int] | None = None,
        block_size: int = 1,
    ) -> None:
        """Start without reservations.

        Args:
            engine: name of the engine.
            capacity: tokens that fit into its KV memory.
            max_calls: maximum number of calls that it accepts.
            latency_tokens: maximum number of tokens that it holds while it runs a latency-critical
                call; None for no limit.
            steps: returns the number of steps that the engine has made; None if the engine does not
                report it, so that every call counts with its maximum length.
            block_size: tokens per KV block. Each call reserves `block_size - 1` additional tokens,
                because its last block may hold a single token.
        """
        self.engine = engine
        self.capacity = capacity
        self.max_calls = max_calls
        self.latency_tokens = latency_tokens
        self._num_padding = block_size - 1
        self.reserved_tokens = 0
        self.num_calls = 0
        self.num_latency_critical = 0
        self.num_prefilling_tokens = 0
        """Prompt tokens that were sent and are not prefilled yet."""
        self.active_prefixes: dict[bytes, SharedResidency] = {}
        """Prefixes of running calls. Each entry counts the tokens beyond the next shorter
        prefix."""
        self.cached_prefixes: OrderedDict[bytes, int] = OrderedDict()
        """Prefixes that no running call reads and that later programs are expected to read, least
        recently used first, and their tokens beyond the next shorter prefix. The engine evicts all
        other cached KV before these prefixes. Other cached KV is not counted."""
        self.num_cached_tokens = 0
        self.running: dict[Reservation, None] = {}
        """The reservations of running calls, in the order in which they started."""
        self._forecast = PeakMemoryForecast(steps)
        self._get_step = steps or int
        self._programs = RunningPrograms()

    @property
    def peak(self) -> int:
        """Return the maximum number of tokens that the reserved calls will hold together."""
        return self._forecast.peak

    def num_steps_left(self, reservation: Reservation) -> int | None:
        """Return how many steps a call takes at most until it ends; None if that is unknown."""
        return self._forecast.num_steps_left(reservation.residency)

    def token_limit(self, *, is_latency_critical: bool) -> int:
        """Return the maximum number of tokens with one more call of this kind running."""
        if self.latency_tokens is None or not (is_latency_critical or self.num_latency_critical):
            return self.capacity
        return min(self.latency_tokens, self.capacity)

    def num_free_tokens(self, *, is_latency_critical: bool) -> int:
        """Return the tokens that calls may reserve for any length of time.

        Negative if a latency-critical call would share the engine with too many tokens. That limit
        applies to `reserved_tokens` rather than to the peak: it keeps steps short, including those
        in which calls hold more than forecast, whereas the peak only has to fit into memory.
        """
        num_free = self.capacity - self._forecast.peak
        limit = self.token_limit(is_latency_critical=is_latency_critical)
        if limit == self.capacity:
            return num_free
        return min(num_free, limit - self.reserved_tokens)

    def num_new_tokens(self, request: ResourceRequest) -> int:
        """Return the tokens that a call adds to those reserved, at its maximum length."""
        active = self.active_prefixes
        for prefix in reversed(request.prefixes):
            if prefix.key in active:
                return request.num_tokens - prefix.num_tokens + self._num_padding
        return request.num_tokens + self._num_padding

    def num_shared_tokens(self, request: ResourceRequest) -> int:
        """Return the leading prompt tokens whose KV this engine has."""
        num_affinity = request.num_affinity_tokens if request.affinity_engine == self.engine else 0
        for prefix in reversed(request.prefixes):
            if prefix.key in self.active_prefixes or prefix.key in self.cached_prefixes:
                return max(num_affinity, prefix.num_tokens)
        return num_affinity

    def fits(self, request: ResourceRequest, num_new_tokens: int, num_free_tokens: int) -> bool:
        """Return whether the engine has room for a call. An idle engine accepts any call.

        Args:
            request: the tokens that the call needs.
            num_new_tokens: result of `num_new_tokens` for it.
            num_free_tokens: result of `num_free_tokens` for it.
        """
        if self.num_calls >= self.max_calls:
            return False
        if num_new_tokens <= num_free_tokens or not self.num_calls:
            return True
        limit = self.token_limit(is_latency_critical=request.is_latency_critical)
        if limit < self.capacity and self.reserved_tokens + num_new_tokens > limit:
            return False
        if self._forecast.surely_exceeds(self.capacity, request.num_output, num_new_tokens):
            return False
        active = self.active_prefixes
        shared = [active[prefix.key] for prefix in request.prefixes if prefix.key in active]
        peak = self._forecast.peak_with(request.num_output, num_new_tokens, shared)
        return peak <= self.capacity

    def has_room(self, request: ResourceRequest) -> bool:
        """Return whether the engine has room for a call now."""
        num_free = self.num_free_tokens(is_latency_critical=request.is_latency_critical)
        return self.fits(request, self.num_new_tokens(request), num_free)

    def reserve(self, request: ResourceRequest, rank: float = 0.0) -> Reservation:
        """Reserve the tokens of a call that starts here."""
        self._programs.start(request, rank, self._get_step())
        num_new = self.num_new_tokens(request)
        self.reserved_tokens += num_new
        shared: list[SharedResidency] = []
        begin = request.num_tokens + self._num_padding - num_new
        for prefix in request.prefixes:
            part = self.active_prefixes.get(prefix.key)
            if part is None:
                # Tokens before the longest active prefix are reserved already.
                part = SharedResidency(max(prefix.num_tokens - begin, 0))
                self.active_prefixes[prefix.key] = part
                begin = max(begin, prefix.num_tokens)
                if prefix.key in self.cached_prefixes:
                    self.num_cached_tokens -= self.cached_prefixes.pop(prefix.key)
            shared.append(part)
        num_own = request.num_unshared_tokens + self._num_padding
        residency = self._forecast.add(request.num_output, num_own, tuple(shared))
        self.num_calls += 1
        self.num_latency_critical += request.is_latency_critical
        reservation = Reservation(request, residency, self._evict())
        self.running[reservation] = None
        return reservation

    @property
    def num_programs(self) -> int:
        """Return the number of programs with a call here."""
        return len(self._programs)

    def programs_ahead(self, rank: float) -> ProgramsAhead:
        """Return the programs that run here and rank before a call."""
        return self._programs.ahead_of(rank, self._get_step())

    def on_prefill_done(self, reservation: Reservation) -> bool:
        """Restart the forecast of a call whose output begins now; return whether it ends later."""
        self._programs.begin_decode(reservation.request, self._get_step())
        return self._forecast.extend(reservation.residency, reservation.request.num_output)

    def release(self, reservation: Reservation) -> list[bytes]:
        """Release a call's tokens; return the keys of prefixes that the engine no longer holds."""
        request = reservation.request
        del self.running[reservation]
        self._programs.end(request.program)
        self._forecast.remove(reservation.residency)
        gone: list[bytes] = []
        num_released = request.num_unshared_tokens + self._num_padding
        longer: SharedResidency | None = None
        # Longest prefix first, so that the cache evicts the end of a prompt before its start.
        for i in range(len(request.prefixes) - 1, -1, -1):
            prefix, part = request.prefixes[i], reservation.residency.shared[i]
            if part.readers:
                longer = part
                continue
            del self.active_prefixes[prefix.key]
            if longer is None:
                num_released += part.num_tokens
            else:  # A reader with other boundaries holds a longer prefix, and these tokens with it.
                self._forecast.grow_shared(longer, part.num_tokens)
            if prefix.is_expected:
                begin = request.prefixes[i - 1].num_tokens if i else 0
                self.cached_prefixes[prefix.key] = prefix.num_tokens - begin
                self.num_cached_tokens += prefix.num_tokens - begin
            else:
                gone.append(prefix.key)
        self.reserved_tokens -= num_released
        self.num_calls -= 1
        self.num_latency_critical -= request.is_latency_critical
        return [*gone, *self._evict()]

    def _evict(self) -> Sequence[bytes]:
        """Evict cached prefixes that no longer fit; return their keys."""
        if not self.cached_prefixes:
            return ()
        evicted: list[bytes] = []
        while self.cached_prefixes and self.num_cached_tokens > self.capacity - self._forecast.peak:
            key, num_tokens = self.cached_prefixes.popitem(last=False)
            self.num_cached_tokens -= num_tokens
            evicted.append(key)
        return evicted
