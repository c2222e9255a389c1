"""The records that kinds of nodes with bodies extend, with the methods a graph calls on them.

A kind is a subclass of `NodeWithBodies`, of `TemplateNode` if its body runs once for each item or
round, or of `MergeNode` if one of several bodies gives its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, ForwardRef, NamedTuple, Self, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...checks import check_name, refuse_control
from ...content import Expression, Json, Name
from ...expressions.evaluate import input_expression
from ...expressions.renaming import Renaming
from ...slot import Slot, SlotInputs, read_by
from ..base import MAX_NODES, Node

ENTER, OUTPUT, EXIT = 0, 1, 2
"""Slots of a node with bodies:

    ENTER    reads what the decision depends on, writes the decision
    OUTPUT   commits the variables that leave the bodies
    EXIT     waits until every node in the bodies has ended (`map` and `try` have no such slot:
             their OUTPUT waits, because a failure in a body changes the outputs)
"""


class BodyReference(NamedTuple):
    """A reference from a field of a node to variables in one of its bodies."""

    part: str
    path: str
    names: frozenset[str]


if TYPE_CHECKING:
    Body = Sequence[Node]
else:
    # The union of all kinds is known once they are defined; msgspec looks it up there.
    Body = Annotated[
        list[ForwardRef("AnyNode", module=__package__.rpartition(".")[0])],
        Meta(max_length=MAX_NODES),
    ]


KnownValue: TypeAlias = Callable[[Expression], Json]
"""Returns the value of an expression that is known before a run; None if it is not known."""


def rename_body(nodes: Iterable[Node], renaming: Renaming) -> list[Node]:
    """Return the nodes of a body that stays a template in an instance."""
    return [node.renamed_with_bodies(renaming) for node in nodes]


class NodeWithBodies(Node, frozen=True, kw_only=True):
    """A node that decides which nodes run.

    Its bodies are part of the graph from the start, except for a `TemplateNode`. They run
    between ENTER and `exit_slot`.
    """

    can_retry: ClassVar[bool] = False
    exit_slot: ClassVar[int] = EXIT
    """The slot that waits until every node in the bodies has ended."""

    @property
    def decision_variable(self) -> str | None:
        """The variable that stores the decision taken at ENTER. No submitted name equals it."""
        return None

    @property
    def tolerates_failures(self) -> bool:
        """Whether the node may end with its values although a node in its bodies failed."""
        return False

    def max_rounds(self, known: KnownValue) -> int:
        """Return how often the first body runs at most in one run of the node."""
        return 1

    def body_references(self) -> Iterator[BodyReference]:
        """Iterate over the references to variables in the bodies."""
        raise NotImplementedError

    def with_bodies(self, bodies: Sequence[Sequence[Node]]) -> Self:
        """Return the node with other nodes in its bodies, in the order of `bodies()`."""
        (body,) = bodies
        return msgspec.structs.replace(self, body=list(body))

    def renamed_with_bodies(self, renaming: Renaming) -> Self:
        bodies = [rename_body(body.nodes, renaming) for body in self.bodies()]
        return self.renamed(renaming).with_bodies(bodies)

    def _body_slots(
        self,
        inputs: SlotInputs,
        decisions: Iterable[str],
        outputs: Iterable[str],
        inner_reads: frozenset[str],
    ) -> tuple[Slot, ...]:
        """Return the slots: `inputs` are read at ENTER, `inner_reads` are read later."""
        none: frozenset[str] = frozenset()
        enter = inputs.slot(self.id, ENTER, decisions)
        output = Slot(self.id, OUTPUT, none, tuple(outputs), inner_reads, True)
        if self.exit_slot == OUTPUT:
            return (enter, output)
        return (enter, output, Slot(self.id, EXIT, none, (), tolerates_missing=True))


class MergeNode(NodeWithBodies, frozen=True, kw_only=True):
    """A node one of whose bodies gives its outputs: `merge` names them in each body."""

    if TYPE_CHECKING:
        # Declared by each kind, in the order of its JSON.
        merge: Mapping[Name, Sequence[Expression]]

    def written_variables(self) -> Iterable[str]:
        return self.merge

    def body_references(self) -> Iterator[BodyReference]:
        parts = [body.part for body in self.bodies()]
        for name, references in self.merge.items():
            for index, (part, inner) in enumerate(zip(parts, references, strict=True)):
                yield BodyReference(part, f"merge.{name}[{index}]", read_by(inner))

    def submitted_names(self) -> Iterable[tuple[str, Expression]]:
        return (
            (f"merge.{name}[{index}]", inner)
            for name, references in self.merge.items()
            for index, inner in enumerate(references)
        )

    def write_path(self, variable: str) -> str:
        return f"merge.{variable}"


class TemplateNode(NodeWithBodies, frozen=True, kw_only=True):
    """A node whose body is a template: instances of it are added for each item or round."""

    if TYPE_CHECKING:
        # Declared by each kind, in the order of its JSON.
        items: Expression | UnsetType
        item: Name | UnsetType
        index: Name | UnsetType
        body: Body

    @property
    def decision_variable(self) -> str:
        """The variable that stores the items, or the number of items or rounds."""
        raise NotImplementedError

    @property
    def has_item_expression(self) -> bool:
        """Whether the items are computed by an expression other than a variable."""
        if self.items is UNSET:
            return False
        expression = input_expression(self.items)
        return not (isinstance(expression, dict) and "var" in expression)

    @property
    def items_variable(self) -> str | None:
        """The variable that has the list of items; None without `items`."""
        if self.items is UNSET:
            return None
        if self.has_item_expression:
            return f"{self.id}.items"
        (name,) = read_by(self.items)
        return name

    def bound_fields(self) -> Iterator[tuple[str, Name]]:
        """Iterate over the fields that name item and index, with the names."""
        for field, name in (("as", self.item), ("index", self.index)):
            if name is not UNSET:
                yield field, name

    def _renamed_bound_names(self, renaming: Renaming) -> dict[str, object]:
        """Return item and index; an instance keeps their names, an expanded call renames them."""
        return {
            "item": self.item if self.item is UNSET else renaming.name(self.item),
            "index": self.index if self.index is UNSET else renaming.name(self.index),
        }

    def _check_bound_names(self) -> None:
        for field, name in self.bound_fields():
            check_name(name, field)
        if self.item == self.index and self.item is not UNSET:
            refuse_control(
                f"`as` and `index` are both `{self.item}`: choose two different names", "index"
            )
