"""Executes `procedure`: publishes the parameters, enters the body, and publishes the results."""

from __future__ import annotations

from collections.abc import Mapping

from ...program.graph.instances import read_by
from ...program.ir import ProcedureNode
from ...program.nodes.bodies import BodyRef
from ...program.nodes.control.base import ENTER, OUTPUT
from ..node_context import NodeExecutor
from ..node_state import MissingValue, Ready
from ..persistence.journaled_events import ExpansionHistory
from ..program_state import ProgramState
from .bodies import absent_if_resolved, publish_outputs


class ProcedureExecutor(NodeExecutor[ProcedureNode]):
    """The `procedure` nodes of one program."""

    kind = ProcedureNode

    def run(self, node: ProcedureNode, slot: int) -> None:
        """Enter the body, publish the results, or end."""
        if slot == ENTER:
            self._enter(node)
        elif slot == OUTPUT:
            publish_outputs(self.context, node, node.returns)
        else:
            self.context.complete_slot(node.id, slot, [])

    def _enter(self, node: ProcedureNode) -> None:
        values = {each.variable: self.context.work.evaluate(each.value) for each in node.bound}
        ready: list[Ready] = []
        for variable, value in values.items():
            if not self.state.is_resolved(variable):  # it is after a restart
                ready += self.context.publish(variable, value, node.id)
        ready += self.context.publish(node.decision_variable, True, node.id)
        ready += _enter_body(self.state, node)
        self.context.complete_slot(node.id, ENTER, ready)

    @classmethod
    def replay(cls, state: ProgramState, node: ProcedureNode, history: ExpansionHistory) -> None:
        """Enter the body if it had been entered."""
        if node.decision_variable in state.values:
            _enter_body(state, node)

    @classmethod
    def absent_outputs(cls, state: ProgramState, node: ProcedureNode) -> Mapping[str, MissingValue]:
        """Return the results that have no value."""
        if node.decision_variable not in state.values:
            return {}
        return absent_if_resolved(state, node.returns)


def _enter_body(state: ProgramState, node: ProcedureNode) -> list[Ready]:
    names = {name for each in node.returns.values() for name in read_by(each)}
    state.readiness.add_reads(node.id, OUTPUT, names)
    return state.enter_body(BodyRef(node.id, "body"))
