"""Executes `loop` and the `round` nodes that end each round.

The end of a round publishes the round's results, and whether another round follows.

Invariant: a round starts after all nodes of the previous round have ended.
"""

from __future__ import annotations

from msgspec import UNSET

from ...program.errors import ConureError, ExpressionError, RunError
from ...program.expressions.evaluate import variables
from ...program.expressions.values import is_true
from ...program.graph.instances import BodyInstance, end_of_round
from ...program.ir import Expression, Json, KillNode, LoopNode, RoundEndNode, WaitNode
from ...program.nodes.bodies import walk
from ...program.nodes.control.base import ENTER, OUTPUT
from ...program.nodes.control.loop import MAX_ROUNDS
from ..node_context import NodeContext, NodeExecutor
from ..node_state import Expansion, Ready
from ..persistence.journaled_events import ExpansionHistory
from ..program_state import ProgramState
from .bodies import (
    bound_names,
    evaluate_items,
    length_of,
    num_instances,
    publish_decision,
    start_instances,
    template_of,
)


class LoopExecutor(NodeExecutor[LoopNode]):
    """The `loop` nodes of one program."""

    kind = LoopNode

    def run(self, node: LoopNode, slot: int) -> None:
        """Start the first round, publish the results of the last one, or end."""
        if slot == ENTER:
            self._enter(node)
        elif slot == OUTPUT:
            self._publish_results(node)
        else:
            self.context.complete_slot(node.id, slot, [])

    def _enter(self, node: LoopNode) -> None:
        work = self.context.work
        rounds = self._evaluate_rounds(node)
        num_rounds = length_of(rounds)
        is_excessive = num_rounds is not None and num_rounds > node.max_iter
        if is_excessive and not self._may_end_early(node):
            raise RunError("loop.exhausted", _exhausted(node, num_rounds))
        initial = {name: work.evaluate(init) for name, (init, _) in node.carry.items()}
        ready = publish_decision(self.context, node, rounds)
        for name, value in initial.items():
            ready += self.context.publish(f"{name}.0", value, node.id)
        self.context.advance(ready)
        if num_instances(self.state, node) == 0:
            self.context.complete_slot(node.id, ENTER, [])
        else:
            start_round(self.context, node, 0)

    def _evaluate_rounds(self, node: LoopNode) -> list[Json] | int | None:
        """Return the items, or the number of rounds; None if only `until` ends the loop."""
        if node.items is not UNSET:
            return evaluate_items(self.context, node.items, node.id)
        if node.count is UNSET:
            return None
        count = self.context.work.evaluate(node.count)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            message = f"`count` of {node.id} must be an integer of at least 0, got {count!r}"
            raise RunError("loop.count", message)
        return count

    def _may_end_early(self, loop: LoopNode) -> bool:
        """Return whether a loop may end before its last round.

        `until` ends a loop. Kills and unmet waits anywhere in the program also do; an open program
        may still receive such nodes.
        """
        if loop.until is not UNSET or self.state.is_open:
            return True
        nodes = (node for _, node in walk(self.state.graph.nodes.values(), ""))
        return any(
            isinstance(node, KillNode) or (isinstance(node, WaitNode) and node.required)
            for node in nodes
        )

    def _publish_results(self, node: LoopNode) -> None:
        last = len(self.state.graph.body_nodes(node.id))
        ready: list[Ready] = []
        for name in node.carry:
            ready += self.context.publish(name, self.state.values[f"{name}.{last}"], node.id)
        self.context.complete_slot(node.id, OUTPUT, ready)

    @classmethod
    def replay(cls, state: ProgramState, node: LoopNode, history: ExpansionHistory) -> None:
        """Add the first round. The replay of each `round` node adds the next one."""
        if _num_added(state, node, history) > 0:
            _add_round(state, node, 0)
            state.mark_started(node.id, ENTER)

    @classmethod
    def is_slot_complete(cls, state: ProgramState, node: LoopNode, slot: int) -> bool:
        """Whether a slot is done: ENTER once the last round has ended, other slots always."""
        if slot != ENTER:
            return True
        last = len(state.graph.body_nodes(node.id)) - 1
        return last < 0 or state.values.get(f"{node.id}.{last}.more") is False


class RoundExecutor(NodeExecutor[RoundEndNode]):
    """The `round` nodes of one program. Each ends a round, and starts the next one."""

    kind = RoundEndNode

    def run(self, node: RoundEndNode, slot: int) -> None:
        """End a round.

        Raises:
            RunError: `loop.exhausted`, or the failure of what the round reads.
        """
        try:
            self._end_round(node)
        except ExpressionError as error:
            missing = self.state.missing_input(self.state.graph.slots[node.id][slot])
            is_failed = missing is not None and missing.phase == "failed"
            if missing is None or not is_failed or error.code != "variable.absent":
                raise
            raise RunError(missing.problem.code, missing.problem.message) from error

    def _end_round(self, node: RoundEndNode) -> None:
        loop, index = _loop_of(self.state, node)
        values = {
            name: self._evaluate(carried, self.state.values[node.keeps[name]])
            for name, carried in node.carry.items()
        }
        more = self.state.nodes[loop.id].cut is None and (
            node.until is UNSET or not is_true(self._evaluate(node.until, False))
        )
        if more and index + 1 >= loop.max_iter:
            raise RunError("loop.exhausted", _exhausted(loop, num_instances(self.state, loop)))
        ready: list[Ready] = []
        for name, value in values.items():
            ready += self.context.publish(name, value, node.id)
        ready += self.context.publish(node.more, more, node.id)
        if not more:
            self.context.complete_slot(node.id, 0, ready)
            self.context.complete_slot(loop.id, ENTER, [])
            return
        # The next round exists before this one completes, or the loop would seem to have ended.
        start_round(self.context, loop, index + 1)
        self.context.complete_slot(node.id, 0, ready)

    def _evaluate(self, expression: Expression, default: Json) -> Json:
        """Evaluate an expression; return `default` if an input was skipped or killed."""
        missing = self.state.first_missing(variables(expression))
        try:
            return self.context.work.evaluate(expression)
        except ExpressionError as error:
            if error.code != "variable.absent" or missing is None or missing.phase == "failed":
                raise
            return default

    @classmethod
    def replay(cls, state: ProgramState, node: RoundEndNode, history: ExpansionHistory) -> None:
        """Add the next round if there was one."""
        loop, index = _loop_of(state, node)
        if _num_added(state, loop, history) > index + 1:
            _add_round(state, loop, index + 1)


def start_round(context: NodeContext, node: LoopNode, index: int) -> None:
    """Add a round to the graph, and announce the one after it."""
    state = context.state
    if context.is_over or state.nodes[node.id].has_ended:
        return
    try:
        expansion = _add_round(state, node, index)
    except ConureError as error:
        context.fail(node.id, error)
        return
    is_last = _is_last(state, node, index) or index + 1 >= node.max_iter
    context.announce(node.id, [] if is_last else _instances(state, node, index + 1))
    start_instances(context, node.id, expansion)


def _exhausted(loop: LoopNode, num_rounds: int | None) -> str:
    if num_rounds is None:
        return f"loop {loop.id} did not end within {loop.max_iter:,} rounds, its `max_iter`"
    message = f"loop {loop.id} has {num_rounds:,} rounds, and its `max_iter` is {loop.max_iter:,}"
    if loop.items is UNSET or num_rounds > MAX_ROUNDS:
        return message
    advice = f"raise `max_iter`, or in a program text write a slice such as `items[:{num_rounds}]`"
    return f"{message}; {advice}"


def _loop_of(state: ProgramState, node: RoundEndNode) -> tuple[LoopNode, int]:
    """Return the loop of a round, and the round's index."""
    body = state.graph.body_of(node.id)
    assert body is not None
    loop = state.graph.nodes[body.control]
    assert isinstance(loop, LoopNode)
    return loop, int(body.part)


def _add_round(state: ProgramState, node: LoopNode, index: int) -> Expansion:
    template = template_of(state, node)
    renaming = template.renaming_of(f".{index}", _names(node, index))
    end = end_of_round(
        node,
        index,
        renaming,
        [renaming.node_id(node_id) for node_id in template.node_ids],
        is_last=_is_last(state, node, index),
    )
    return state.grow([*_instances(state, node, index), end])


def _num_added(state: ProgramState, node: LoopNode, history: ExpansionHistory) -> int:
    """Return the number of rounds that were added.

    This can be less than the decided number: a round is not added if the graph would be too large.
    """
    return history.num_added[node.id] // (template_of(state, node).num_nodes + 1)


def _instances(state: ProgramState, node: LoopNode, index: int) -> list[BodyInstance]:
    template = template_of(state, node)
    return template.instantiate(str(index), f".{index}", _names(node, index))


def _names(node: LoopNode, index: int) -> dict[str, Expression]:
    """Return what item, index and carried variables mean in a round."""
    return bound_names(node, index) | {name: {"var": f"{name}.{index}"} for name in node.carry}


def _is_last(state: ProgramState, node: LoopNode, index: int) -> bool:
    num_rounds = num_instances(state, node)
    return num_rounds is not None and index + 1 >= num_rounds
