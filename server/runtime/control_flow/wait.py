"""Executes `wait`: completes when enough of its variables have values."""

from __future__ import annotations

from ...program.ir import WaitNode
from ..node_context import NodeExecutor
from .cascade import unmet


class WaitExecutor(NodeExecutor[WaitNode]):
    """The `wait` nodes of one program."""

    kind = WaitNode

    def run(self, node: WaitNode, slot: int) -> None:
        """Complete the wait, or skip it if too many variables are missing."""
        names = set(node.variables)
        quorum = {"all": len(names), "any": 1}.get(str(node.mode)) or int(node.mode)
        if slot == 0 or sum(name in self.state.values for name in names) >= quorum:
            self.context.complete_slot(node.id, slot, [])
            return
        missing = self.state.missing_input(self.state.graph.slots[node.id][1])
        assert missing is not None
        self.context.advance(self.context.end_node(node.id, missing.phase, unmet(node, missing)))
