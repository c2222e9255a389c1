"""Checks of names, expressions and constraints, shared by the kinds of nodes.

Paths in errors are relative to the node (`prompt[1].input`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NoReturn

from msgspec import UNSET

from .content import NAME_PATTERN, Constraint, Expression
from .errors import ProgramError
from .expressions.evaluate import check, variables

MAX_NAME = 128

_NAME = re.compile(NAME_PATTERN)
_INSTANCE_INDICES = re.compile(r"(\.r*\d+)*")
"""The suffix of a name in an instance of a body."""


def is_name(name: str) -> bool:
    """Return whether a text may name a variable, a node or a job."""
    return len(name) <= MAX_NAME and _NAME.match(name) is not None


def check_name(name: str, path: str) -> None:
    """Check a name, with or without the indices of an instance.

    Raises:
        ProgramError: `program.name`.
    """
    if is_name(name):
        return
    base, dot, indices = name.partition(".")
    if not is_name(base) or not _INSTANCE_INDICES.fullmatch(dot + indices):
        raise ProgramError(
            "program.name",
            f"invalid name {name[:140]!r}: must match [A-Za-z_]\\w* and have at most {MAX_NAME} "
            "characters",
            path=path,
        )


def check_expression(expression: Expression, path: str) -> frozenset[str]:
    """Check an expression in which a bare string is text, and return the variables it reads.

    Raises:
        ProgramError: `program.expression`.
    """
    check(expression, path)
    return variables(expression)


def check_reference(reference: Expression, path: str) -> frozenset[str]:
    """Check an expression in which a bare string names a variable; return the variables it reads.

    Raises:
        ProgramError: `program.name`, `program.expression`.
    """
    if isinstance(reference, str):
        check_name(reference, path)
        return frozenset((reference,))
    return check_expression(reference, path)


def check_references(field: str, references: Mapping[str, Iterable[Expression]]) -> frozenset[str]:
    """Check the variables that leave bodies, and return the names they refer to inside.

    Args:
        field: the field that lists them (`collect`, `merge`).
        references: an outer variable to its references into the bodies.

    Raises:
        ProgramError: `program.name`, `program.expression`.
    """
    names: set[str] = set()
    for outer, inner in references.items():
        path = f"{field}.{outer}"
        check_name(outer, path)
        for reference in inner:
            names |= check_reference(reference, path)
    return frozenset(names)


def check_constraint(constraint: Constraint | None, path: str) -> None:
    """Check that a constraint has exactly one field.

    Raises:
        ProgramError: `program.constraint`.
    """
    if constraint is None:
        return
    fields = Constraint.__struct_fields__
    present = [name for name in fields if getattr(constraint, name) is not UNSET]
    if len(present) != 1:
        raise ProgramError(
            "program.constraint",
            f"a constraint must have exactly one of {listed(fields)}, "
            f"got {listed(present) or 'none'}",
            path=path,
        )


def listed(names: Iterable[str]) -> str:
    """Return names in backquotes, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def refuse_control(message: str, path: str) -> NoReturn:
    """Raise ProgramError `program.control`."""
    raise ProgramError("program.control", message, path=path)
