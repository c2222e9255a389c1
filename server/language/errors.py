"""Errors of source texts: a stable code, the position, and what to write instead.

ProgramError
`-- LanguageError                 `language.recursion`, and errors of the graph with their line
    |-- SourceSyntaxError         `language.syntax`, `language.template`
    |-- UnsupportedSourceError    `language.unsupported`: a construct the language lacks
    |-- SourceNameError           `language.undefined_name`, `language.maybe_unassigned`,
    |                             `language.unknown_function`
    |-- SourceArgumentError       `language.argument`, `language.constant`, `language.type`
    `-- SourceTooLargeError       `language.too_large` (413)
"""

from __future__ import annotations

import ast
from typing import NamedTuple, TypeAlias

from ..program.errors import ProgramError


class Position(NamedTuple):
    """A position in a text; both count from 1, columns in characters."""

    line: int
    column: int

    @property
    def lineno(self) -> int:
        """The line, under the name that it has in nodes of a syntax tree."""
        return self.line


Place: TypeAlias = Position | ast.expr | ast.stmt
"""A position, or a node that starts there. Code that may report an error passes nodes, so that
positions are computed for errors only."""


class LanguageError(ProgramError):
    """A text is not a valid program of the language."""

    def __init__(self, code: str, message: str, place: Place) -> None:
        line, column = place if isinstance(place, Position) else position_of(place)
        super().__init__(
            code, f"line {line}, column {column}: {message}", path=f"source:{line}:{column}"
        )
        self.line = line
        self.column = column


class SourceSyntaxError(LanguageError):
    """The text cannot be parsed."""


class UnsupportedSourceError(LanguageError):
    """The text has a construct that the language lacks."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__("language.unsupported", message, place)


class SourceNameError(LanguageError):
    """A name is unknown, or may have no value."""


class SourceArgumentError(LanguageError):
    """An argument, an option or an operand is invalid."""


class SourceTooLargeError(LanguageError):
    """The text, or the program that it describes, exceeds a bound."""

    status = 413


def position_of(node: ast.AST) -> Position:
    """Return where a node of the syntax tree starts.

    `syntax.parse` converts the columns of all nodes from bytes to characters.
    """
    fields = vars(node)
    return Position(fields.get("lineno", 1), fields.get("col_offset", 0) + 1)
