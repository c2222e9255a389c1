"""The budget of work that expressions and other computations of a program may spend.

The unit is a step: about a microsecond of one core. A step of an expression is one operation.

Responsibility: counting, and the errors of budgets that are used up.
Out of scope: where the work runs. `runtime.slot_work` runs what is short on the event loop and what
is long in a thread.
"""

from __future__ import annotations

from typing import Final

from ..errors import ExpressionError

MAX_STEPS: Final = 10_000_000
"""Steps of a whole program."""


class WorkBudget:
    """Steps that a computation may still take; shared by all parts of the computation."""

    __slots__ = ("is_trial", "left")

    def __init__(self, steps: int = MAX_STEPS, *, is_trial: bool = False) -> None:
        self.left = steps
        self.is_trial = is_trial
        """Whether the computation runs on the event loop, and again elsewhere if it is too long.

        A trial is charged the longest time that an operation may take, before the operation.
        """

    def spend(self, steps: int) -> None:
        """Pay for steps.

        Raises:
            ExpressionError: `quota.steps` if the budget is used up.
        """
        self.left -= steps
        if self.left < 0:
            raise exhausted()


def exhausted() -> ExpressionError:
    """Return the error of a program that has used up its steps."""
    return ExpressionError(
        "quota.steps",
        f"the program has used up the {MAX_STEPS:,} steps that its expressions may take: "
        "split it into several programs, or compute values in a function or on the client",
    )
