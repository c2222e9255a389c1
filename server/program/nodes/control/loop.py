"""`loop`: a body round after round, and the node that ends each round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field
from msgspec.structs import force_setattr

from ...checks import check_expression, check_name, refuse_control
from ...content import Expression, Name
from ...expressions.evaluate import input_expression, variables
from ...expressions.renaming import Renaming
from ...slot import Slot, SlotInputs
from ..base import Node, NodeBody
from ..bodies import outer_reads
from .base import Body, BodyReference, KnownValue, TemplateNode, rename_body

MAX_ROUNDS = 10_000
DEFAULT_MAX_ROUNDS = 1_000


class LoopNode(TemplateNode, frozen=True, kw_only=True, tag="loop"):
    """Runs a body round after round, until a condition holds or no round is left."""

    items: Expression | UnsetType = UNSET
    """A list with one item for each round. A bare string names a variable."""
    count: Expression | UnsetType = UNSET
    """A number of rounds. A bare string names a variable."""
    item: Name | UnsetType = field(default=UNSET, name="as")
    index: Name | UnsetType = UNSET
    carry: dict[Name, tuple[Expression, Expression]] = {}
    """A variable to its value in the first round and, evaluated at the end of a round, its value
    in the next. Outside the loop it has the value after the last round."""
    body: Body
    until: Expression | UnsetType = UNSET
    """Evaluated at the end of a round; true ends the loop. A bare string names a variable."""
    max_iter: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)] = DEFAULT_MAX_ROUNDS
    """The loop fails if it does not end after this number of rounds. It fails before the first one
    if it has more items, or a larger `count`, and nothing in the program can end it earlier."""

    def __post_init__(self) -> None:
        # A constant text is neither a number of rounds nor a condition.
        for name, expression in (("count", self.count), ("until", self.until)):
            if isinstance(expression, str):
                force_setattr(self, name, input_expression(expression))

    @property
    def decision_variable(self) -> str:
        """The variable that stores the list, or the number of rounds.

        The number of rounds is the number of items if a variable has the list; without `items`
        it is the `count`; null if only `until` ends the loop.
        """
        return f"{self.id}.{'items' if self.has_item_expression else 'rounds'}"

    def max_rounds(self, known: KnownValue) -> int:
        items = None if self.items is UNSET else known(input_expression(self.items))
        count = None if self.count is UNSET else known(self.count)
        rounds = len(items) if isinstance(items, list) else count
        if not isinstance(rounds, int) or isinstance(rounds, bool):
            return self.max_iter
        return min(max(rounds, 0), self.max_iter)

    def bodies(self) -> tuple[NodeBody, ...]:
        binds = frozenset((*(name for _, name in self.bound_fields()), *self.carry))
        return (NodeBody("body", "body", self.body, binds),)

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        self._check_bounds()
        if self.items is not UNSET:
            inputs.add_reference(self.items, "items")
        if self.count is not UNSET:
            inputs.add_expression(self.count, "count")
        self._check_bound_names()
        end_reads: set[str] = set()
        for name, (init, following) in self.carry.items():
            check_name(name, f"carry.{name}")
            inputs.add_expression(init, f"carry.{name}[0]")
            end_reads |= check_expression(following, f"carry.{name}[1]")
        if self.until is not UNSET:
            end_reads |= check_expression(self.until, "until")
        reads = outer_reads(self.bodies()[0], frozenset(end_reads))
        decisions = (self.decision_variable, *(f"{name}.0" for name in self.carry))
        return self._body_slots(inputs, decisions, self.carry, reads)

    def _check_bounds(self) -> None:
        if self.items is not UNSET and self.count is not UNSET:
            refuse_control("a loop has both `items` and `count`: remove one of them", "count")
        if self.items is UNSET and self.count is UNSET and self.until is UNSET:
            refuse_control("a loop needs `items`, `count` or `until`", "")
        if self.items is UNSET and self.item is not UNSET:
            refuse_control("`as` names an item, but the loop has no `items`", "as")

    def written_variables(self) -> Iterable[str]:
        return self.carry

    def definitions(self) -> Iterable[tuple[str, Expression]]:
        return ((f"{name}.0", init) for name, (init, _) in self.carry.items())

    def body_references(self) -> Iterator[BodyReference]:
        for name, (_, following) in self.carry.items():
            yield BodyReference("body", f"carry.{name}[1]", variables(following))
        if self.until is not UNSET:
            yield BodyReference("body", "until", variables(self.until))

    def write_path(self, variable: str) -> str:
        return f"carry.{variable}"

    def _expressions(self) -> Iterator[tuple[str, Expression]]:
        if self.items is not UNSET:
            yield "items", input_expression(self.items)
        if self.count is not UNSET:
            yield "count", self.count
        yield from ((f"carry.{name}[0]", init) for name, (init, _) in self.carry.items())

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {
            "items": self.items if self.items is UNSET else renaming.reference(self.items),
            "count": self.count if self.count is UNSET else renaming.expression(self.count),
            **self._renamed_bound_names(renaming),
            "carry": {
                renaming.name(name): (renaming.expression(init), renaming.expression(following))
                for name, (init, following) in self.carry.items()
            },
            "body": rename_body(self.body, renaming),
            "until": self.until if self.until is UNSET else renaming.expression(self.until),
        }


class RoundEndNode(Node, frozen=True, kw_only=True, tag="round"):
    """The end of one round of a loop. Created by the server only."""

    carry: dict[str, Expression] = {}
    """A variable of the next round to its value."""
    keeps: dict[str, str] = {}
    """The same variable in this round, whose value is kept if the next value is missing."""
    until: Expression | UnsetType = UNSET
    more: str = ""
    """The variable that stores whether there is another round."""

    def make_slots(self) -> tuple[Slot, ...]:
        reads = {name for expression in self.carry.values() for name in variables(expression)}
        reads |= set(self.keeps.values())
        if self.until is not UNSET:
            reads |= variables(self.until)
        writes = (*self.carry, self.more)
        return (Slot(self.id, 0, frozenset(reads), writes, tolerates_missing=True),)

    def definitions(self) -> Iterable[tuple[str, Expression]]:
        return self.carry.items()
