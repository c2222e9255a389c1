"""`loop` at work: one round after another, until the list, the count or `until` says stop.

What a round starts with and whether there is another one are values, written down at the end
of the round before.

Kept true: a round begins after all of the round before has ended.
"""

from __future__ import annotations

import asyncio

from msgspec import UNSET

from ..program.control import ENTER, GIVE
from ..program.errors import ConureError, ExpressionError, RunError
from ..program.expression import evaluate, variables
from ..program.ir import Expression, Json, Loop, Round
from ..program.value import is_true
from .execution import Ready
from .ground import Ground

ROUNDS_AT_ONCE = 32
"""Rounds of computations alone that a loop runs in one turn."""


class Loops:
    """The loops of one program."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._execution = ground.execution
        self._host = ground.host
        self._bodies = ground.bodies

    def enter(self, node: Loop) -> None:
        """What it starts with is there: the first round may begin, if there is one."""
        rounds: Json = None
        if node.items is not UNSET:
            rounds = self._ground.list_of(node.items, node.id)
        elif node.count is not UNSET:
            rounds = evaluate(node.count, self._execution.values)
            if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0:
                raise RunError("loop.count", f"{rounds!r} is no number of rounds for {node.id}")
        starts = {
            name: evaluate(init, self._execution.values) for name, (init, _) in node.carry.items()
        }
        ready = self._ground.decide(node, rounds)
        for name, value in starts.items():
            ready += self._host.write(f"{name}.0", value, node.id)
        self._host.advance(ready)
        if self._bodies.num_planned(node) == 0:
            self._host.slot_over(node.id, ENTER, [])
        else:
            self._add_round(node, 0)

    def _add_round(self, node: Loop, index: int) -> None:
        if self._host.is_over or self._execution.nodes[node.id].has_ended:
            return
        try:
            grown = self._bodies.add_round(node, index)
        except ConureError as error:
            self._host.fail(node.id, error)
            return
        self._host.foresee(node.id, self._bodies.next_round(node, index + 1))
        self._ground.take_in(node.id, grown)

    def end_round(self, node: Round) -> None:
        """A round is over: carry on what it made, and begin another one or end."""
        place = self._execution.graph.place(node.id)
        assert place is not None
        loop = self._execution.graph.nodes[place.control]
        assert isinstance(loop, Loop)
        values = {
            name: self._value_of(carried, self._execution.values[node.keeps[name]])
            for name, carried in node.carry.items()
        }
        more = node.until is UNSET or not is_true(self._value_of(node.until, False))
        following = int(place.part) + 1
        if more and following >= loop.max_iter:
            raise RunError(
                "loop.exhausted",
                f"loop {loop.id} would go on after {loop.max_iter} rounds, its `max_iter`",
            )
        ready: list[Ready] = []
        for name, value in values.items():
            ready += self._host.write(name, value, node.id)
        ready += self._host.write(node.more, more, node.id)
        if not more:
            self._host.slot_over(node.id, 0, ready)
            self._host.slot_over(loop.id, ENTER, [])
            return
        if following % ROUNDS_AT_ONCE:
            self._add_round(loop, following)
        else:
            asyncio.get_running_loop().call_soon(self._add_round, loop, following)
        self._host.slot_over(node.id, 0, ready)

    def _value_of(self, expression: Expression, otherwise: Json) -> Json:
        """What an expression is at the end of a round; `otherwise` if what it reads was skipped
        or killed: a variable stays as it was, and `until` has another round.
        """
        absence = self._execution.absence_among(variables(expression))
        try:
            return evaluate(expression, self._execution.values)
        except ExpressionError as error:
            if error.code != "variable.absent" or absence is None or absence.phase == "failed":
                raise
            return otherwise

    def give(self, node: Loop) -> None:
        """All rounds are over: what was carried is what the loop gives."""
        last = self._bodies.num_rounds(node)
        ready: list[Ready] = []
        for name in node.carry:
            value = self._execution.values[f"{name}.{last}"]
            ready += self._host.write(name, value, node.id)
        self._host.slot_over(node.id, GIVE, ready)
