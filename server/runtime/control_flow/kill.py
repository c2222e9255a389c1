"""Executes `kill`: ends the nodes that produce named variables or belong to named jobs.

What only serves killed nodes ends with them; see `cascade`.

Invariants: ended nodes never change. A node that survives loses no input it still needs, except a
variable that the kill names explicitly.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...program.graph.graph import Slot, bodies_around
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
        """End the nodes that the kill names. The end of each node may end more (`node_ended`).

        If an earlier output of a call is needed, the call ends before the output that is named.
        """
        nodes: dict[str, None] = {}
        for target in node.targets:
            if target in self.state.graph.jobs:
                nodes |= dict.fromkeys(_nodes_in_job(self.state, node, target))
            elif (producer := _pending_producer(self.state, target)) is not None:
                if first_unneeded_slot(self.state, producer.node, before=producer.index) == 0:
                    nodes[producer.node] = None
                else:
                    self._stop_before(producer)
        problem = Problem(code=NODE_KILLED, message=f"killed by {node.id}")
        ready = [
            each for node_id in nodes for each in self.context.end_node(node_id, "killed", problem)
        ]
        self.context.complete_slot(node.id, slot, ready)

    def _stop_before(self, slot: Slot) -> None:
        """Let a call end before a slot, or before an earlier one if a kill has named that."""
        limits = self.context.stop_before_slot
        limits[slot.node] = min(slot.index, limits.get(slot.node, slot.index))

    def node_ended(self, node_id: str) -> None:
        """End what only served a killed node, and what cannot run without its values."""
        self._cascade.node_ended(node_id)

    def restore(self, recovered: RecoveredState) -> None:
        """Restore which calls end early because of kills before a restart.

        A producer that the kill has not ended goes on for earlier outputs, unless it was appended
        after the kill.
        """
        for node_state in self.state.nodes.values():
            if isinstance(node_state.node, KillNode) and node_state.phase == "done":
                for target in node_state.node.targets:
                    producer = _pending_producer(self.state, target)
                    if producer is not None and producer.index > 0:
                        self._stop_before(producer)

    def resume(self) -> None:
        """Repeat the consequences of ended nodes that the journal does not have.

        The cascade ignores nodes that ended neither by a kill nor by a `wait`. An ended node counts
        for the nodes in its bodies: it reads what they read.
        """
        for node_id, node_state in list(self.state.nodes.items()):
            body = self.state.graph.body_of(node_id)
            if node_state.has_ended and (
                body is None or not self.state.nodes[body.control].has_ended
            ):
                self._cascade.node_ended(node_id)
        self.context.advance([])


def _pending_producer(state: ProgramState, target: str) -> Slot | None:
    """Return the slot that writes a variable; None for a job, or if the variable is resolved."""
    if target in state.graph.jobs or state.is_resolved(target):
        return None
    return state.graph.get_producer(target)


def _nodes_in_job(state: ProgramState, kill: KillNode, job: str) -> list[str]:
    """Return the nodes of a job that a kill ends. The nodes around the kill go on."""
    spared = {kill.id, *_nodes_around(state, kill.id)}
    return [
        node_id
        for node_id, node_state in state.nodes.items()
        # A loop that is not killed needs its `RoundEndNode`. The end of a killed loop ends it.
        if not (
            node_id in spared or isinstance(node_state.node, RoundEndNode) or node_state.has_ended
        )
        and _is_in_job(state, node_id, job)
    ]


def _is_in_job(state: ProgramState, node_id: str, job: str) -> bool:
    """Whether a node, or a node around it, belongs to a job."""
    return any(
        state.is_within(state.graph.nodes[each].job, job)
        for each in (node_id, *_nodes_around(state, node_id))
    )


def _nodes_around(state: ProgramState, node_id: str) -> Iterator[str]:
    """Iterate over the nodes in whose bodies a node is, the innermost first."""
    return (body.control for body in bodies_around(state.graph, node_id))
