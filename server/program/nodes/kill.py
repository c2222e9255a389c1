"""`kill`: stops nodes or jobs."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import UNSET, Meta

from ..checks import check_name, refuse_control
from ..content import Name
from ..expressions.renaming import Renaming
from ..slot import Slot, SlotInputs
from .base import MAX_NODES, Node, NodeScope


class KillNode(Node, frozen=True, kw_only=True, tag="kill"):
    """Stops the producers of variables, or whole jobs. Nodes that have ended do not change."""

    targets: Annotated[list[Name], Meta(min_length=1, max_length=MAX_NODES)]

    can_retry: ClassVar[bool] = False

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        for index, target in enumerate(self.targets):
            check_name(target, f"targets[{index}]")
        return (inputs.slot(self.id),)

    def check_scope(self, scope: NodeScope) -> None:
        is_outside = not (scope.is_in_body or scope.is_in_template)
        if is_outside and not self.after and self.when is UNSET:
            refuse_control(
                f"node `{self.id}` would kill its targets at once: add `after` or `when`", ""
            )
        for index, target in enumerate(self.targets):
            path = f"targets[{index}]"
            if scope.is_job(target):
                if scope.can_read(target):
                    refuse_control(f"`{target}` is a job and a variable: rename one of them", path)
                continue
            scope.check_variable(target, path, allow_bound=False)
            if not scope.is_in_template and not scope.is_produced(target):
                refuse_control(
                    f"node `{self.id}` cannot kill `{target}`: no node writes this variable", path
                )

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        return {"targets": [renaming.job(renaming.name(name)) for name in self.targets]}
