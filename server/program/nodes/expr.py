"""`expr`: a computation on values."""

from __future__ import annotations

from collections.abc import Iterable

from ..checks import check_name
from ..content import Expression, Name
from ..expressions.renaming import Renaming
from ..slot import Slot, SlotInputs
from .base import Node


class ExprNode(Node, frozen=True, kw_only=True, tag="expr"):
    """A pure computation on JSON values."""

    expr: Expression
    output: Name

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        inputs.add_expression(self.expr, "expr")
        check_name(self.output, "output")
        return (inputs.slot(self.id, writes=(self.output,)),)

    def definitions(self) -> Iterable[tuple[str, Expression]]:
        return ((self.output, self.expr),)

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return (("expr", self.expr),)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {"expr": renaming.expression(self.expr), "output": renaming.name(self.output)}
