"""What a step of an engine costs, measured from outside.

A step takes a fixed time, a time for each token that it computes, and a time for each token whose
KV the engine holds, because outputs attend to these in every step. `StepClock` fits the three to
the arrival times of an engine's step reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from conure.engine.protocol import StepReport

MIN_INTERVAL_S = 0.05
"""Steps are summed over at least this time: reports arrive with a jitter of milliseconds."""
KEEP = 0.998
"""Weight of earlier intervals when one is added: the speed of an engine changes with other load."""
NUM_SWEEPS = 30


class StepCosts(NamedTuple):
    """Seconds of an engine, all at least 0."""

    step_s: float
    """Per step."""
    token_s: float
    """Per token that is computed, of a prompt or an output."""
    held_token_s: float
    """Per step and token whose KV the engine holds."""


class StepCostFit:
    """The costs that explain the intervals of an engine best: non-negative least squares."""

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._by_time = [0.0] * 3

    def add(self, amounts: Sequence[float], seconds: float) -> None:
        """Add an interval.

        Args:
            amounts: steps, computed tokens, and the sum of held tokens over the steps.
            seconds: duration, more than 0.
        """
        # The variance of a sum of steps is taken to be proportional to its duration.
        for i, amount in enumerate(amounts):
            row = self._products[i]
            for j, other in enumerate(amounts):
                row[j] = KEEP * row[j] + amount * other / seconds
            self._by_time[i] = KEEP * self._by_time[i] + amount

    def fit(self) -> StepCosts:
        """Return the costs, found by coordinate descent; all 0 before the first interval."""
        products, by_time = self._products, self._by_time
        costs = [0.0] * 3
        for _ in range(NUM_SWEEPS):
            for i, row in enumerate(products):
                if row[i]:
                    others = sum(row[j] * costs[j] for j in range(3) if j != i)
                    costs[i] = max((by_time[i] - others) / row[i], 0.0)
        return StepCosts(*costs)


class StepClock:
    """The step reports of one engine. Times are seconds on one monotonic clock."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._fit = StepCostFit()
        self._costs: StepCosts | None = None
        """The costs of all intervals; None if one was added since."""
        self._has_intervals = False
        self._amounts = [0.0] * 3
        """Steps, tokens and held tokens since the last interval that was added."""
        self._seconds = 0.0
        self._is_running = False
        """Whether the engine has been computing since `at_s`."""
        self._at_s = 0.0
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def costs(self) -> StepCosts | None:
        """The costs of a step; None if the engine has not computed long enough."""
        if self._costs is None and self._has_intervals:
            self._costs = self._fit.fit()
        return self._costs

    def start(self, now: float) -> None:
        """Note that an engine was sent work; without effect if it is computing already."""
        if not self._is_running:
            self._is_running, self._at_s = True, now

    def observe(self, report: StepReport, now: float) -> None:
        """Add a report that arrived at the time `now`."""
        if self._is_running:
            num_steps = report.number - self._num_steps
            num_held = (self._num_blocks - report.num_free - report.num_cached) * self._block_size
            self._amounts[0] += num_steps
            self._amounts[1] += report.num_tokens - self._num_tokens
            self._amounts[2] += num_steps * num_held
            self._seconds += now - self._at_s
        self._is_running = not report.is_idle
        self._at_s, self._num_steps, self._num_tokens = now, report.number, report.num_tokens
        if self._seconds >= MIN_INTERVAL_S:
            self._fit.add(self._amounts, self._seconds)
            self._amounts, self._seconds = [0.0] * 3, 0.0
            self._costs, self._has_intervals = None, True
