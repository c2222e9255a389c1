"""The consequences of a kill: what else ends, because it serves or needs only what was killed.

Two rules, applied to every node that ends because of a kill:

    needed by it   A node is killed once every reader of its values has ended. Exceptions: outputs
                   of the program, and nodes around a `yield`, `kill`, `client` or `call`.
    needs it       A node that cannot run without a killed value is skipped, at once instead of
                   when its last input arrives. A `wait` that is `required` ends in the same way,
                   and then the nodes `after` it.

The nodes end one after the other before any other work of the program (`NodeContext.to_end`),
and the end of each applies the rules again.
"""

from __future__ import annotations

from ...program.graph.graph import Slot
from ...program.ir import (
    CallNode,
    ClientNode,
    ExprNode,
    KillNode,
    WaitNode,
    YieldNode,
)
from ...program.nodes.bodies import walk
from ...program.nodes.control.base import OUTPUT, NodeWithBodies
from ...program.status import Problem
from ..node_context import NodeContext
from ..node_state import NODE_KILLED, WAIT_UNMET, MissingValue
from ..program_state import ProgramState

_CAUSES = frozenset({NODE_KILLED, WAIT_UNMET})
_EFFECTS = (YieldNode, KillNode, ClientNode, CallNode)
"""Nodes that may do more than give a value to the node around them."""


class KillCascade:
    """Applies the rules to the nodes of one program."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._state = context.state
        self._graph = context.state.graph

    def node_ended(self, node_id: str) -> None:
        """Apply the rules to a node that has ended."""
        node_state = self._state.nodes[node_id]
        is_done = node_state.phase == "done"
        if self._context.is_over or (is_done and not isinstance(node_state.node, NodeWithBodies)):
            return
        self._end_readers(node_id)
        self._end_followers(node_id)
        problem = node_state.problem
        if not is_done and problem is not None and problem.code in _CAUSES:
            self._end_sources(node_id)

    # --- what needs the node --------------------------------------------------------------

    def _end_readers(self, node_id: str) -> None:
        """Skip the nodes that cannot run without the killed values of a node."""
        for slot in self._graph.slots[node_id]:
            for name in slot.writes:
                missing = self._state.missing_values.get(name)
                if missing is not None and missing.problem.code in _CAUSES:
                    for reader in self._graph.get_consumers(name):
                        self._end_reader(reader, missing)

    def _end_reader(self, reader: Slot, missing: MissingValue) -> None:
        node_state = self._state.nodes[reader.node]
        if node_state.has_ended or node_state.slots_done > reader.index:
            return
        node = node_state.node
        problem = missing.problem
        if isinstance(node, WaitNode):
            if node.mode != "all":
                return  # another of its values may be enough
            problem = unmet(node, missing)
        elif reader.tolerates_missing:
            return
        if first_unneeded_slot(self._state, reader.node, before=reader.index) == 0:
            self._context.to_end.append((reader.node, "skipped", problem))

    def _end_followers(self, node_id: str) -> None:
        """Skip the nodes after a required `wait` that ended without its values."""
        if self._state.nodes[node_id].cut is None:
            return
        for follower in self._graph.nodes_after(node_id):
            problem = self._state.cut_before(follower)
            if problem is not None:
                self._context.to_end.append((follower, "skipped", problem))

    # --- what the node needs --------------------------------------------------------------

    def _end_sources(self, node_id: str) -> None:
        """Kill the nodes all of whose readers have ended."""
        reads = {
            name for slot in self._graph.slots[node_id] for name in (*slot.reads, *slot.may_read)
        }
        for name in sorted(reads):
            producer = self._graph.get_producer(name)
            if producer is None or self._state.is_resolved(name):
                continue
            source = producer.node
            if self._state.nodes[source].has_ended or not self._may_end(source):
                continue
            # The slots from here on are never run: an earlier kill named one of their variables.
            end = self._context.stop_before_slot.get(source, len(self._graph.slots[source]))
            stop = first_unneeded_slot(self._state, source, before=end)
            if stop == 0:
                message = (
                    f"killed: every node that reads its value has ended, {node_id} as the last one"
                )
                self._context.to_end.append(
                    (source, "killed", Problem(code=NODE_KILLED, message=message))
                )
            elif stop < end:
                self._context.stop_before_slot[source] = stop

    def _may_end(self, node_id: str) -> bool:
        """Whether a node has no purpose but its values."""
        node = self._graph.nodes[node_id]
        if self._state.is_open and not isinstance(node, ExprNode):
            return False  # a later append may read it
        if not isinstance(node, NodeWithBodies):
            return True
        inner = (self._graph.nodes[each] for each in self._graph.descendants(node_id))
        if any(isinstance(each, _EFFECTS) for each in inner):
            return False
        templates = (each for body in node.bodies() for _, each in walk(body.nodes, ""))
        return not any(isinstance(each, _EFFECTS) for each in templates)


def first_unneeded_slot(state: ProgramState, node_id: str, *, before: int) -> int:
    """Return the slot of a node after its last slot that writes a needed value; 0: there is none.

    Args:
        state: state of the program.
        node_id: the node.
        before: only slots before this one count.
    """
    slots = state.graph.slots[node_id][:before]
    needed = (
        slot.index
        for slot in slots
        if any(
            not state.is_resolved(name) and _is_needed(state, name, node_id) for name in slot.writes
        )
    )
    return max(needed, default=-1) + 1


def _is_needed(state: ProgramState, variable: str, producer: str) -> bool:
    """Whether a variable is an output, or another node reads it, or may read it later."""
    graph = state.graph
    if variable in graph.outputs or variable in state.demanded:
        return True
    if _is_result_of_body(state, variable, producer):
        return True
    readers = (*graph.get_consumers(variable), *graph.get_potential_readers(variable))
    return any(
        reader.node != producer
        and not state.nodes[reader.node].has_ended
        and state.nodes[reader.node].slots_done <= reader.index
        for reader in readers
    )


def _is_result_of_body(state: ProgramState, variable: str, producer: str) -> bool:
    """Whether the node around a node reads a variable when its bodies have ended.

    The graph has no such edges: the variables of an item belong to it, and are read by name.
    """
    body = state.graph.body_of(producer)
    if body is None or state.nodes[body.control].has_ended:
        return False
    control = state.graph.nodes[body.control]
    assert isinstance(control, NodeWithBodies)
    if control.exit_slot != OUTPUT:
        return False
    base = variable.partition(".")[0]
    return any(
        name.partition(".")[0] == base
        for reference in control.body_references()
        for name in reference.names
    )


def unmet(node: WaitNode, missing: MissingValue) -> Problem:
    """Return the problem with which a `wait` ends that lacks a value."""
    if not node.required or missing.phase == "failed":
        return missing.problem
    return Problem(
        code=WAIT_UNMET, message=f"{node.id} ended without its values: {missing.problem.message}"
    )
