"""Cost models whose step time is a table over the number of calls in the step.

The table is interpolated linearly, and constant beyond its ends. Held tokens do not matter,
because a table for one workload already includes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from simulation.engine import LinearCosts


class TabulatedCost:
    """A cost model for the simulator."""

    held_token_s = 0.0

    def __init__(self, prompt_token_s: float, steps: Mapping[int, float]) -> None:
        """Take the seconds per prompt token, and the step seconds by the number of calls."""
        self.prompt_token_s = prompt_token_s
        sizes, seconds = sorted(steps), [steps[size] for size in sorted(steps)]

        @cache
        def at(num_calls: int) -> LinearCosts:
            step_s = float(np.interp(num_calls, sizes, seconds))
            return LinearCosts(0.0, prompt_token_s, step_s, 0.0, 0.0)

        self._at = at

    def prefill_s(self, num_tokens: int) -> float:
        """See `LinearCosts.prefill_s`."""
        return num_tokens * self.prompt_token_s

    def steps_s(self, num_steps: int, num_calls: int, num_held: int) -> float:
        """See `LinearCosts.steps_s`."""
        return self._at(num_calls).steps_s(num_steps, num_calls, num_held)

    def num_steps_in(self, seconds: float, num_calls: int, num_held: int) -> int:
        """See `LinearCosts.num_steps_in`."""
        return self._at(num_calls).num_steps_in(seconds, num_calls, num_held)
