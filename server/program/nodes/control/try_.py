"""`try`: a body with retries and handlers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

import msgspec
from msgspec import Meta, Struct

from ...checks import check_references, refuse_control
from ...content import Expression, Name
from ...expressions.renaming import Renaming
from ...slot import Slot, SlotInputs
from ..base import Node, NodeBody
from .base import OUTPUT, Body, KnownValue, MergeNode, rename_body


class Handler(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A body that runs instead of a body that failed."""

    codes: Annotated[list[str], Meta(max_length=1_000)] = []
    """The failures that it handles; `expr.*` is any that starts with `expr.`; empty: any."""
    body: Body = []


def handler_part(index: int) -> str:
    """Return the part of the handler with this index."""
    return f"handlers[{index}]"


class TryNode(MergeNode, frozen=True, kw_only=True, tag="try"):
    """Runs a body. If it fails, runs it again or runs a handler."""

    body: Body
    handlers: Annotated[list[Handler], Meta(max_length=1_000)] = []
    merge: dict[Name, list[Expression]] = {}
    """An outer variable to its name in the body and in each handler. Only instances have
    expressions here."""

    can_retry: ClassVar[bool] = True
    exit_slot: ClassVar[int] = OUTPUT

    @property
    def tolerates_failures(self) -> bool:
        return True

    def max_rounds(self, known: KnownValue) -> int:
        return 1 + self.retries

    @property
    def handler_variable(self) -> str:
        """The variable that stores the index of the chosen handler; null: none was needed."""
        return f"{self.id}.handler"

    def bodies(self) -> tuple[NodeBody, ...]:
        handlers = (
            NodeBody(handler_part(index), f"handlers[{index}].body", handler.body)
            for index, handler in enumerate(self.handlers)
        )
        return (NodeBody("body", "body", self.body), *handlers)

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        num_bodies = 1 + len(self.handlers)
        for name, references in self.merge.items():
            if len(references) != num_bodies:
                refuse_control(
                    f"`{name}` needs {num_bodies} names (one for the body and one for each "
                    f"handler), got {len(references)}",
                    f"merge.{name}",
                )
        inner = check_references("merge", self.merge)
        return self._body_slots(inputs, (), (*self.merge, self.handler_variable), inner)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        merge = {
            renaming.name(name): [renaming.reference(inner) for inner in references]
            for name, references in self.merge.items()
        }
        handlers = [msgspec.structs.replace(handler, body=[]) for handler in self.handlers]
        # Retries are instances of the body, so it is kept; handlers are part of the graph.
        return {"body": rename_body(self.body, renaming), "handlers": handlers, "merge": merge}

    def with_bodies(self, bodies: Sequence[Sequence[Node]]) -> Self:
        body, *others = bodies
        handlers = [
            msgspec.structs.replace(handler, body=list(nodes))
            for handler, nodes in zip(self.handlers, others, strict=True)
        ]
        return msgspec.structs.replace(self, body=list(body), handlers=handlers)
