"""Readiness of a program's slots: what each slot still waits for, and when it is reported.

A slot is ready when all variables it reads are resolved, the slot before it is done, all nodes in
`after` have ended, and the body it is in has been entered.

Out of scope: what resolves a variable or ends a node; `ProgramState` calls the matching method.

Invariants: a slot is reported (returned as `Ready`) at most once, unless it was blocked in between,
and only after `start`. The nodes of a body wait until the body is entered. From then on, the exit
slot of the node around the body waits for their end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..program.graph.graph import Graph, Slot
from ..program.ir import GraphNode, Json, WaitNode
from ..program.nodes.bodies import BodyRef
from ..program.nodes.control.base import NodeWithBodies
from .node_state import MissingValue, NodeState, Ready

SlotKey = tuple[str, int]


class SlotReadiness:
    """Counts what each slot of a program waits for."""

    def __init__(
        self,
        graph: Graph,
        nodes: Mapping[str, NodeState],
        values: Mapping[str, Json],
        missing_values: Mapping[str, MissingValue],
        *,
        on_demand: bool,
    ) -> None:
        self._graph = graph
        self._nodes = nodes
        self._values = values
        self._missing_values = missing_values
        self.demanded_nodes: set[str] | None = set() if on_demand else None
        """Nodes that may run under `start: demand`; None: all."""
        self._num_pending: dict[SlotKey, int] = {}
        """How many things each slot waits for: variables, nodes, its body, the slot before it, and
        blocks."""
        self._entered: set[BodyRef] = set()
        self._quorums: dict[SlotKey, int | None] = {}
        """How many values the second slot of a `wait` node needs, for modes other than `all`.

        The quorum counts as one thing that the slot waits for. It is decided, and becomes None,
        when enough variables have values or too many are missing.
        """
        self._num_live_in: Counter[str] = Counter()
        """Nodes in entered bodies that have not ended, by the node around them."""
        self._reported: set[SlotKey] = set()
        self._is_started = False

    # --- adding nodes ---------------------------------------------------------------------

    def start(self) -> list[Ready]:
        """Start reporting: return the slots that are ready now, except those restored as done."""
        self._is_started = True
        return self.report(self._nodes)

    def add_nodes(self, nodes: Sequence[str]) -> None:
        """Count what the slots of new nodes wait for. The nodes must have a `NodeState`."""
        for node_id in nodes:
            node = self._graph.nodes[node_id]
            body = self._graph.body_of(node_id)
            for slot in self._graph.slots[node_id]:
                count = self._count_reads(node, slot)
                if slot.index == 0:
                    count += sum(not self._nodes[other].has_ended for other in set(node.after))
                    count += body is not None and body not in self._entered
                else:
                    count += 1  # the slot before it
                self._num_pending[node_id, slot.index] = count
        for node_id in nodes:
            if self._graph.body_of(node_id) in self._entered:
                self._wait_for_end(node_id)

    def _count_reads(self, node: GraphNode, slot: Slot) -> int:
        """Count the variables that a slot still waits for; for a quorum, 1 until it is decided."""
        if isinstance(node, WaitNode) and slot.index == 1 and node.mode != "all":
            self._quorums[node.id, 1] = 1 if node.mode == "any" else node.mode
            return int(not self._decide_quorum(node.id, 1))
        return sum(not self.is_resolved(name) for name in slot.reads)

    def enter_body(self, body: BodyRef) -> list[Ready]:
        """Let the nodes of a body start, and make the node around them wait for their end."""
        self._entered.add(body)
        nodes = self._graph.body_nodes(body.control).get(body.part, ())
        for node_id in nodes:
            self._wait_for_end(node_id)
        return self._count_down((node_id, 0) for node_id in nodes)

    def enter_new_body(self, body: BodyRef) -> None:
        """Enter a body whose nodes are added next, such as a map's instances.

        `add_nodes` then does what `enter_body` does for nodes that exist.
        """
        self._entered.add(body)

    def _wait_for_end(self, node_id: str) -> None:
        """Make the exit slot of the node around a body wait for a node of the body."""
        body = self._graph.body_of(node_id)
        assert body is not None
        if not self._nodes[node_id].has_ended:
            self._num_pending[body.control, _exit_slot(self._graph.nodes[body.control])] += 1
            self._num_live_in[body.control] += 1

    def add_reads(self, node_id: str, slot: int, names: Iterable[str]) -> None:
        """Make a slot that is not ready read more variables."""
        known = self._graph.slots[node_id][slot].reads
        new = {name for name in names if name not in known}
        self._graph.add_reads(node_id, slot, new)
        self._num_pending[node_id, slot] += sum(not self.is_resolved(name) for name in new)

    # --- resolving ------------------------------------------------------------------------

    def is_resolved(self, variable: str) -> bool:
        """Whether a variable has a value or is missing."""
        return variable in self._values or variable in self._missing_values

    def variable_resolved(self, variable: str) -> list[Ready]:
        """Count a variable as resolved for its consumers."""
        keys = [(slot.node, slot.index) for slot in self._graph.get_consumers(variable)]
        if self._quorums:
            keys = [key for key in keys if key not in self._quorums or self._is_decided_now(key)]
        return self._count_down(keys)

    def node_ended(self, node_id: str) -> list[Ready]:
        """Count a node as ended for its successors and the node around it."""
        keys = [(other, 0) for other in self._graph.nodes_after(node_id)]
        body = self._graph.body_of(node_id)
        if body is not None and body in self._entered:
            self._num_live_in[body.control] -= 1
            keys.append((body.control, _exit_slot(self._graph.nodes[body.control])))
        return self._count_down(keys)

    def _decide_quorum(self, node_id: str, slot: int) -> bool:
        """Decide a quorum if enough variables have values, or if too many are missing.

        Returns:
            Whether the quorum is decided.
        """
        quorum = self._quorums[node_id, slot]
        assert quorum is not None
        reads = self._graph.slots[node_id][slot].reads
        num_values = sum(name in self._values for name in reads)
        num_missing = sum(name in self._missing_values for name in reads)
        is_open = num_values < quorum <= len(reads) - num_missing
        if not is_open:
            self._quorums[node_id, slot] = None
        return not is_open

    def _is_decided_now(self, key: SlotKey) -> bool:
        """Whether the quorum was open and the last resolved variable has decided it."""
        return self._quorums[key] is not None and self._decide_quorum(*key)

    def _count_down(self, keys: Iterable[SlotKey]) -> list[Ready]:
        ready = []
        for key in keys:
            if key not in self._num_pending:
                continue  # a node that is being appended; `add_nodes` counts it later
            self._num_pending[key] -= 1
            if self._num_pending[key] == 0 and self._report(key):
                ready.append(Ready(*key))
        return ready

    # --- reporting ------------------------------------------------------------------------

    def report(self, nodes: Iterable[str]) -> list[Ready]:
        """Return the slots of these nodes that are ready and not reported yet."""
        slots = self._graph.slots
        keys = ((node_id, slot.index) for node_id in nodes for slot in slots[node_id])
        return [Ready(*key) for key in keys if not self._num_pending[key] and self._report(key)]

    def _report(self, key: SlotKey) -> bool:
        """Record a ready slot as reported; return False if it must not be reported."""
        node_id, slot = key
        node_state = self._nodes[node_id]
        if not self._is_started or key in self._reported or node_state.has_ended:
            return False
        if slot < node_state.slots_done:  # done before a restart
            return False
        if self.demanded_nodes is not None and node_id not in self.demanded_nodes:
            return False
        self._reported.add(key)
        return True

    def mark_started(self, node_id: str, slot: int) -> None:
        """Mark a slot as reported: it started before a restart and continues from its decisions."""
        self._reported.add((node_id, slot))

    def block(self, node_id: str, slot: int) -> None:
        """Block a slot until `unblock`, even if it was already reported."""
        self._num_pending[node_id, slot] += 1
        self._reported.discard((node_id, slot))

    def unblock(self, node_id: str, slot: int) -> list[Ready]:
        """Remove one block, or the wait for the slot before. Return the slot if it is ready."""
        return self._count_down([(node_id, slot)])

    # --- queries --------------------------------------------------------------------------

    def is_due(self, node_id: str, slot: int) -> bool:
        """Whether a reported slot may still run: its node has not ended and it is not blocked."""
        node_state = self._nodes[node_id]
        is_next = slot == node_state.slots_done and not self._num_pending[node_id, slot]
        return is_next and not node_state.has_ended

    def waits_only_for(self, node_id: str, slot: int, names: Iterable[str]) -> bool:
        """Whether a slot would be ready if these unresolved variables were resolved."""
        num_pending = self._num_pending[node_id, slot]
        return num_pending == len(set(names)) and not self._nodes[node_id].has_ended

    def num_live_in(self, node_id: str) -> int:
        """Return the number of nodes in the entered bodies of a node that have not ended."""
        return self._num_live_in[node_id]

    def demand_added(self, nodes: Iterable[str], variables: Collection[str]) -> list[Ready]:
        """Let new nodes run that write one of `variables`, or what a demanded node reads."""
        assert self.demanded_nodes is not None
        demanded, graph = self.demanded_nodes, self._graph

        def is_demanded(variable: str) -> bool:
            readers = (*graph.get_consumers(variable), *graph.get_potential_readers(variable))
            return variable in variables or any(each.node in demanded for each in readers)

        return self.demand_nodes(
            node_id
            for node_id in nodes
            if any(is_demanded(name) for slot in graph.slots[node_id] for name in slot.writes)
        )

    def demand_nodes(self, nodes: Iterable[str]) -> list[Ready]:
        """Let nodes and all that they need run under `start: demand`; return the slots now ready.

        Nodes that a demanded node needs are demanded already, so they are not visited again.
        """
        assert self.demanded_nodes is not None
        graph = self._graph
        stack = list(nodes)
        new: set[str] = set()
        while stack:
            node_id = stack.pop()
            if node_id in self.demanded_nodes:
                continue
            self.demanded_nodes.add(node_id)
            new.add(node_id)
            stack += graph.nodes[node_id].after
            stack += graph.descendants(node_id)
            if (body := graph.body_of(node_id)) is not None:
                stack.append(body.control)
            for slot in graph.slots[node_id]:
                producers = map(graph.get_producer, slot.reads | slot.may_read)
                stack += [producer.node for producer in producers if producer is not None]
        return self.report(sorted(new, key=lambda each: graph.slot_number(graph.slots[each][0])))


def _exit_slot(control: GraphNode) -> int:
    assert isinstance(control, NodeWithBodies)
    return control.exit_slot
