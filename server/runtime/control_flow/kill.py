"""Executes `kill`: ends the nodes that produce named variables or belong to named jobs.

A variable is killed with the node that writes it. If that node is an `expr`, its inputs are killed
as well, unless another node still needs them.

Invariants: ended nodes never change. A node that survives loses no input it still needs, except a
variable that the kill names explicitly.
"""

from __future__ import annotations

from ...program.ir import ExprNode, KillNode
from ...program.status import Problem
from ..node_context import NodeExecutor
from ..persistence.journaled_events import RecoveredState
from ..program_state import ProgramState


class KillExecutor(NodeExecutor[KillNode]):
    """The `kill` nodes of one program."""

    kind = KillNode

    def run(self, node: KillNode, slot: int) -> None:
        """End the nodes of the kill set."""
        kill_set = KillSet(self.state, node)
        problem = Problem(code="node.killed", message=f"killed by {node.id}")
        self.context.stop_before_slot |= kill_set.stop_before_slot
        ready = [
            each
            for node_id in kill_set.nodes
            for each in self.context.end_node(node_id, "killed", problem)
        ]
        self.context.complete_slot(node.id, slot, ready)

    def restore(self, recovered: RecoveredState) -> None:
        """Restore which calls end early because of kills before a restart."""
        for node_state in self.state.nodes.values():
            if isinstance(node_state.node, KillNode) and node_state.phase == "done":
                kill_set = KillSet(self.state, node_state.node)
                self.context.stop_before_slot |= kill_set.stop_before_slot


class KillSet:
    """The nodes that a kill ends."""

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
        ancestors = set(self._ancestors(self._node.id))
        for node_id, node_state in self._state.nodes.items():
            is_self = node_id == self._node.id or node_id in ancestors
            if not is_self and not node_state.has_ended and self._is_in_job(node_id, job):
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
        stack = [variable]
        while stack:
            name = stack.pop()
            producer = self._state.graph.get_producer(name)
            if producer is None or self._state.is_resolved(name):
                continue
            node_id = producer.node
            if node_id in self.nodes or self._state.nodes[node_id].has_ended:
                continue
            if self._is_needed_before(node_id, producer.index):
                self.stop_before_slot[node_id] = min(
                    self.stop_before_slot.get(node_id, producer.index), producer.index
                )
                continue
            self.nodes[node_id] = None
            node = self._state.graph.nodes[node_id]
            if isinstance(node, ExprNode):
                reads = self._state.graph.slots[node_id][0].reads
                stack += [read for read in sorted(reads) if not self._is_needed(read)]

    def _is_needed_before(self, node_id: str, slot: int) -> bool:
        """Whether an output of the node before this slot is still needed."""
        earlier = self._state.graph.slots[node_id][:slot]
        return any(
            not self._state.is_resolved(name) and self._is_needed(name)
            for each in earlier
            for name in each.writes
        )

    def _is_needed(self, variable: str) -> bool:
        """Whether a node that is not killed reads a variable, or may read it later."""
        graph = self._state.graph
        if variable in graph.outputs:
            return True
        readers = (*graph.get_consumers(variable), *graph.get_potential_readers(variable))
        states = self._state.nodes
        return any(
            reader.node not in self.nodes
            and not states[reader.node].has_ended
            and states[reader.node].slots_done <= reader.index
            for reader in readers
        )
