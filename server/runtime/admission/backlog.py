"""The open calls that go before those of a new program, by the order of the server's policy.

Which calls these are depends on the new program: one with little work goes before a batch of 10,000
calls that was submitted just before it.

Out of scope: how long these calls take (`load`).
"""

from __future__ import annotations

import math

from ...program.graph.objectives import is_background
from ...scheduling.policy import Policy
from ...scheduling.request import PriorityInputs
from ...scheduling.service_time import SHARED_STEP_CALLS
from ..program_state import ProgramState
from .call_quota import CallQuota
from .load import Newcomer

COUNT_AGE_S = 0.05
"""How long a number of calls is used again."""


class Backlog:
    """The calls of the programs that were accepted."""

    def __init__(self, quota: CallQuota, policy: Policy) -> None:
        self._quota = quota
        self._policy = policy
        self._counted: dict[Newcomer, int] = {}
        """Results of `num_ahead` since `_counted_at`."""
        self._counted_at: tuple[tuple[int, int], float] = ((0, 0), -math.inf)
        """The programs and calls of the quota at the first of these counts, and its time."""

    def num_ahead(self, newcomer: Newcomer, *, call_s: float, now_s: float) -> int:
        """Return the number of open calls that rank before those of a new program, or equally.

        The time grows with the number of programs. A submission is checked several times: until
        calls or programs are added or end, the result is used again for `COUNT_AGE_S`.

        Args:
            newcomer: the new program.
            call_s: average seconds of a call on an engine.
            now_s: the time on the clock of the programs' `created_at`.
        """
        state = (self._quota.num_added, self._quota.num_calls)
        counted, counted_at_s = self._counted_at
        if state != counted or now_s - counted_at_s > COUNT_AGE_S:
            self._counted.clear()
            self._counted_at = (state, now_s)
        if newcomer not in self._counted:
            self._counted[newcomer] = self._count_ahead(newcomer, call_s, now_s)
        return self._counted[newcomer]

    def _count_ahead(self, newcomer: Newcomer, call_s: float, now_s: float) -> int:
        work_s = call_s / SHARED_STEP_CALLS
        own = self._rank_s(
            now_s, now_s, newcomer.num_calls * work_s, is_background=newcomer.is_background
        )

        def is_ahead(state: ProgramState) -> bool:
            rank_s = self._rank_s(
                now_s,
                now_s if state.is_open else state.created_at,  # its calls came one by one
                state.num_open_calls * work_s,
                is_background=is_background(state.graph.objectives),
            )
            return rank_s <= own

        return self._quota.num_calls_of(is_ahead)

    def _rank_s(
        self, now_s: float, started_at_s: float, work_s: float, *, is_background: bool
    ) -> float:
        inputs = PriorityInputs(
            arrived_at_s=now_s,
            program_started_at_s=started_at_s,
            kind="throughput" if is_background else "latency",
            remaining_work_s=work_s,
        )
        return self._policy.rank(inputs).at_s
