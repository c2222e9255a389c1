"""Executes `kill`: ends the nodes that produce named variables or belong to named jobs.

What only serves killed nodes ends with them; see `cascade`.

Invariants: ended nodes never change. A node that survives loses no input it still needs, except a
variable that the kill names explicitly.
"""

from __future__ import annotations

from ...program.ir import KillNode, RoundEndNode
from ...program.status import Problem
from ..node_context import NodeContext, NodeExecutor
from ..node_state import NODE_KILLED
from ..persistence.journaled_events import RecoveredState
from ..program_state import ProgramState
from .cascade import KillCascade, first_unneeded_slot


class KillExecutor(NodeExecutor[KillNode]):
    """The `kill` nodes of one program."""

    kind = KillNode

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._cascade = KillCascade(context)

    def run(self, node: KillNode, slot: int) -> None:
        """End the nodes of the kill set. The end of each node may end more (`node_ended`)."""
        kill_set = KillSet(self.state, node)
        problem = Problem(code=NODE_KILLED, message=f"killed by {node.id}")
        self.context.stop_before_slot |= kill_set.stop_before_slot
        ready = [
            each
            for node_id in kill_set.nodes
            for each in self.context.end_node(node_id, "killed", problem)
        ]
        self.context.complete_slot(node.id, slot, ready)

    def node_ended(self, node_id: str) -> None:
        """End what only served a killed node, and what cannot run without its values."""
        self._cascade.node_ended(node_id)

    def restore(self, recovered: RecoveredState) -> None:
        """Restore which calls end early because of kills before a restart."""
        for node_state in self.state.nodes.values():
            if isinstance(node_state.node, KillNode) and node_state.phase == "done":
                kill_set = KillSet(self.state, node_state.node)
                self.context.stop_before_slot |= kill_set.stop_before_slot

    def resume(self) -> None:
        """Repeat the consequences of kills, in case the server stopped in between."""
        for node_id, node_state in list(self.state.nodes.items()):
            body = self.state.graph.body_of(node_id)
            if node_state.has_ended and (
                body is None or not self.state.nodes[body.control].has_ended
            ):
                self._cascade.node_ended(node_id)
        self.context.advance([])


class KillSet:
    """The nodes that a kill names."""

    def __init__(self, state: ProgramState, node: KillNode) -> None:
        self._state = state
        self._node = node
        self.nodes: dict[str, None] = {}
        """Nodes to end now, in order."""
        self.stop_before_slot: dict[str, int] = {}
        """Calls with earlier outputs that are still needed: they end before this slot."""
        for target in node.targets:
            if target in state.graph.variables:
                self._add_variable(target)
            else:
                self._add_job(target)

    def _add_job(self, job: str) -> None:
        spared = {self._node.id, *self._ancestors(self._node.id)}
        for node_id, node_state in self._state.nodes.items():
            # The end of a round completes a loop that is spared. It ends with any other loop.
            is_spared = node_id in spared or isinstance(node_state.node, RoundEndNode)
            if not is_spared and not node_state.has_ended and self._is_in_job(node_id, job):
                self.nodes[node_id] = None

    def _is_in_job(self, node_id: str, job: str) -> bool:
        """Whether a node, or a node around it, belongs to a job."""
        nodes = self._state.graph.nodes
        return any(
            self._state.is_within(nodes[each].job, job)
            for each in (node_id, *self._ancestors(node_id))
        )

    def _ancestors(self, node_id: str) -> list[str]:
        ancestors = []
        body = self._state.graph.body_of(node_id)
        while body is not None:
            ancestors.append(body.control)
            body = self._state.graph.body_of(body.control)
        return ancestors

    def _add_variable(self, variable: str) -> None:
        producer = self._state.graph.get_producer(variable)
        if producer is None or self._state.is_resolved(variable):
            return
        node_id, index = producer.node, producer.index
        if first_unneeded_slot(self._state, node_id, before=index) > 0:
            stop = min(self.stop_before_slot.get(node_id, index), index)
            self.stop_before_slot[node_id] = stop
        else:
            self.nodes[node_id] = None
