"""The edges that an extension adds to a graph, and the order of its slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from ..errors import ProgramError
from ..nodes.bodies import BodyRef, walk
from ..nodes.control.base import ENTER, OUTPUT, NodeWithBodies, TemplateNode
from .name_resolution import NameResolver
from .tables import GraphTables
from .toposort import find_cycle, reachable, sort

MAX_NAMES = 20
"""Nodes of a cycle that an error names."""


class ExtensionEdges:
    """Edges between the slots of an extension, and from and to the slots of its graph."""

    def __init__(self, existing: GraphTables, new: GraphTables, names: NameResolver) -> None:
        self._existing = existing
        self._new = new
        self._names = names
        self._base = len(existing.numbered_slots)
        self.edges: list[tuple[int, int]] = []
        """Pairs of a slot and a slot that waits for it."""
        self.is_append_only = True
        """Whether no existing slot waits for a new one."""

    def connect(self) -> None:
        """Create the edges."""
        for number, slot in enumerate(self._new.numbered_slots, self._base):
            producers = {self._names.producer(name) for name in (*slot.reads, *slot.may_read)}
            sources = {source for source in producers if source is not None}
            node = self._new.nodes[slot.node]
            if slot.index:
                sources.add(number - 1)
            else:
                sources |= self._last_slots(node.after)
            if slot.index == OUTPUT and isinstance(node, TemplateNode):
                sources |= self._last_slots(
                    earlier
                    for body in node.bodies()
                    for _, inner in walk(body.nodes, "")
                    for earlier in inner.after
                )
            # Sorted: the order of a set of names differs from process to process.
            self.edges += ((source, number) for source in sorted(sources))
        for node_id, body in self._new.body_of.items():
            self._connect_to_body(node_id, body)
        for variable, number in self._new.producers.items():
            readers = self._existing.consumers.get(variable, ())
            for reader in (*readers, *self._existing.potential_readers.get(variable, ())):
                self.edges.append((number, reader))
                self.is_append_only = False

    def _connect_to_body(self, node_id: str, body: BodyRef) -> None:
        """Run a node of a body after the ENTER slot and before the exit slot of its control."""
        is_new = body.control in self._new.nodes
        tables = self._new if is_new else self._existing
        if body.control not in tables.nodes:
            return
        control = cast(NodeWithBodies, tables.nodes[body.control])
        first = tables.first_slot[body.control]
        if is_new:
            self.edges.append((first + ENTER, self._new.first_slot[node_id]))
        self.edges.append((self._new.last_slot(node_id), first + control.exit_slot))

    def _last_slots(self, nodes: Iterable[str]) -> set[int]:
        """Return the last slots of nodes; nodes outside of this template have none."""
        return {
            tables.last_slot(node_id)
            for node_id in nodes
            for tables in (self._new, self._existing)
            if node_id in tables.first_slot
        }

    def sort(self, paths: Mapping[str, str]) -> list[int]:
        """Return the new slots in topological order, with the existing slots that follow them.

        Raises:
            ProgramError: `program.cycle`.
        """
        base, existing_successors = self._base, self._existing.successors
        added: dict[int, list[int]] = {}
        for source, target in self.edges:
            added.setdefault(source, []).append(target)

        def successors(number: int) -> Sequence[int]:
            targets = added.get(number, ())
            return [*existing_successors[number], *targets] if number < base else targets

        # A cycle must contain a new slot: only slots reachable from these need to be sorted.
        numbers: Sequence[int] = range(base, base + len(self._new.numbered_slots))
        if not self.is_append_only:
            numbers = reachable(numbers, successors)
        order = sort(numbers, successors)
        if len(order) == len(numbers):
            return order
        cycle = find_cycle(set(numbers) - set(order), successors)
        names = [self._names.slot(number).node for number in cycle]
        names = [name for i, name in enumerate(names) if name != names[i - 1]] or names[:1]
        first = next(node_id for node_id in self._new.nodes if node_id in names)
        raise ProgramError(
            "program.cycle",
            f"nodes form a cycle: {_described(names)}",
            path=paths[first],
        )


def _described(cycle: list[str]) -> str:
    """Return the nodes of a cycle with arrows; of a long one the first ones and their number."""
    if len(cycle) <= MAX_NAMES:
        return " -> ".join([*cycle, cycle[0]])
    return f"{' -> '.join(cycle[:MAX_NAMES])} -> ... ({len(cycle):,} nodes)"
