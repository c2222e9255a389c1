"""The open calls that go before those of a new program, by the order of the server's policy.

Which calls these are depends on the new program: one with little work goes before a batch of 10,000
calls that was submitted just before it.

Out of scope: how long these calls take (`load`).
"""

from __future__ import annotations

from ...program.ir import Objective
from ...scheduling.policy import Policy
from ...scheduling.request import PriorityInputs
from ...scheduling.service_time import SHARED_STEP_CALLS
from ..program_state import ProgramState
from .call_quota import CallQuota
from .load import Newcomer


def is_background(objectives: dict[str, Objective]) -> bool:
    """Return whether no reader waits for a program with these objectives of its outputs."""
    return all(objective == "throughput" for objective in objectives.values())


class Backlog:
    """The calls of the programs that were accepted."""

    def __init__(self, quota: CallQuota, policy: Policy) -> None:
        self._quota = quota
        self._policy = policy

    def num_ahead(self, newcomer: Newcomer, *, call_s: float, now_s: float) -> int:
        """Return the number of open calls that rank before those of a new program, or equally.

        The time grows with the number of programs.

        Args:
            newcomer: the new program.
            call_s: average seconds of a call on an engine.
            now_s: the time on the clock of the programs' `created_at`.
        """
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
