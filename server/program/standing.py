"""The tables of a graph: nodes, slots and edges by number, and who stands in whose body.

Knows how new nodes become part of them. Refuses to know what makes them fit: that is
`growth`'s business.

Slots have numbers, in the order they came; edges are lists of numbers. Kept true: numbers
never change, and nothing is ever taken out. What a slot reads may grow while its node works.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from .control import ENTER, Place, wait_slot
from .ir import If, Job, Loop, Map, Placed, Try, Variable
from .validation import Slot


@dataclass(slots=True)
class Standing:
    """The tables of a graph."""

    nodes: dict[str, Placed] = field(default_factory=dict)
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    hidden: dict[str, Variable] = field(default_factory=dict)
    """Variables that are made in templates, so that only instances of them ever have a value."""
    hidden_nodes: set[str] = field(default_factory=set)
    jobs: dict[str, Job] = field(default_factory=lambda: {"main": Job()})
    outputs: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    places: dict[str, Place] = field(default_factory=dict)
    """Where the nodes stand that are in a body."""
    parts: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Node with bodies to its parts to the nodes in each of them."""
    numbered: list[Slot] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)
    """Node to the number of its first slot."""
    producers: dict[str, int] = field(default_factory=dict)
    consumers: dict[str, list[int]] = field(default_factory=dict)
    seers: dict[str, list[int]] = field(default_factory=dict)
    """Variable to the slots that may come to read it."""
    before: list[list[int]] = field(default_factory=list)
    behind: list[list[int]] = field(default_factory=list)
    num_edges: int = 0
    num_sent: int = 0
    """Nodes that were submitted or appended, with those in bodies; instances do not count."""

    def take(self, new: Standing) -> None:
        """Take in new nodes with their slots; their edges come after."""
        for number, slot in enumerate(new.numbered, len(self.numbered)):
            for variable in slot.reads:
                self.consumers.setdefault(variable, []).append(number)
            for variable in slot.sees:
                self.seers.setdefault(variable, []).append(number)
        self.nodes |= new.nodes
        self.slots |= new.slots
        self.variables |= new.variables
        self.hidden |= new.hidden
        self.hidden_nodes |= new.hidden_nodes
        self.jobs |= new.jobs
        self.outputs += new.outputs
        self.given |= new.given
        self.places |= new.places
        for node_id, place in new.places.items():
            parts = self.parts.setdefault(place.control, {})
            parts.setdefault(place.part, []).append(node_id)
        self.numbered += new.numbered
        self.first |= new.first
        self.producers |= new.producers
        self.before += ([] for _ in new.numbered)
        self.behind += ([] for _ in new.numbered)
        self.num_sent += new.num_sent

    def read(self, node_id: str, index: int, names: Iterable[str]) -> None:
        """A slot comes to read more names than it did."""
        number = self.first[node_id] + index
        slot = self.numbered[number]
        # Sorted: the order of a set of names differs from process to process.
        more = sorted({name for name in names if name not in slot.reads})
        for name in more:
            self.consumers.setdefault(name, []).append(number)
            source = self.producers.get(name)
            if source is not None and name not in slot.sees and source != number:
                self.behind[source].append(number)
                self.before[number].append(source)
                self.num_edges += 1
        grown = msgspec.structs.replace(slot, reads=slot.reads | frozenset(more))
        self.numbered[number] = grown
        slots = self.slots[node_id]
        self.slots[node_id] = (*slots[:index], grown, *slots[index + 1 :])


def gate(control: Placed) -> tuple[int, int]:
    """The slots of a node with bodies that these come behind, and that waits for them."""
    assert isinstance(control, Map | If | Loop | Try)
    return ENTER, wait_slot(control)
