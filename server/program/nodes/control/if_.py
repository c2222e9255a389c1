"""`if`: one of two bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
from msgspec import field

from ...checks import check_references
from ...content import Expression, Name
from ...expressions.evaluate import input_expression
from ...expressions.renaming import Renaming
from ...slot import Slot, SlotInputs
from ..base import Node, NodeBody
from .base import Body, MergeNode


class IfNode(MergeNode, frozen=True, kw_only=True, tag="if"):
    """Runs one of two bodies, chosen when the condition is known. The other never starts."""

    cond: Expression
    """A bare string names a variable."""
    then: Body = []
    otherwise: Body = field(default_factory=list, name="else")
    merge: dict[Name, tuple[Expression, Expression]] = {}
    """Maps an outer variable to a variable of `then` and one of `else`. Only the chosen body's is
    read. In instances, both may be expressions."""

    @property
    def decision_variable(self) -> str:
        """The variable that stores `then` or `else`."""
        return f"{self.id}.taken"

    def bodies(self) -> tuple[NodeBody, ...]:
        return (NodeBody("then", "then", self.then), NodeBody("else", "else", self.otherwise))

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        inputs.add_reference(self.cond, "cond")
        inner = check_references("merge", self.merge)
        return self._body_slots(inputs, (self.decision_variable,), self.merge, inner)

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return (("cond", input_expression(self.cond)),)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        merge = {
            renaming.name(name): tuple(map(renaming.reference, references))
            for name, references in self.merge.items()
        }
        return {
            "cond": renaming.reference(self.cond),
            "then": [],
            "otherwise": [],
            "merge": merge,
        }

    def with_bodies(self, bodies: Sequence[Sequence[Node]]) -> Self:
        then, otherwise = bodies
        return msgspec.structs.replace(self, then=list(then), otherwise=list(otherwise))
