"""`wait`: a barrier on variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ..checks import check_name, refuse_control
from ..content import Expression, Name
from ..expressions.renaming import Renaming
from ..slot import Slot, SlotInputs
from .base import MAX_NODES, Node, NodeScope


class WaitNode(Node, frozen=True, kw_only=True, tag="wait"):
    """Completes once enough of its variables have values. Nodes `after` it then run."""

    variables: Annotated[list[Name], Meta(min_length=1, max_length=MAX_NODES)]
    mode: Literal["all", "any"] | Annotated[int, Meta(ge=1, le=MAX_NODES)] = "all"
    """A number: that many variables."""
    required: bool = False
    """Whether the nodes `after` it are skipped if it ends without enough values."""

    can_retry: ClassVar[bool] = False

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        """Return two slots: the start, where `timeout_s` begins, and the end."""
        for index, name in enumerate(self.variables):
            check_name(name, f"variables[{index}]")
        num_variables = len(set(self.variables))
        if isinstance(self.mode, int) and self.mode > num_variables:
            refuse_control(
                f"`mode` is {self.mode}, but there are only {num_variables} variables to wait for",
                "mode",
            )
        end = Slot(self.id, 1, frozenset(self.variables), (), tolerates_missing=True)
        return (inputs.slot(self.id), end)

    def check_scope(self, scope: NodeScope) -> None:
        for index, name in enumerate(self.variables):
            if scope.is_bound(name):
                refuse_control(
                    f"`{name}` has its value when the body starts: remove it from `variables`",
                    f"variables[{index}]",
                )

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return ((f"variables[{i}]", {"var": name}) for i, name in enumerate(self.variables))

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {"variables": [renaming.name(name) for name in self.variables]}
