"""The tables of a graph: nodes, slots, edges, and the bodies that contain nodes.

Slots have numbers in the order they were added; edges are lists of numbers.

Out of scope: whether new nodes fit; `graph.extension` checks that.

Invariants: a slot keeps its number, and nothing is removed. The variables that a slot reads may
grow while its node runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ..ir import Job, Variable
from ..nodes import GraphNode
from ..nodes.bodies import BodyRef
from ..slot import Slot


@dataclass(slots=True)
class GraphTables:
    """The tables of a graph, or of the nodes that extend it."""

    nodes: dict[str, GraphNode] = field(default_factory=dict)
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    template_variables: dict[str, Variable] = field(default_factory=dict)
    """Variables defined in templates: only their instances have values."""
    template_nodes: set[str] = field(default_factory=set)
    jobs: dict[str, Job] = field(default_factory=lambda: {"main": Job()})
    outputs: list[str] = field(default_factory=list)
    provided: set[str] = field(default_factory=set)
    """Inputs that have a value."""
    body_of: dict[str, BodyRef] = field(default_factory=dict)
    """Node to the body that contains it."""
    body_nodes: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Node with bodies to its parts to the nodes in them."""
    numbered_slots: list[Slot] = field(default_factory=list)
    first_slot: dict[str, int] = field(default_factory=dict)
    """Node to the number of its first slot."""
    producers: dict[str, int] = field(default_factory=dict)
    consumers: dict[str, list[int]] = field(default_factory=dict)
    potential_readers: dict[str, list[int]] = field(default_factory=dict)
    """Variable to the slots that may read it later."""
    predecessors: list[list[int]] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    num_edges: int = 0
    num_submitted: int = 0
    """Nodes that were submitted or appended, with those in bodies; instances do not count."""

    def merge(self, new: GraphTables) -> None:
        """Add new nodes with their slots; their edges are added separately."""
        for number, slot in enumerate(new.numbered_slots, len(self.numbered_slots)):
            for variable in slot.reads:
                self.consumers.setdefault(variable, []).append(number)
            for variable in slot.may_read:
                self.potential_readers.setdefault(variable, []).append(number)
        self.nodes |= new.nodes
        self.slots |= new.slots
        self.variables |= new.variables
        self.template_variables |= new.template_variables
        self.template_nodes |= new.template_nodes
        self.jobs |= new.jobs
        self.outputs += new.outputs
        self.provided |= new.provided
        self.body_of |= new.body_of
        for node_id, body in new.body_of.items():
            parts = self.body_nodes.setdefault(body.control, {})
            parts.setdefault(body.part, []).append(node_id)
        self.numbered_slots += new.numbered_slots
        self.first_slot |= new.first_slot
        self.producers |= new.producers
        self.predecessors += ([] for _ in new.numbered_slots)
        self.successors += ([] for _ in new.numbered_slots)
        self.num_submitted += new.num_submitted

    def last_slot(self, node_id: str) -> int:
        """Return the number of a node's last slot."""
        return self.first_slot[node_id] + len(self.slots[node_id]) - 1

    def add_edge(self, source: int, target: int) -> None:
        """Make a slot wait for another one."""
        self.successors[source].append(target)
        self.predecessors[target].append(source)
        self.num_edges += 1

    def add_reads(self, node_id: str, index: int, names: Iterable[str]) -> None:
        """Add variables that a slot reads."""
        number = self.first_slot[node_id] + index
        slot = self.numbered_slots[number]
        # Sorted: the order of a set of names differs from process to process.
        new_names = sorted({name for name in names if name not in slot.reads})
        for name in new_names:
            self.consumers.setdefault(name, []).append(number)
            source = self.producers.get(name)
            if source is not None and name not in slot.may_read and source != number:
                self.add_edge(source, number)
        extended = msgspec.structs.replace(slot, reads=slot.reads | frozenset(new_names))
        self.numbered_slots[number] = extended
        slots = self.slots[node_id]
        self.slots[node_id] = (*slots[:index], extended, *slots[index + 1 :])
