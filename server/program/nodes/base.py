"""The record that the kinds of nodes extend, with the methods that a graph calls on it.

A kind is one subclass of `Node` in its own module: the fields on the wire, how they are
checked and split into slots, what they read and write, and how an instance renames them.
`control.base` adds what kinds with bodies share.

Out of scope: other nodes. Whether a name exists is checked by `graph.name_resolution`.

Invariants: paths in errors are relative to the node. A node whose slots were made has
well-formed names and expressions in all its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import (
    Annotated,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
)

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..checks import check_name, refuse_control
from ..content import Expression, Json, Name
from ..expressions.evaluate import input_expression, variables
from ..expressions.renaming import Renaming
from ..slot import Slot, SlotInputs

MAX_NODES = 10_000
"""Nodes in one submission, bodies included, and nodes that may be sent to one session."""

Seconds = Annotated[float, Meta(gt=0, le=7 * 86_400)]


class NodeScope(Protocol):
    """The names around one node of a graph."""

    @property
    def is_in_body(self) -> bool:
        """Whether the node is in a body."""
        ...

    @property
    def is_in_template(self) -> bool:
        """Whether the node is in the body of a `map` or `loop`."""
        ...

    def is_job(self, name: str) -> bool:
        """Return whether a job has this name."""
        ...

    def is_bound(self, name: str) -> bool:
        """Return whether a template around the node binds this name."""
        ...

    def can_read(self, name: str) -> bool:
        """Return whether the node can read a variable."""
        ...

    def is_produced(self, name: str) -> bool:
        """Return whether a node of the same graph writes this variable."""
        ...

    def check_variable(self, name: str, path: str, *, allow_bound: bool = True) -> None:
        """Raise ProgramError `program.unknown_variable` if the node cannot read a variable."""
        ...


class NodeBody(NamedTuple):
    """One body of a node."""

    part: str
    """`body`, `then`, `else`, `handlers[0]`."""
    path: str
    nodes: Sequence[Node]
    binds: frozenset[str] = frozenset()
    """Names that the body's node defines in it: item, index and carried variables."""


class Node(
    Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="op",
):
    """The fields that every node has."""

    id: Name
    job: Name = "main"
    after: Annotated[list[Name], Meta(max_length=1_000)] = []
    """Nodes that must have ended first, whether they succeeded or not."""
    when: Expression | UnsetType = UNSET
    """A bare string names a variable. False skips the node."""
    timeout_s: Seconds | None = None
    retries: Annotated[int, Meta(ge=0, le=10)] = 0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    on_error: Literal["fail", "isolate"] | None = None
    """None: the policy of the node's job."""
    meta: Json = None

    can_retry: ClassVar[bool] = True

    @classmethod
    def op(cls) -> str:
        """Return the kind's name on the wire."""
        return str(cls.__struct_config__.tag)

    def make_slots(self) -> tuple[Slot, ...]:
        """Check the node, but not the nodes in its bodies, and split it into slots.

        Raises:
            ProgramError: `program.name`, `program.expression`, `program.segment`,
                `program.constraint`, `program.sampling`, `program.tools`, `program.control`.
        """
        check_name(self.id, "id")
        check_name(self.job, "job")
        if self.retries and not self.can_retry:
            refuse_control(f"`{self.op()}` cannot be retried: put it into a `try`", "retries")
        inputs = SlotInputs()
        if self.when is not UNSET:
            inputs.add_reference(self.when, "when")
        return self._make_slots(inputs)

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        """Check the fields of the kind and return its slots; `inputs` has `when`."""
        raise NotImplementedError

    def bodies(self) -> tuple[NodeBody, ...]:
        """Return the bodies of the node."""
        return ()

    def written_variables(self) -> Iterable[str]:
        """Return the variables that the node writes in the scope around it."""
        return [name for slot in self.make_slots() for name in slot.writes]

    def defined_variables(self) -> Iterable[str]:
        """Return the variables that the node writes in the scope around it and in its bodies.

        An instance renames them. Variables that nodes in the bodies write do not count.
        """
        return self.written_variables()

    def definitions(self) -> Iterable[tuple[str, Expression]]:
        """Return variables with the expressions they are computed from, known before a run."""
        return ()

    def trailing_reads(self) -> frozenset[str] | None:
        """Return what a prompt reads after its last output; None if no text follows it."""
        return None

    def submitted_names(self) -> Iterable[tuple[str, Expression]]:
        """Return the fields (path, content) in which a submission has names, not expressions.

        Only instances of bodies have expressions there.
        """
        return ()

    def check_scope(self, scope: NodeScope) -> None:
        """Check names that the node mentions without reading them.

        Raises:
            ProgramError: `program.unknown_variable`, `program.control`.
        """

    # --- paths for error messages -------------------------------------------------------------

    def read_path(self, variable: str) -> str:
        """Return where the checked node first reads a variable."""
        paths = ((path, variables(each)) for path, each in self._all_expressions())
        return next(path for path, names in paths if variable in names)

    def write_path(self, variable: str) -> str:
        """Return where the checked node writes a variable."""
        return "output"

    def _all_expressions(self) -> Iterator[tuple[str, Expression]]:
        if self.when is not UNSET:
            yield "when", input_expression(self.when)
        yield from self._expressions()

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        """Return the expressions of the kind's fields, with their paths, in order."""
        return ()

    # --- instances ----------------------------------------------------------------------------

    def renamed(self, renaming: Renaming) -> Self:
        """Return the node as part of an instance, without bodies that the graph has flattened."""
        return msgspec.structs.replace(
            self,
            id=renaming.node_id(self.id),
            job=renaming.job(self.job),
            after=[renaming.node_id(other) for other in self.after] if self.after else self.after,
            when=self.when if self.when is UNSET else renaming.reference(self.when),
            **self._renamed_fields(renaming),
        )

    def renamed_with_bodies(self, renaming: Renaming) -> Self:
        """Return the node as part of a template inside an instance: with all its bodies."""
        return self.renamed(renaming)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        """Return the fields of the kind that change in an instance."""
        raise NotImplementedError
