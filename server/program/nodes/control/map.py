"""`map`: a body for every item of a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType, field

from ...checks import check_references
from ...content import Expression, Name
from ...expressions.evaluate import input_expression
from ...expressions.renaming import Renaming
from ...slot import Slot, SlotInputs, read_by
from ..base import NodeBody
from ..bodies import outer_reads
from .base import OUTPUT, Body, BodyReference, KnownValue, TemplateNode, rename_body

MAX_WIDTH = 10_000
"""Items of one map."""


class MapNode(TemplateNode, frozen=True, kw_only=True, tag="map"):
    """Runs a body for all items of a list in parallel. The list may be computed during the run."""

    items: Expression
    """A list. A bare string names a variable."""
    item: Name = field(name="as")
    """The name of the item in the body."""
    index: Name | UnsetType = UNSET
    """The name of the item's index in the body, from 0."""
    body: Body
    collect: dict[Name, Expression] = {}
    """Maps an outer variable to a variable of the body. The outer variable lists the values of
    all items, in their order. Only instances have expressions here."""
    max_width: Annotated[int, Meta(ge=0, le=MAX_WIDTH)] = MAX_WIDTH
    """A longer list fails the map."""
    fail: Literal["any", "all"] = "any"
    """`any`: an item that fails fails the map. `all`: an item that fails is null in the lists, and
    the map fails if all items fail."""

    exit_slot: ClassVar[int] = OUTPUT

    @property
    def decision_variable(self) -> str:
        """`ID.items`, which stores the list, if an expression computes it. Otherwise a variable has
        the list, and `ID.width` stores the number of items.
        """
        return f"{self.id}.{'items' if self.has_item_expression else 'width'}"

    @property
    def tolerates_failures(self) -> bool:
        return self.fail == "all"

    def max_rounds(self, known: KnownValue) -> int:
        items = known(input_expression(self.items))
        return min(len(items), self.max_width) if isinstance(items, list) else self.max_width

    def bodies(self) -> tuple[NodeBody, ...]:
        binds = frozenset(name for _, name in self.bound_fields())
        return (NodeBody("body", "body", self.body, binds),)

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        inputs.add_reference(self.items, "items")
        self._check_bound_names()
        collected = {outer: (inner,) for outer, inner in self.collect.items()}
        inner = check_references("collect", collected)
        reads = outer_reads(self.bodies()[0], inner)
        return self._body_slots(inputs, (self.decision_variable,), self.collect, reads)

    def written_variables(self) -> Iterable[str]:
        return self.collect

    def body_references(self) -> Iterator[BodyReference]:
        for outer, inner in self.collect.items():
            yield BodyReference("body", f"collect.{outer}", read_by(inner))

    def submitted_names(self) -> Iterable[tuple[str, Expression]]:
        return ((f"collect.{outer}", inner) for outer, inner in self.collect.items())

    def write_path(self, variable: str) -> str:
        return f"collect.{variable}"

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return (("items", input_expression(self.items)),)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {
            "items": renaming.reference(self.items),
            **self._renamed_bound_names(renaming),
            "body": rename_body(self.body, renaming),
            "collect": {
                renaming.name(outer): renaming.reference(inner)
                for outer, inner in self.collect.items()
            },
        }
