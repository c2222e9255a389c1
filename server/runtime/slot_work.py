"""The computations of one program's slots: short ones now, long ones off the event loop.

An executor calls `evaluate` while it runs a slot. If the computation is short, the executor gets
the value. If not, `SuspendedError` ends the run of the slot. The value is computed in a thread or
over several turns, and the slot is dispatched again. In the new run, the executor makes the same
calls in the same order, and those that have an outcome return the outcome at once.

Invariants: an executor computes everything before it changes its program, or can repeat the
changes before. A program has at most one computation in a thread, so that programs take turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, cast

from ..program.content import Expression, Json
from ..program.errors import ConureError, RunError
from ..program.expressions.budget import WorkBudget
from ..program.expressions.evaluate import evaluate, variables
from .node_state import Ready
from .turns import Turns

logger = logging.getLogger(__name__)

T = TypeVar("T")

Computation: TypeAlias = Callable[[WorkBudget], Any]
"""A computation that takes its steps from a budget, on the event loop or in a thread."""

INLINE_STEPS: Final = 2_000
"""Steps of one computation on the event loop, after which it starts again in a thread."""
_TOO_LONG: Final = frozenset({"expr.fuel", "quota.steps"})
"""Errors of a trial without steps left: of one expression, and of the program's budget."""


def is_too_long(error: Exception) -> bool:
    """Return whether a trial has ended with this error because its computation is long."""
    return isinstance(error, ConureError) and error.code in _TOO_LONG


class SuspendedError(Exception):
    """The slot runs again once a value has been computed."""


@dataclass(slots=True)
class Outcome:
    """The value of a computation, or its error."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class SlotWork:
    """The computations of the slots of one program."""

    def __init__(
        self, values: Mapping[str, Json], turns: Turns, resume: Callable[[Ready], None]
    ) -> None:
        """Create the work of a program.

        Args:
            values: the values of its variables.
            turns: turns of the event loop.
            resume: dispatches a slot again.
        """
        self.budget = WorkBudget()
        """The steps that the program may still take."""
        self._values = values
        self._turns = turns
        self._resume = resume
        self._slot = Ready("", 0)
        self._outcomes: list[Outcome] = []
        """The outcomes of the calls of a slot, from its suspended runs and from its current run."""
        self._num_calls = 0
        """Calls in the current run of the slot."""
        self._suspended: dict[Ready, list[Outcome]] = {}
        self._queue: deque[tuple[Computation, Callable[[Outcome], None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def begin(self, slot: Ready) -> None:
        """Begin the run of a slot, from the beginning or again after a suspension."""
        self._slot = slot
        self._outcomes = self._suspended.pop(slot, [])
        self._num_calls = 0

    # --- computations of a slot -----------------------------------------------------------

    def evaluate(self, expression: Expression) -> Json:
        """Return the value of an expression.

        Raises:
            ExpressionError: as `expressions.evaluate`; `quota.steps`.
            SuspendedError: if the computation is long.
        """
        if (known := self._known_outcome()) is not None:
            return known.get()
        values = self._values
        outcome = self.try_now(lambda budget: evaluate(expression, values, budget=budget))
        if outcome is None:
            # A thread must not read what the event loop changes.
            names = variables(expression)
            scope = {name: values[name] for name in names if name in values}
            self._suspend(lambda budget: evaluate(expression, scope, budget=budget))
        self._outcomes.append(outcome)
        return outcome.get()

    def try_now(self, compute: Computation) -> Outcome | None:
        """Return the outcome of a computation of at most `INLINE_STEPS`; None if it is longer."""
        steps = max(0, min(INLINE_STEPS, self.budget.left))
        budget = WorkBudget(steps, is_trial=True)
        try:
            outcome = Outcome(compute(budget))
        except ConureError as error:
            if is_too_long(error):  # the thread starts again, so only the turn loses the steps
                self._turns.spend(INLINE_STEPS)
                return None
            outcome = Outcome(error=error)
        self._charge(steps - budget.left)
        return outcome

    def run_in_turns(self, compute: Callable[[], Generator[int, None, T]]) -> T:
        """Return the result of a generator that yields the steps it has taken.

        The generator may yield at any time. It continues in the next turn if this turn has ended.

        Raises:
            SuspendedError: if it does not end in this turn.
        """
        if (known := self._known_outcome()) is not None:
            return cast(T, known.get())
        slot, outcomes = self._slot, self._outcomes
        generator = compute()
        outcome = self._advance(generator)
        if outcome is None:
            self._suspended[slot] = outcomes
            self._turns.call_later(partial(self._continue, slot, outcomes, generator))
            raise SuspendedError
        outcomes.append(outcome)
        return cast(T, outcome.get())

    def _continue(
        self, slot: Ready, outcomes: list[Outcome], generator: Generator[int, None, Any]
    ) -> None:
        """Run a generator for a turn; dispatch its slot again once it has ended."""
        if self._suspended.get(slot) is not outcomes:
            return  # the slot was begun again, or the program is over
        if (outcome := self._advance(generator)) is None:
            self._turns.call_later(partial(self._continue, slot, outcomes, generator))
            return
        outcomes.append(outcome)
        self._resume(slot)

    def _advance(self, generator: Generator[int, None, Any]) -> Outcome | None:
        """Run a generator until the turn ends; return its outcome if it has ended."""
        try:
            while not self._turns.has_ended:
                self._charge(next(generator))
        except StopIteration as end:
            return Outcome(end.value)
        except Exception as error:
            return Outcome(error=error)
        return None

    def _known_outcome(self) -> Outcome | None:
        """Count a call of the current run; return its outcome if an earlier run computed it.

        Otherwise the caller must append an outcome to `_outcomes`, or suspend the slot.
        """
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return self._outcomes[index] if index < len(self._outcomes) else None

    def _charge(self, steps: int) -> None:
        self._turns.spend(steps)
        self.budget.left -= steps

    # --- threads --------------------------------------------------------------------------

    def _suspend(self, compute: Computation) -> NoReturn:
        """Compute in a thread, and dispatch the slot again with the outcome."""
        slot, outcomes = self._slot, self._outcomes
        self._suspended[slot] = outcomes

        def done(outcome: Outcome) -> None:
            if self._suspended.get(slot) is outcomes:  # else the slot was begun again
                outcomes.append(outcome)
                self._resume(slot)

        self.submit(compute, done)
        raise SuspendedError

    def submit(self, compute: Computation, done: Callable[[Outcome], None]) -> None:
        """Compute something in a thread, after all earlier computations of the program.

        Args:
            compute: the computation.
            done: receives the outcome on the event loop, unless the program ends first.
        """
        self._queue.append((compute, done))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._queue:
            compute, done = self._queue.popleft()
            steps = max(self.budget.left, 0)
            budget = WorkBudget(steps)
            try:
                outcome = Outcome(await self._turns.in_thread(partial(compute, budget)))
            except ConureError as error:
                outcome = Outcome(error=error)
            except Exception as error:
                logger.exception("a computation of a program failed")
                message = f"internal server error: {type(error).__name__}; see the server's log"
                outcome = Outcome(error=RunError("server.internal", message))
            self.budget.left -= steps - budget.left
            done(outcome)
            await self._turns.wait_for_turn()
        self._task = None

    def stop(self) -> None:
        """Forget everything: the program is over."""
        self._queue.clear()
        self._suspended.clear()
        # `done` may end the program from within the task, which then ends without a computation.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def break_cycles(self) -> None:
        """Drop the callback: the program has ended."""
        self._resume = _ignore


def _ignore(_: Ready) -> None:
    """Do nothing: the program has ended."""
