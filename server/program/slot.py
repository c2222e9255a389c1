"""Slots: the units of execution that a node is split into."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from .checks import check_expression, check_reference
from .content import Expression
from .expressions.evaluate import input_expression, uses_first, variables


class Slot(Struct, frozen=True):
    """The unit of execution: starts when the variables it reads have values, writes at its end.

    A growing prompt has one slot per output. A node with bodies has one per entry, output and
    exit. Any other node has one. The slots of a node run in order of `index`.
    """

    node: str
    index: int
    reads: frozenset[str]
    writes: tuple[str, ...]
    may_read: frozenset[str] = frozenset()
    """Variables that the slot may read later, or that the bodies of its node read. The slot does
    not wait for them, but their producers must not wait for the slot."""
    tolerates_missing: bool = False
    """Whether the slot runs although a variable that it reads has a missing value."""


class SlotInputs:
    """Checks the expressions that one slot evaluates, and collects the variables that they read."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._uses_first = False

    def add_expression(self, expression: Expression, path: str) -> None:
        """Add an expression in which a bare string is text.

        Raises:
            ProgramError: `program.expression`.
        """
        self.names |= check_expression(expression, path)
        self._uses_first = self._uses_first or uses_first(expression)

    def add_reference(self, reference: Expression, path: str) -> None:
        """Add an expression in which a bare string names a variable.

        Raises:
            ProgramError: `program.name`, `program.expression`.
        """
        self.names |= check_reference(reference, path)
        if not isinstance(reference, str):
            self._uses_first = self._uses_first or uses_first(reference)

    def add_arguments(self, arguments: dict[str, Expression]) -> None:
        """Add the `args` of a function step or a client step.

        Raises:
            ProgramError: `program.expression`.
        """
        for name, expression in arguments.items():
            self.add_expression(expression, f"args.{name}")

    def slot(self, node_id: str, index: int = 0, writes: Iterable[str] = ()) -> Slot:
        """Return the slot that evaluates the added expressions."""
        return Slot(
            node_id,
            index,
            frozenset(self.names),
            tuple(writes),
            tolerates_missing=self._uses_first,
        )


def read_by(reference: Expression) -> frozenset[str]:
    """Return the variables that a reference (a name or an expression) reads."""
    return variables(input_expression(reference))
