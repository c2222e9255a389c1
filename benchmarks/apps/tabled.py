"""Costs whose steps are read off a table by how many calls are in them.

Between two sizes of the table a line; beyond its ends, its ends. What a call holds has no part in
it, for a table of one workload has it in it already.

Knows a table and prompts. Refuses to know whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from conure.server.simulation.engine import Cost


class Tabled:
    """Costs of an engine, for a simulation."""

    held_token_s = 0.0

    def __init__(self, prompt_token_s: float, steps: Mapping[int, float]) -> None:
        """Seconds for a token of a prompt, and of a step by the calls in it."""
        self.prompt_token_s = prompt_token_s
        sizes, seconds = sorted(steps), [steps[size] for size in sorted(steps)]

        @cache
        def at(num_calls: int) -> Cost:
            step_s = float(np.interp(num_calls, sizes, seconds))
            return Cost(0.0, prompt_token_s, step_s, 0.0, 0.0)

        self._at = at

    def fill_s(self, num_tokens: int) -> float:
        """As `Cost.fill_s`."""
        return num_tokens * self.prompt_token_s

    def steps_s(self, num_steps: int, num_calls: int, num_held: int) -> float:
        """As `Cost.steps_s`."""
        return self._at(num_calls).steps_s(num_steps, num_calls, num_held)

    def num_steps_in(self, seconds: float, num_calls: int, num_held: int) -> int:
        """As `Cost.num_steps_in`."""
        return self._at(num_calls).num_steps_in(seconds, num_calls, num_held)
