"""`yield`: an event with a value for readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from ..content import Expression
from ..expressions.partial_values import finalized
from ..expressions.renaming import Renaming
from ..slot import Slot, SlotInputs
from .base import Node


class YieldNode(Node, frozen=True, kw_only=True, tag="yield"):
    """Sends a value to readers of the events."""

    value: Expression
    mode: Literal["value", "delta", "partial"] = "value"

    can_retry: ClassVar[bool] = False

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        is_partial = self.mode == "partial"
        inputs.add_expression(finalized(self.value) if is_partial else self.value, "value")
        return (inputs.slot(self.id),)

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return (("value", finalized(self.value)),)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {"value": renaming.expression(self.value)}
