"""`call`: a function step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from ..checks import check_name
from ..content import Expression, Name
from ..expressions.renaming import Renaming
from ..slot import Slot, SlotInputs
from .base import Node


class CallNode(Node, frozen=True, kw_only=True, tag="call"):
    """A call of a function that is registered on the server."""

    function: Annotated[str, Meta(min_length=1, max_length=128)]
    args: dict[str, Expression] = {}
    output: Name | UnsetType = UNSET

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        inputs.add_arguments(self.args)
        if self.output is UNSET:
            return (inputs.slot(self.id),)
        check_name(self.output, "output")
        return (inputs.slot(self.id, writes=(self.output,)),)

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return ((f"args.{name}", expression) for name, expression in self.args.items())

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {
            "args": {name: renaming.expression(each) for name, each in self.args.items()},
            "output": self.output if self.output is UNSET else renaming.name(self.output),
        }
