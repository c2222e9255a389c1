"""What a step of an engine costs, measured from outside.

A step takes a fixed time, a time for each token that it computes, and a time for each token whose
KV the engine holds, because outputs attend to these in every step. `StepCostMeter` fits the three
to the arrival times of an engine's step reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from conure.engine.protocol import StepReport

MIN_INTERVAL_S = 0.05
"""Steps are summed over at least this time: reports arrive with a jitter of milliseconds."""
KEEP = 0.998
"""Weight of earlier intervals when one is added: the speed of an engine changes with other load."""
EPSILON = 1e-9
"""Relative difference that counts as none: rounding errors may be as large."""
_SETS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
"""Sets of amounts by their index, the smaller ones first."""


class StepCosts(NamedTuple):
    """Seconds of an engine, all at least 0."""

    step_s: float
    """Per step."""
    token_s: float
    """Per token that is computed, of a prompt or an output."""
    held_token_s: float
    """Per step and token whose KV the engine holds."""


class StepAmounts(NamedTuple):
    """What an engine did in some time."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens that were computed."""
    num_held: int = 0
    """Tokens whose KV the engine held, summed over the steps."""


class StepCostFit:
    """The costs that explain the intervals of an engine best: non-negative least squares."""

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._by_time = [0.0] * 3

    def add(self, amounts: StepAmounts, seconds: float) -> None:
        """Add an interval that took `seconds`, more than 0."""
        # The weight of an interval is 1 / seconds: its variance is taken to be proportional to its
        # duration. In `_by_time`, weight and duration cancel.
        for i, amount in enumerate(amounts):
            row = self._products[i]
            for j, other in enumerate(amounts):
                row[j] = KEEP * row[j] + amount * other / seconds
            self._by_time[i] = KEEP * self._by_time[i] + amount

    def fit(self) -> StepCosts | None:
        """Return the costs; None before the first interval.

        The best costs solve the normal equations of the amounts whose cost is not 0 (C. Lawson and
        R. Hanson, Solving Least Squares Problems, chapter 23). So these are solved for every set of
        amounts. Of the solutions without negative costs, the one that explains most time is best.
        """
        best, explained = None, 0.0
        for priced in _SETS:
            costs = self._solve(priced)
            if costs is None or min(costs) < 0:
                continue
            time_s = sum(cost * amount for cost, amount in zip(costs, self._by_time, strict=True))
            # Proportional amounts explain the same: the costs of the first ones count.
            if time_s > explained * (1 + EPSILON):
                best, explained = costs, time_s
        return best

    def _solve(self, priced: tuple[int, ...]) -> StepCosts | None:
        """Solve the normal equations of some amounts; None if these are proportional to others."""
        matrix = [[float(i == j) for j in range(3)] for i in range(3)]
        right = [0.0] * 3
        for i in priced:
            right[i] = self._by_time[i]
            for j in priced:
                matrix[i][j] = self._products[i][j]
        determinant = _determinant(matrix)
        if determinant <= EPSILON * matrix[0][0] * matrix[1][1] * matrix[2][2]:
            return None
        costs = [0.0] * 3
        for column in priced:  # Cramer's rule
            replaced = [
                [*row[:column], value, *row[column + 1 :]]
                for row, value in zip(matrix, right, strict=True)
            ]
            costs[column] = _determinant(replaced) / determinant
        return StepCosts(*costs)


def _determinant(matrix: Sequence[Sequence[float]]) -> float:
    (a, b, c), (d, e, f), (g, h, i) = matrix
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


class StepCostMeter:
    """Measures the costs of one engine's steps by the arrival of its reports.

    Times are seconds on one monotonic clock.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._fit = StepCostFit()
        self._costs: StepCosts | None = None
        """The costs of all intervals; None if they have not been read since the last one."""
        self._amounts = StepAmounts()
        """Since the last interval that was added, like `_seconds`."""
        self._seconds = 0.0
        self._is_running = False
        """Whether the engine has been computing since `_at_s`."""
        self._at_s = 0.0
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def costs(self) -> StepCosts | None:
        """The costs of a step; None if the engine has not computed long enough."""
        if self._costs is None:
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
            self._amounts = StepAmounts(
                self._amounts.num_steps + num_steps,
                self._amounts.num_tokens + report.num_tokens - self._num_tokens,
                self._amounts.num_held + num_steps * num_held,
            )
            self._seconds += now - self._at_s
        self._is_running = not report.is_idle
        self._at_s, self._num_steps, self._num_tokens = now, report.number, report.num_tokens
        if self._seconds >= MIN_INTERVAL_S:
            self._fit.add(self._amounts, self._seconds)
            self._amounts, self._seconds, self._costs = StepAmounts(), 0.0, None
