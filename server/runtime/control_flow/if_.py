"""Executes `if`: publishes which branch is taken, and enters it."""

from __future__ import annotations

from collections.abc import Mapping

from ...program.expressions.evaluate import input_expression
from ...program.expressions.values import is_true
from ...program.graph.instances import read_by
from ...program.ir import Expression, IfNode
from ...program.nodes.bodies import BodyRef
from ...program.nodes.control.base import ENTER, OUTPUT
from ...program.status import Problem
from ..node_context import NodeExecutor
from ..node_state import MissingValue, Ready
from ..persistence.journaled_events import ExpansionHistory
from ..program_state import ProgramState
from .bodies import absent_if_resolved, end_body, publish_outputs


class IfExecutor(NodeExecutor[IfNode]):
    """The `if` nodes of one program."""

    kind = IfNode

    def run(self, node: IfNode, slot: int) -> None:
        """In slot ENTER, take a branch; in OUTPUT, publish its outputs; in EXIT, end the node."""
        if slot == ENTER:
            self._take_branch(node)
        elif slot == OUTPUT:
            publish_outputs(self.context, node, _outputs(self.state, node))
        else:
            self.context.complete_slot(node.id, slot, [])

    def _take_branch(self, node: IfNode) -> None:
        is_true_branch = is_true(self.context.work.evaluate(input_expression(node.cond)))
        taken, other = ("then", "else") if is_true_branch else ("else", "then")
        ready = self.context.publish(f"{node.id}.taken", taken, node.id)
        ready += _enter_taken_branch(self.state, node)
        problem = Problem(code="if.not_taken", message=f"{node.id} took the other branch")
        ready += end_body(self.context, BodyRef(node.id, other), "skipped", problem)
        self.context.complete_slot(node.id, ENTER, ready)

    @classmethod
    def replay(cls, state: ProgramState, node: IfNode, history: ExpansionHistory) -> None:
        """Enter the branch that was taken."""
        if node.decision_variable in state.values:
            _enter_taken_branch(state, node)

    @classmethod
    def absent_outputs(cls, state: ProgramState, node: IfNode) -> Mapping[str, MissingValue]:
        """Return the outputs that have no value in the branch that was taken."""
        if node.decision_variable not in state.values:
            return {}
        return absent_if_resolved(state, _outputs(state, node))


def _enter_taken_branch(state: ProgramState, node: IfNode) -> list[Ready]:
    names = {name for each in _outputs(state, node).values() for name in read_by(each)}
    state.readiness.add_reads(node.id, OUTPUT, names)
    return state.enter_body(BodyRef(node.id, state.values[f"{node.id}.taken"]))


def _outputs(state: ProgramState, node: IfNode) -> dict[str, Expression]:
    """Return the references that the taken branch gives for each output."""
    side = int(state.values[f"{node.id}.taken"] == "else")
    return {name: sides[side] for name, sides in node.merge.items()}
