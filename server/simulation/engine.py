"""An engine as a cost model of whole calls: prompts one after another, outputs all at once.

Knows how long a prompt and a step take. Refuses to know tokens, blocks and steps one by one:
between two changes of who runs, all running calls advance alike, so a stretch of steps is one
event. Prompts are filled whole and in order of rank, and outputs stand still meanwhile.

What a step reads is what its calls hold; where the engine's kernels read a shared prefix
once, it counts once.

Kept true: a call that is started is filled, then finished, once each, unless it is cancelled.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ..scheduling.demand import Demand
from ..scheduling.load import Booking, Load
from .clock import Clock


class Costs(Protocol):
    """Seconds that an engine takes, whatever they are computed from."""

    @property
    def prompt_token_s(self) -> float:
        """For a token of a prompt, as far as the scheduler is told."""
        ...

    @property
    def held_token_s(self) -> float:
        """For a token that a step attends to, as far as the scheduler is told."""
        ...

    def fill_s(self, num_tokens: int) -> float:
        """Filling a prompt of so many tokens that are not there yet."""
        ...

    def steps_s(self, num_steps: int, num_calls: int, num_held: int) -> float:
        """So many steps of calls that hold so much at first, each growing by one token a step."""
        ...

    def num_steps_in(self, seconds: float, num_calls: int, num_held: int) -> int:
        """How many of these steps end no sooner than after so long, but for rounding."""
        ...


class Cost(NamedTuple):
    """Costs that are a line in every number."""

    prompt_s: float
    """For every prompt, whatever its length."""
    prompt_token_s: float
    step_s: float
    """For every step, whatever it does."""
    sequence_s: float
    """For every call that gets a token in it."""
    held_token_s: float
    """For every token that these attend to."""

    def fill_s(self, num_tokens: int) -> float:
        """Filling a prompt of so many tokens that are not there yet."""
        return self.prompt_s + num_tokens * self.prompt_token_s if num_tokens else 0.0

    def steps_s(self, num_steps: int, num_calls: int, num_held: int) -> float:
        """So many steps of calls that hold so much at first, each growing by one token a step."""
        held = num_held + num_calls * (num_steps - 1) / 2
        each_s = self.step_s + num_calls * self.sequence_s + held * self.held_token_s
        return num_steps * each_s

    def num_steps_in(self, seconds: float, num_calls: int, num_held: int) -> int:
        """How many of these steps end no sooner than after so long, but for rounding."""
        growth_s = num_calls * self.held_token_s / 2
        first_s = self.step_s + num_calls * self.sequence_s + num_held * self.held_token_s
        linear_s = first_s - growth_s
        root_s = math.sqrt(linear_s**2 + 4 * growth_s * seconds)
        return math.ceil(2 * seconds / (linear_s + root_s)) if seconds else 1


@dataclass(slots=True, eq=False)
class Work:
    """One call on an engine."""

    demand: Demand
    num_fill: int
    """Tokens of its prompt that are not there."""
    num_output: int
    rank: float
    filled: Callable[[], None]
    finished: Callable[[], None]
    joined_at: int = -1
    """Steps that the engine had made when its output began; -1: it has not."""
    held: Booking | None = None
    """What its prompt holds, while its output grows."""
    is_cancelled: bool = False


class SimulatedEngine:
    """One engine in virtual time."""

    def __init__(self, name: str, clock: Clock, cost: Costs, *, reads_shared_once: bool) -> None:
        self.name = name
        self.num_steps = 0
        """Made so far."""
        self.busy_s = 0.0
        self._clock = clock
        self._cost = cost
        self._reads_shared_once = reads_shared_once
        self._order = itertools.count()
        self._prompts: list[tuple[float, int, Work]] = []
        self._outputs: list[tuple[int, int, Work]] = []
        """By the step that will be its last."""
        self._num_decoding = 0
        self._grown = 0
        """Tokens that running outputs have come to, all together."""
        self._prompt_books = Load(name, 2**62, 2**62)
        """What the prompts of running outputs hold."""
        self._is_filling = False
        self._stretch: tuple[float, int] | None = None
        """When the present stretch of steps began, and how many it was to have."""
        self._version = 0
        self._counted = (-1.0, 0)
        """When somebody asked for the steps made so far, and how many they were."""

    def steps_now(self) -> int:
        """Steps made so far, the one that runs included."""
        now = self._clock.now
        if self._counted[0] != now:
            num_steps = self.num_steps
            if self._stretch is not None:
                num_steps += self._num_within(now - self._stretch[0], self._stretch[1])
            self._counted = (now, num_steps)
        return self._counted[1]

    def start(self, work: Work) -> None:
        """Take on a call."""
        heapq.heappush(self._prompts, (work.rank, next(self._order), work))
        self._turn()

    def cancel(self, work: Work) -> None:
        """Give a call up, within the step that runs; safe when it has ended."""
        if not work.is_cancelled:
            work.is_cancelled = True
            if work.joined_at >= 0:
                self._turn()

    # --- one thing after another ----------------------------------------------------------

    def _turn(self) -> None:
        """Something changed: finish the step that runs, then do what comes next."""
        if self._is_filling:
            return
        if self._stretch is None:
            self._next()
            return
        began_s, num_planned = self._stretch
        num_done = self._num_within(self._clock.now - began_s, num_planned)
        if num_done < num_planned:
            self._plan(began_s, num_done)

    def _num_within(self, elapsed_s: float, num_planned: int) -> int:
        """Steps that end no sooner than now, of those that were planned: at least one."""
        held = self._prompt_books.used + self._grown
        guess = self._cost.num_steps_in(elapsed_s, self._num_decoding, held)
        found = min(max(guess, 1), num_planned)
        while found > 1 and self._steps_s(found - 1) >= elapsed_s:
            found -= 1
        while found < num_planned and self._steps_s(found) < elapsed_s:
            found += 1
        return found

    def _steps_s(self, num_steps: int) -> float:
        held = self._prompt_books.used + self._grown
        return self._cost.steps_s(num_steps, self._num_decoding, held)

    def _plan(self, began_s: float, num_steps: int) -> None:
        """Let so many steps happen and look again."""
        self._version += 1
        version = self._version
        self._stretch = (began_s, num_steps)
        self._counted = (-1.0, 0)
        self._clock.at(
            began_s + self._steps_s(num_steps), lambda: self._end_stretch(version, num_steps)
        )

    def _end_stretch(self, version: int, num_steps: int) -> None:
        if version != self._version:
            return  # it was cut short
        assert self._stretch is not None
        self.busy_s += self._clock.now - self._stretch[0]
        self._stretch = None
        self.num_steps += num_steps
        self._grown += num_steps * self._num_decoding
        ended: list[Work] = []
        while self._outputs and (
            self._outputs[0][0] <= self.num_steps or self._outputs[0][2].is_cancelled
        ):
            ended.append(heapq.heappop(self._outputs)[2])
        for work in ended:
            self._num_decoding -= 1
            self._grown -= self.num_steps - work.joined_at
            assert work.held is not None
            self._prompt_books.leave(work.held)
        for work in ended:
            if not work.is_cancelled:
                work.finished()
        self._next()

    def _next(self) -> None:
        if self._is_filling or self._stretch is not None:
            return  # whoever heard of an end has started something
        while self._prompts and self._prompts[0][2].is_cancelled:
            heapq.heappop(self._prompts)
        if self._prompts:
            work = heapq.heappop(self._prompts)[2]
            self._is_filling = True
            fill_s = self._cost.fill_s(work.num_fill)
            self.busy_s += fill_s
            self._clock.after(fill_s, lambda: self._end_fill(work))
        elif self._outputs:
            self._plan(self._clock.now, max(self._outputs[0][0] - self.num_steps, 1))

    def _end_fill(self, work: Work) -> None:
        self._is_filling = False
        if not work.is_cancelled:
            work.joined_at = self.num_steps
            self._num_decoding += 1
            work.held = self._prompt_books.book(self._as_held(work))
            entry = (self.num_steps + work.num_output, next(self._order), work)
            heapq.heappush(self._outputs, entry)
            work.filled()
        self._next()

    def _as_held(self, work: Work) -> Demand:
        prefixes = work.demand.prefixes if self._reads_shared_once else ()
        return replace(work.demand, prefixes=prefixes, num_output=0)
