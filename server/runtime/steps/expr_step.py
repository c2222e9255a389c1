"""Executes `expr`: evaluates an expression and publishes its value."""

from __future__ import annotations

from ...program.ir import ExprNode
from ..node_context import NodeExecutor


class ExprExecutor(NodeExecutor[ExprNode]):
    """The `expr` nodes of one program."""

    kind = ExprNode

    def run(self, node: ExprNode, slot: int) -> None:
        """Evaluate the expression."""
        value = self.context.work.evaluate(node.expr)
        ready = self.context.publish(node.output, value, node.id)
        self.context.complete_slot(node.id, slot, ready)
