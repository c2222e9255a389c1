"""An engine in virtual time that works in steps with a token budget, as the real engine does.

A step serves the calls by rank: one token for each call that decodes, and chunks of prompts with
the rest of the budget. All rows of a step end together. Unlike `engine`, which prefills prompts
whole, this engine shows how prompts delay the outputs next to them; it simulates every step.

Out of scope: preemption. The scheduler's reservations keep the calls within the memory.

Invariant: a started call is prefilled and then finished, once each, unless it is cancelled.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from simulation.clock import SimulationClock
from simulation.engine import LinearCosts, SimulatedCall


class StepLimits(NamedTuple):
    """What fits into one step."""

    num_tokens: int = 512
    num_sequences: int = 16
    join_s: float = 0.0
    """Time from the start of a call until the engine can run it: the server's own work."""


@dataclass(slots=True, eq=False)
class _Row:
    """One call on the engine."""

    call: SimulatedCall
    order: int
    num_prompt_left: int
    num_output_left: int
    num_new: int = 0
    """Tokens in the running step."""


class StepwiseEngine:
    """One engine."""

    def __init__(
        self, name: str, clock: SimulationClock, cost: LinearCosts, limits: StepLimits
    ) -> None:
        self.name = name
        self.num_steps = 0
        self.busy_s = 0.0
        self._clock = clock
        self._cost = cost
        self._limits = limits
        self._order = itertools.count()
        self._computed: set[bytes] = set()
        """Prefixes of prompts whose KV exists at the end of the running step. They stay."""
        self._rows: list[_Row] = []
        """By rank, then by arrival."""
        self._is_running = False

    def steps_now(self) -> int:
        """Return the number of steps that have ended."""
        return self.num_steps

    def start(self, call: SimulatedCall) -> None:
        """Start a call. It takes part in the first step that begins after `join_s`."""
        row = _Row(call, next(self._order), call.request.num_prompt, call.num_output)
        self._clock.after(self._limits.join_s, lambda: self._join(row))

    def cancel(self, call: SimulatedCall) -> None:
        """Cancel a call from the next step on; a no-op if it has ended."""
        call.is_cancelled = True

    def _join(self, row: _Row) -> None:
        self._rows.append(row)
        self._rows.sort(key=lambda each: (each.call.rank, each.order))
        if not self._is_running:
            self._is_running = True
            self._clock.defer(self._step)  # Calls that join at the same time share the step.

    def _step(self) -> None:
        self._rows = [row for row in self._rows if not row.call.is_cancelled]
        rows = self._choose()
        self._is_running = bool(rows)
        if not rows:
            return
        cost = self._cost
        num_prompt = sum(row.num_new for row in rows if row.num_prompt_left)
        num_held = sum(_num_held(row) for row in rows)
        took_s = cost.step_s + num_prompt * cost.prompt_token_s
        took_s += len(rows) * cost.sequence_s + num_held * cost.held_token_s
        self.busy_s += took_s
        self._clock.after(took_s, lambda: self._end_step(rows))

    def _choose(self) -> list[_Row]:
        budget = self._limits.num_tokens
        max_decode_reserve = budget // 2
        num_decoding = sum(not row.num_prompt_left for row in self._rows)
        chosen: list[_Row] = []
        for row in self._rows:
            if not budget or len(chosen) == self._limits.num_sequences:
                break
            if row.num_prompt_left:
                self._share(row)
                max_new = budget - min(num_decoding, max_decode_reserve)
                row.num_new = min(max(max_new, 0), row.num_prompt_left)
            else:
                num_decoding -= 1
                row.num_new = 1
            if row.num_new:
                self._register(row)
                budget -= row.num_new
                chosen.append(row)
        return chosen

    def _share(self, row: _Row) -> None:
        """Skip the longest prefix that was computed, also by an earlier row of this step."""
        num_prompt = row.call.request.num_prompt
        if row.num_prompt_left == num_prompt:
            known = (each.num_tokens for each in row.call.boundaries if each.key in self._computed)
            row.num_prompt_left = max(num_prompt - max(known, default=0), 1)

    def _register(self, row: _Row) -> None:
        if row.num_prompt_left:
            num_filled = row.call.request.num_prompt - row.num_prompt_left + row.num_new
            ends = row.call.boundaries
            self._computed.update(each.key for each in ends if each.num_tokens <= num_filled)

    def _end_step(self, rows: list[_Row]) -> None:
        self.num_steps += 1
        for row in rows:
            was_prefilling = row.num_prompt_left > 0
            row.num_prompt_left = max(row.num_prompt_left - row.num_new, 0)
            if row.num_prompt_left:
                continue
            row.num_output_left -= 1  # The step that ends a prompt also generates a token.
            if was_prefilling and not row.call.is_cancelled:
                row.call.on_prefilled()
        ended = [row for row in rows if not row.num_prompt_left and row.num_output_left <= 0]
        for row in ended:
            self._rows.remove(row)
        for row in ended:
            if not row.call.is_cancelled:
                row.call.on_finished()
        self._step()


def _num_held(row: _Row) -> int:
    request = row.call.request
    return request.num_tokens - row.num_prompt_left - row.num_output_left
