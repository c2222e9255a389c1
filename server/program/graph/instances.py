"""Instances of bodies: a template's nodes, once for each item, round or retry.

An instance differs from its template in names, items and seeds only (`expressions.renaming`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import msgspec
from msgspec import UNSET

from ..content import Expression
from ..expressions.renaming import DefinedNames, Renaming
from ..nodes import GraphNode, LoopNode, Node, RoundEndNode
from ..nodes.bodies import BodyRef, flatten, walk
from ..nodes.control.base import NodeWithBodies
from ..slot import Slot, read_by

__all__ = [
    "BodyInstance",
    "BodyTemplate",
    "DefinedNames",
    "Renaming",
    "defined_names",
    "end_of_round",
    "item_expression",
    "read_by",
]


class BodyInstance(NamedTuple):
    """A node to add to the graph, with its slots and the body that contains it."""

    node: GraphNode
    slots: tuple[Slot, ...]
    place: BodyRef | None


class BodyTemplate:
    """A body that instances are made of."""

    def __init__(self, control: str, nodes: Sequence[Node]) -> None:
        self._control = control
        self._flat = [(node, node.make_slots(), place) for _, node, place in flatten(nodes, "")]
        self._names = defined_names(nodes)
        self._last_reads: dict[Slot, frozenset[str]] = {}
        """What each slot read in the last instance."""

    def instantiate(
        self, part: str, suffix: str, bound: Mapping[str, Expression]
    ) -> list[BodyInstance]:
        """Return the nodes of one instance.

        Args:
            part: the part of the template's node that the instance is.
            suffix: the suffix of every name in the instance.
            bound: expressions that replace the names of item, index and carried variables.
        """
        renaming = Renaming(self._names, suffix, bound)
        own = BodyRef(self._control, part)
        instances: list[BodyInstance] = []
        for node, slots, place in self._flat:
            renamed = node.renamed(renaming)
            body = own if place is None else BodyRef(renaming.node_id(place.control), place.part)
            renamed_slots = tuple(
                _rename_slot(slot, node, renamed, renaming, self._reads(slot, renaming))
                for slot in slots
            )
            instances.append(BodyInstance(cast(GraphNode, renamed), renamed_slots, body))
        return instances

    def _reads(self, slot: Slot, renaming: Renaming) -> frozenset[str]:
        """Return what a slot reads in an instance. Instances that read the same share the set."""
        reads = renaming.names(slot.reads)
        last = self._last_reads.get(slot)
        if reads == last:
            return last
        self._last_reads[slot] = reads
        return reads

    def renaming_of(self, suffix: str, bound: Mapping[str, Expression]) -> Renaming:
        """Return the renaming of one instance, for references into the body."""
        return Renaming(self._names, suffix, bound)

    @property
    def num_nodes(self) -> int:
        """The number of nodes in one instance, without instances of templates inside it."""
        return len(self._flat)

    @property
    def node_ids(self) -> list[str]:
        """The nodes of the body, without those in bodies inside it."""
        return [node.id for node, _, place in self._flat if place is None]


def defined_names(nodes: Sequence[Node]) -> DefinedNames:
    """Return the nodes and variables that nodes define at any depth."""
    found = [node for _, node in walk(nodes, "")]
    variables = (name for node in found for name in node.defined_variables())
    return DefinedNames(frozenset(node.id for node in found), frozenset(variables))


def _rename_slot(
    slot: Slot, node: Node, renamed: Node, renaming: Renaming, reads: frozenset[str]
) -> Slot:
    decisions: dict[str | None, str | None] = {}
    if isinstance(node, NodeWithBodies) and isinstance(renamed, NodeWithBodies):
        # An item that is renamed to an expression changes the kind of the decision.
        decisions = {node.decision_variable: renamed.decision_variable}
    return msgspec.structs.replace(
        slot,
        node=renamed.id,
        reads=reads,
        writes=tuple(decisions.get(name) or renaming.name(name) for name in slot.writes),
        may_read=renaming.names(slot.may_read),
    )


def end_of_round(
    node: LoopNode, index: int, renaming: Renaming, body: Sequence[str], *, is_last: bool
) -> BodyInstance:
    """Return the node that ends a round: computes carried variables and whether the loop continues.

    Args:
        node: the loop.
        index: the index of the round.
        renaming: the renaming of the round's instance.
        body: ids of the nodes in the instance that it waits for.
        is_last: whether no round is left. `until` is then not read.
    """
    until: Expression | msgspec.UnsetType = UNSET
    if is_last:
        until = True
    elif node.until is not UNSET:
        until = renaming.expression(node.until)
    ends = RoundEndNode(
        id=f"{node.id}.{index}",
        job=node.job,
        after=list(body),
        carry={
            f"{name}.{index + 1}": renaming.expression(following)
            for name, (_, following) in node.carry.items()
        },
        keeps={f"{name}.{index + 1}": f"{name}.{index}" for name in node.carry},
        until=until,
        more=f"{node.id}.{index}.more",
    )
    return BodyInstance(ends, ends.make_slots(), BodyRef(node.id, str(index)))


def item_expression(source: str | None, index: int) -> Expression:
    """Return the expression of one element of the list in a variable."""
    return None if source is None else {"get": [{"var": source}, index]}
