"""A cost model of an engine: prompts are prefilled one after another, outputs are decoded together.

The model contains the durations of prefills and steps, but does not simulate single tokens and
blocks. Between two changes of the running calls, all calls advance alike, so an interval of steps
is one event. Prompts are prefilled whole and in order of rank; outputs pause meanwhile.

A step reads the tokens that its calls hold. If the engine's kernels read a shared prefix once, it
is counted once.

Invariant: a started call is prefilled and then finished, once each, unless it is cancelled.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from conure.server.scheduling.request import PromptPrefix, ResourceRequest
from conure.server.scheduling.reservations import EngineReservations, Reservation
from simulation.clock import SimulationClock


class CostModel(Protocol):
    """Durations of an engine's work, in seconds."""

    @property
    def prompt_token_s(self) -> float:
        """Return the time per prompt token, as given to the scheduler."""
        ...

    @property
    def held_token_s(self) -> float:
        """Return the time per token that a step attends to, as given to the scheduler."""
        ...

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time to prefill a prompt with `num_tokens` tokens that are not cached."""
        ...

    def steps_s(self, num_steps: int, num_calls: int, num_held: int) -> float:
        """Return the time of steps of calls that hold `num_held` tokens at first, each growing by
        one token per step.
        """
        ...

    def num_steps_in(self, seconds: float, num_calls: int, num_held: int) -> int:
        """Return the number of these steps that end at or after `seconds`, up to rounding."""
        ...


class LinearCosts(NamedTuple):
    """Durations that are linear in every quantity."""

    prompt_s: float
    """Per prompt, independent of its length."""
    prompt_token_s: float
    step_s: float
    """Per step, independent of its work."""
    sequence_s: float
    """Per call that gets a token in a step."""
    held_token_s: float
    """Per token that these calls attend to."""

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time to prefill a prompt with `num_tokens` tokens that are not cached."""
        return self.prompt_s + num_tokens * self.prompt_token_s if num_tokens else 0.0

    def steps_s(self, num_steps: int, num_calls: int, num_held: int) -> float:
        """Return the time of steps of calls that hold `num_held` tokens at first, each growing by
        one token per step.
        """
        reservation = num_held + num_calls * (num_steps - 1) / 2
        each_s = self.step_s + num_calls * self.sequence_s + reservation * self.held_token_s
        return num_steps * each_s

    def num_steps_in(self, seconds: float, num_calls: int, num_held: int) -> int:
        """Return the number of these steps that end at or after `seconds`, up to rounding."""
        growth_s = num_calls * self.held_token_s / 2
        first_s = self.step_s + num_calls * self.sequence_s + num_held * self.held_token_s
        linear_s = first_s - growth_s
        root_s = math.sqrt(linear_s**2 + 4 * growth_s * seconds)
        return math.ceil(2 * seconds / (linear_s + root_s)) if seconds else 1


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """One call on an engine."""

    request: ResourceRequest
    num_prefill: int
    """Prompt tokens that are not cached."""
    num_output: int
    rank: float
    on_prefilled: Callable[[], None]
    on_finished: Callable[[], None]
    first_step: int = -1
    """Number of the engine's steps when the output began; -1 before that."""
    held: Reservation | None = None
    """What its prompt holds, while its output grows."""
    is_cancelled: bool = False
    boundaries: tuple[PromptPrefix, ...] = ()
    """Where its prompt may share KV with others, also if the scheduler does not know it."""


class SimulatedEngine:
    """One engine in virtual time."""

    def __init__(
        self, name: str, clock: SimulationClock, cost: CostModel, *, reads_shared_once: bool
    ) -> None:
        self.name = name
        self.num_steps = 0
        """Steps made so far."""
        self.busy_s = 0.0
        self._clock = clock
        self._cost = cost
        self._reads_shared_once = reads_shared_once
        self._order = itertools.count()
        self._prompts: list[tuple[float, int, SimulatedCall]] = []
        self._outputs: list[tuple[int, int, SimulatedCall]] = []
        """Ordered by last step."""
        self._num_decoding = 0
        self._num_generated = 0
        """Tokens that running outputs have generated, in total."""
        self._prompt_reservations = EngineReservations(name, 2**62, 2**62)
        """Reservations of the prompts of running outputs."""
        self._is_prefilling = False
        self._interval: tuple[float, int] | None = None
        """Start and scheduled number of steps of the present interval."""
        self._version = 0
        self._step_cache = (-1.0, 0)
        """Time and result of the last `steps_now`."""

    def steps_now(self) -> int:
        """Return the number of steps so far, including the running one."""
        now = self._clock.now
        if self._step_cache[0] != now:
            num_steps = self.num_steps
            if self._interval is not None:
                num_steps += self._num_steps_within(now - self._interval[0], self._interval[1])
            self._step_cache = (now, num_steps)
        return self._step_cache[1]

    def start(self, call: SimulatedCall) -> None:
        """Start a call."""
        heapq.heappush(self._prompts, (call.rank, next(self._order), call))
        self._reschedule()

    def cancel(self, call: SimulatedCall) -> None:
        """Cancel a call at the end of the running step; a no-op if it has ended."""
        if not call.is_cancelled:
            call.is_cancelled = True
            if call.first_step >= 0:
                self._reschedule()

    # --- intervals and prefills -------------------------------------------------------------

    def _reschedule(self) -> None:
        """After a change of the calls: end the interval with the running step, or start the next
        work.
        """
        if self._is_prefilling:
            return
        if self._interval is None:
            self._start_next()
            return
        began_s, num_scheduled = self._interval
        num_finished = self._num_steps_within(self._clock.now - began_s, num_scheduled)
        if num_finished < num_scheduled:
            self._plan_interval(began_s, num_finished)

    def _num_steps_within(self, elapsed_s: float, num_scheduled: int) -> int:
        """Return how many of the scheduled steps end at or after `elapsed_s`; at least one."""
        held = self._prompt_reservations.reserved_tokens + self._num_generated
        guess = self._cost.num_steps_in(elapsed_s, self._num_decoding, held)
        found = min(max(guess, 1), num_scheduled)
        while found > 1 and self._steps_s(found - 1) >= elapsed_s:
            found -= 1
        while found < num_scheduled and self._steps_s(found) < elapsed_s:
            found += 1
        return found

    def _steps_s(self, num_steps: int) -> float:
        held = self._prompt_reservations.reserved_tokens + self._num_generated
        return self._cost.steps_s(num_steps, self._num_decoding, held)

    def _plan_interval(self, began_s: float, num_steps: int) -> None:
        """Schedule an interval of steps."""
        self._version += 1
        version = self._version
        self._interval = (began_s, num_steps)
        self._step_cache = (-1.0, 0)
        self._clock.at(
            began_s + self._steps_s(num_steps), lambda: self._end_interval(version, num_steps)
        )

    def _end_interval(self, version: int, num_steps: int) -> None:
        if version != self._version:
            return  # The interval was shortened.
        assert self._interval is not None
        self.busy_s += self._clock.now - self._interval[0]
        self._interval = None
        self.num_steps += num_steps
        self._num_generated += num_steps * self._num_decoding
        ended: list[SimulatedCall] = []
        while self._outputs and (
            self._outputs[0][0] <= self.num_steps or self._outputs[0][2].is_cancelled
        ):
            ended.append(heapq.heappop(self._outputs)[2])
        for call in ended:
            self._num_decoding -= 1
            self._num_generated -= self.num_steps - call.first_step
            assert call.held is not None
            self._prompt_reservations.release(call.held)
        for call in ended:
            if not call.is_cancelled:
                call.on_finished()
        self._start_next()

    def _start_next(self) -> None:
        if self._is_prefilling or self._interval is not None:
            return  # A callback of `on_finished` has started work.
        while self._prompts and self._prompts[0][2].is_cancelled:
            heapq.heappop(self._prompts)
        if self._prompts:
            call = heapq.heappop(self._prompts)[2]
            self._is_prefilling = True
            prefill_s = self._cost.prefill_s(call.num_prefill)
            self.busy_s += prefill_s
            self._clock.after(prefill_s, lambda: self._end_prefill(call))
        elif self._outputs:
            self._plan_interval(self._clock.now, max(self._outputs[0][0] - self.num_steps, 1))

    def _end_prefill(self, call: SimulatedCall) -> None:
        self._is_prefilling = False
        if not call.is_cancelled:
            call.first_step = self.num_steps
            self._num_decoding += 1
            call.held = self._prompt_reservations.reserve(self._as_held(call))
            entry = (self.num_steps + call.num_output, next(self._order), call)
            heapq.heappush(self._outputs, entry)
            call.on_prefilled()
        self._start_next()

    def _as_held(self, call: SimulatedCall) -> ResourceRequest:
        prefixes = call.request.prefixes if self._reads_shared_once else ()
        return replace(call.request, prefixes=prefixes, num_output=0)
