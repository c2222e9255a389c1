"""`client`: a client step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from ..checks import check_name
from ..content import Expression, Name
from ..expressions.renaming import Renaming
from ..slot import Slot, SlotInputs
from .base import Node


class ClientNode(Node, frozen=True, kw_only=True, tag="client"):
    """A step that the client runs: requested by an event, answered by PUT."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    args: dict[str, Expression] = {}
    output: Name

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        inputs.add_arguments(self.args)
        check_name(self.output, "output")
        return (inputs.slot(self.id, writes=(self.output,)),)

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return ((f"args.{name}", expression) for name, expression in self.args.items())

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {
            "args": {name: renaming.expression(each) for name, each in self.args.items()},
            "output": renaming.name(self.output),
        }
