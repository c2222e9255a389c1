"""Expressions expanded into pieces: the text that is known, and what is not known yet.

Knows expressions and what variables are defined by. Refuses to know segments, messages
and hashes; `rope` builds on this.

Kept true: `expand` gives the same pieces for the same expression and definitions, always;
its work is bounded, however often definitions use each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from .errors import ExpressionError
from .expression import evaluate, variables
from .ir import Expression
from .value import compact_json, text_of

MAX_PIECES = 10_000
"""Pieces of one expanded expression, 256 characters of text being one; what lies beyond
stays an expression."""
MAX_DEPTH = 64
"""Expressions inside each other, below which no definition is followed any more."""

Kind: TypeAlias = Literal["text", "list"]
_TEXT_OPERATORS = frozenset({"join", "strip", "lower", "pyrepr", "json"})
_LIST_OPERATORS = frozenset({"each", "split", "range"})
_EXPANDED = frozenset({"concat", "join", "json", "object"})
"""What can be taken apart into pieces, besides a variable that is defined."""


class Text(NamedTuple):
    """Text of the program. `special`: it may yield special tokens."""

    text: str
    special: bool = False


class Value(NamedTuple):
    """The value of an expression: a string as it is, anything else as compact JSON."""

    expression: Expression


class Definitions:
    """What `expr` nodes compute: the expression behind each variable they write."""

    def __init__(self) -> None:
        self._expressions: dict[str, Expression] = {}
        self._kinds: dict[str, Kind | None] = {}

    def add(self, variable: str, expression: Expression) -> None:
        """Say what a variable is computed from; the whole must stay free of cycles."""
        self._expressions[variable] = expression
        # What was of unknown kind because of this variable may be known now.
        self._kinds.clear()

    def get(self, variable: str) -> Expression | None:
        """The expression behind a variable, None if no `expr` node writes it."""
        return self._expressions.get(variable)

    def get_kind(self, variable: str) -> Kind | None:
        """Whether a variable's value is surely text or surely a list, if it is anything."""
        stack = [variable]
        # Depth first with a stack of our own: definitions may be chained by the thousand.
        while stack:
            name = stack[-1]
            expression = self._expressions.get(name)
            if name in self._kinds or expression is None:
                stack.pop()
                continue
            missing = [
                read
                for read in variables(expression)
                if read in self._expressions and read not in self._kinds
            ]
            if missing:
                stack += missing
            else:
                self._kinds[name] = kind_of(expression, self)
                stack.pop()
        return self._kinds.get(variable)

    def known_kind(self, variable: str) -> Kind | None:
        """As `get_kind`, of what has been looked at already."""
        return self._kinds.get(variable)


def kind_of(expression: Expression, definitions: Definitions | None) -> Kind | None:
    """What the value of an expression surely is, if it has one. None: cannot be told."""
    if isinstance(expression, str):
        return "text"
    if isinstance(expression, list):
        return "list"
    if not isinstance(expression, dict):
        return None
    ((name, argument),) = expression.items()
    if name in _TEXT_OPERATORS:
        return "text"
    if name in _LIST_OPERATORS:
        return "list"
    if name == "lit":
        return _literal_kind(argument)
    if name == "var" and definitions is not None:
        return definitions.known_kind(argument)
    if name == "slice":
        return kind_of(argument[0], definitions)
    if name == "if":
        chosen = kind_of(argument[1], definitions)
        return chosen if chosen == kind_of(argument[2], definitions) else None
    if name == "concat" and isinstance(argument, list):
        # One operand decides: a concatenation of lists and others fails.
        operands = {kind_of(operand, definitions) for operand in argument}
        if "list" in operands:
            return "list"
        return "text" if "text" in operands else None
    return None


def _literal_kind(value: Expression) -> Kind | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else None


def list_items(expression: Expression, definitions: Definitions | None) -> list[Expression] | None:
    """The parts of a list, one step: elements of an array, operands of a concatenation.

    A part is an element or a list of elements, which is what a splice takes. None: the
    expression cannot be taken apart.
    """
    if isinstance(expression, dict):
        ((name, argument),) = expression.items()
        if name == "var" and definitions is not None and definitions.get_kind(argument) == "list":
            return [definitions.get(argument)]
        if name == "concat" and kind_of(expression, definitions) == "list":
            return list(argument)
    elements = _elements(expression)
    # A list inside a list is no list of elements: it is left whole, to fail as such.
    if elements is None or any(kind_of(item, definitions) == "list" for item in elements):
        return None
    return elements


def _elements(expression: Expression) -> list[Expression] | None:
    """All elements of a list that is written out, None unless each of them is known."""
    if isinstance(expression, list):
        return expression
    if not isinstance(expression, dict):
        return None
    ((name, argument),) = expression.items()
    if name == "lit" and isinstance(argument, list):
        return [{"lit": item} for item in argument]
    if name != "concat":
        return None
    elements: list[Expression] = []
    for operand in argument:
        inside = _elements(operand)
        if inside is None:
            return None
        elements += inside
    return elements


def expand(
    expression: Expression, definitions: Definitions | None = None
) -> tuple[Text | Value, ...]:
    """The pieces whose texts, joined, are the text of the expression's value."""
    names = variables(expression)
    if names and isinstance(expression, dict):
        ((operator, argument),) = expression.items()
        if operator == "var":
            is_known = definitions is not None and definitions.get(argument) is not None
        else:
            is_known = operator in _EXPANDED
        if not is_known:
            return (Value(expression),)
    if definitions is not None:
        for name in names:
            definitions.get_kind(name)
    return tuple(_merge(_Expansion(definitions).write(expression, 0)))


class _Expansion:
    """One expression being written out as pieces."""

    def __init__(self, definitions: Definitions | None) -> None:
        self._definitions = definitions
        self._left = MAX_PIECES

    def write(self, expression: Expression, depth: int) -> list[Text | Value]:
        """The pieces of an expression's value as text."""
        self._left -= 1
        if isinstance(expression, str):
            self._left -= len(expression) >> 8
            return [Text(expression)]
        if isinstance(expression, list):
            return self._write_json(expression)
        if not isinstance(expression, dict):
            return [Text(compact_json(expression))]
        if self._left < 0:
            return [Value(expression)]
        ((name, argument),) = expression.items()
        if name == "var":
            return self._write_variable(argument, depth)
        if name == "concat" and kind_of(expression, self._definitions) != "list":
            return [piece for operand in argument for piece in self.write(operand, depth + 1)]
        if name == "join":
            return self._write_join(expression, depth)
        if name == "json":
            return self._write_json(argument[0] if isinstance(argument, list) else argument)
        return self._write_json(expression) if name == "object" else [_fold(expression)]

    def _write_variable(self, variable: str, depth: int) -> list[Text | Value]:
        definitions = self._definitions
        # Only text can be taken apart: of anything else the JSON is written, and that is
        # made of the value.
        is_text = definitions is not None and definitions.known_kind(variable) == "text"
        if definitions is None or not is_text or depth >= MAX_DEPTH:
            return [Value({"var": variable})]
        return self.write(definitions.get(variable), depth + 1)

    def _write_join(self, expression: Expression, depth: int) -> list[Text | Value]:
        items, separator = expression["join"]
        elements = _elements(items)
        if elements is None or kind_of(separator, self._definitions) != "text":
            return [_fold(expression)]
        pieces: list[Text | Value] = []
        for index, element in enumerate(elements):
            if index:
                pieces += self.write(separator, depth + 1)
            pieces += self.write(element, depth + 1)
        return pieces

    def _write_json(self, expression: Expression) -> list[Text | Value]:
        """The pieces of the JSON of an expression's value."""
        self._left -= 1
        entries: Iterable[tuple[str, Expression]]
        if isinstance(expression, list):
            entries, opening, closing = (("", item) for item in expression), "[", "]"
        elif not isinstance(expression, dict):
            return [Text(compact_json(expression))]
        elif "object" in expression:
            inside = expression["object"].items()
            entries, opening, closing = ((f"{compact_json(k)}:", v) for k, v in inside), "{", "}"
        else:
            return [_fold({"json": [expression]})]
        if self._left < 0:
            return [Value({"json": [expression]})]
        pieces: list[Text | Value] = [Text(opening)]
        for index, (key, item) in enumerate(entries):
            pieces.append(Text(f",{key}" if index else key))
            pieces += self._write_json(item)
        pieces.append(Text(closing))
        return pieces


def _fold(expression: Expression) -> Text | Value:
    """Text, if the expression needs no variable and has a value; else the expression."""
    if not variables(expression):
        try:
            return Text(text_of(evaluate(expression, {})))
        except ExpressionError:
            pass  # it fails again where its value is needed, and says so there
    return Value(expression)


def _merge(pieces: list[Text | Value]) -> list[Text | Value]:
    """Neighbouring texts as one, empty texts as none."""
    merged: list[Text | Value] = []
    for is_text, run in groupby(pieces, key=lambda piece: isinstance(piece, Text)):
        if not is_text:
            merged += run
        elif text := "".join(piece.text for piece in run if isinstance(piece, Text)):
            merged.append(Text(text))
    return merged
