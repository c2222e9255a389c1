"""The part of a program's graph that consists of the slots of some nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..nodes import GenerateNode
from .graph import Graph, Slot
from .toposort import sort


class SlotGraph(NamedTuple):
    """Slots by their indices in a list, and the edges between them."""

    slots: list[Slot]
    is_call: list[bool]
    """Whether a slot belongs to a generate node."""
    successors: list[list[int]]
    reverse_order: list[int]
    """All indices in reverse topological order."""

    @classmethod
    def of(cls, graph: Graph, nodes: Iterable[str] | None = None) -> SlotGraph:
        """Return the slots of `nodes` (None: of all nodes). The cost is linear in them."""
        names = graph.nodes if nodes is None else nodes
        slots = [slot for name in names for slot in graph.slots[name]]
        numbers = [graph.slot_number(slot) for slot in slots]
        indices = {number: index for index, number in enumerate(numbers)}
        successors = [
            [indices[later] for later in graph.successor_numbers(number) if later in indices]
            for number in numbers
        ]
        order = sort(range(len(slots)), successors.__getitem__)
        is_call = [isinstance(graph.nodes[slot.node], GenerateNode) for slot in slots]
        return cls(slots, is_call, successors, order[::-1])
