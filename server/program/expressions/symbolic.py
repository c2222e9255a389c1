"""Symbolic text: expressions expanded into known text and expressions without a value yet.

Out of scope: segments, messages and hashes; `prompt_prefix` builds on this.

Invariants: `expand` gives the same pieces for the same expression and definitions. Its work is
bounded, however often definitions use each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from ..content import Expression
from ..errors import ExpressionError
from .budget import WorkBudget
from .evaluate import evaluate, variables
from .values import compact_json, text_of

MAX_PIECES = 10_000
"""Pieces of one expanded expression, where 256 characters of text count as one. The rest stays
an expression."""
FIRST_STEPS, STEPS_PER_NODE = 50_000, 2_000
"""Steps that all expansions of a graph may take: at first, and for each node that is added."""
FOLDING_FUEL = 200
"""Operations of a constant expression that is replaced by its text."""
MAX_DEPTH = 64
"""The nesting of expressions below which definitions are not expanded."""

Kind: TypeAlias = Literal["text", "list"]
_TEXT_OPERATORS = frozenset({"join", "strip", "lower", "pyrepr", "json"})
_LIST_OPERATORS = frozenset({"each", "split", "range"})
_EXPANDED = frozenset({"concat", "join", "json", "object"})
"""Operators that are expanded, in addition to variables with a definition."""


class LiteralText(NamedTuple):
    """Literal text of the program. `special`: its control tokens are encoded as such."""

    text: str
    special: bool = False


class VariableText(NamedTuple):
    """The value of an expression: a string unchanged, any other value as compact JSON."""

    expression: Expression


class VariableDefinitions:
    """The expressions by which `expr` nodes define variables.

    Once the steps of a graph are used up, expressions are no longer expanded. Calls may share
    fewer prefixes then.
    """

    def __init__(self) -> None:
        self.budget = WorkBudget(FIRST_STEPS)
        self._expressions: dict[str, Expression] = {}
        self._kinds: dict[str, Kind | None] = {}

    def add(self, variable: str, expression: Expression) -> None:
        """Add the definition of a variable; definitions must not form a cycle."""
        self._expressions[variable] = expression
        # Kinds that were unknown because of this variable may be known now.
        self._kinds.clear()

    def get(self, variable: str) -> Expression | None:
        """Return the definition of a variable, None if no `expr` node writes it."""
        return self._expressions.get(variable)

    def get_kind(self, variable: str) -> Kind | None:
        """Return whether a variable's value, if it has one, is always text or always a list."""
        stack = [variable]
        # Depth first with an explicit stack: chains of definitions can be thousands long.
        while stack:
            self.budget.left -= 1
            if self.budget.left < 0:
                return None
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
        """Return the kind if `get_kind` has computed it already."""
        return self._kinds.get(variable)


def kind_of(expression: Expression, definitions: VariableDefinitions | None) -> Kind | None:
    """Return what the value of an expression, if it has one, always is. None: unknown."""
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
        # One operand decides: the concatenation of lists and other values fails.
        operands = {kind_of(operand, definitions) for operand in argument}
        if "list" in operands:
            return "list"
        return "text" if "text" in operands else None
    return None


def _literal_kind(value: Expression) -> Kind | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else None


def list_items(
    expression: Expression, definitions: VariableDefinitions | None
) -> list[Expression] | None:
    """Split a list one level: the elements of an array, or the operands of a concatenation.

    A part is an element or a list of elements, as in a splice. None: the expression cannot be
    split.
    """
    if isinstance(expression, dict):
        ((name, argument),) = expression.items()
        if name == "var" and definitions is not None and definitions.get_kind(argument) == "list":
            return [definitions.get(argument)]
        if name == "concat" and kind_of(expression, definitions) == "list":
            return list(argument)
    elements = _elements(expression)
    # A list in a list is not an element that a splice accepts: it fails when it is evaluated.
    if elements is None or any(kind_of(item, definitions) == "list" for item in elements):
        return None
    return elements


def _elements(expression: Expression) -> list[Expression] | None:
    """Return all elements of a literal list, None unless each of them is known."""
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
        inner = _elements(operand)
        if inner is None:
            return None
        elements += inner
    return elements


def expand(
    expression: Expression, definitions: VariableDefinitions | None = None
) -> tuple[LiteralText | VariableText, ...]:
    """Return the pieces whose joined texts are the text of the expression's value."""
    names = variables(expression)
    if names and isinstance(expression, dict):
        ((operator, argument),) = expression.items()
        if operator == "var":
            is_known = definitions is not None and definitions.get(argument) is not None
        else:
            is_known = operator in _EXPANDED
        if not is_known:
            return (VariableText(expression),)
    if definitions is not None:
        for name in names:
            definitions.get_kind(name)
    return tuple(_merge(_Expansion(definitions).write(expression, 0)))


class _Expansion:
    """The expansion of one expression into pieces."""

    def __init__(self, definitions: VariableDefinitions | None) -> None:
        self._definitions = definitions
        self._graph = WorkBudget() if definitions is None else definitions.budget
        self._budget = min(MAX_PIECES, self._graph.left)

    def _spend(self, steps: int) -> None:
        self._budget -= steps
        self._graph.left -= steps

    def write(self, expression: Expression, depth: int) -> list[LiteralText | VariableText]:
        """Return the pieces of the text of an expression's value."""
        self._spend(1)
        if isinstance(expression, str):
            self._spend(len(expression) >> 8)
            return [LiteralText(expression)]
        if isinstance(expression, list):
            return self._write_json(expression)
        if not isinstance(expression, dict):
            return [LiteralText(compact_json(expression))]
        if self._budget < 0:
            return [VariableText(expression)]
        ((name, argument),) = expression.items()
        if name == "var":
            return self._write_variable(argument, depth)
        if name == "concat" and kind_of(expression, self._definitions) != "list":
            return [piece for operand in argument for piece in self.write(operand, depth + 1)]
        if name == "join":
            return self._write_join(expression, depth)
        if name == "json":
            return self._write_json(argument[0] if isinstance(argument, list) else argument)
        return self._write_json(expression) if name == "object" else [self._fold(expression)]

    def _write_variable(self, variable: str, depth: int) -> list[LiteralText | VariableText]:
        definitions = self._definitions
        # Only text can be expanded: the JSON of any other value is computed from the value.
        is_text = definitions is not None and definitions.known_kind(variable) == "text"
        if definitions is None or not is_text or depth >= MAX_DEPTH:
            return [VariableText({"var": variable})]
        return self.write(definitions.get(variable), depth + 1)

    def _write_join(self, expression: Expression, depth: int) -> list[LiteralText | VariableText]:
        items, separator = expression["join"]
        elements = _elements(items)
        if elements is None or kind_of(separator, self._definitions) != "text":
            return [self._fold(expression)]
        pieces: list[LiteralText | VariableText] = []
        for index, element in enumerate(elements):
            if index:
                pieces += self.write(separator, depth + 1)
            pieces += self.write(element, depth + 1)
        return pieces

    def _write_json(self, expression: Expression) -> list[LiteralText | VariableText]:
        """Return the pieces of the JSON of an expression's value."""
        self._spend(1)
        entries: Iterable[tuple[str, Expression]]
        if isinstance(expression, list):
            entries, opening, closing = (("", item) for item in expression), "[", "]"
        elif not isinstance(expression, dict):
            return [LiteralText(compact_json(expression))]
        elif "object" in expression:
            fields = expression["object"].items()
            entries, opening, closing = ((f"{compact_json(k)}:", v) for k, v in fields), "{", "}"
        else:
            return [self._fold({"json": [expression]})]
        if self._budget < 0:
            return [VariableText({"json": [expression]})]
        pieces: list[LiteralText | VariableText] = [LiteralText(opening)]
        for index, (key, item) in enumerate(entries):
            pieces.append(LiteralText(f",{key}" if index else key))
            pieces += self._write_json(item)
        pieces.append(LiteralText(closing))
        return pieces

    def _fold(self, expression: Expression) -> LiteralText | VariableText:
        """Return text if the expression reads no variable and is cheap, else the expression."""
        if not variables(expression):
            try:
                value = evaluate(expression, {}, fuel=FOLDING_FUEL, budget=self._graph)
                return LiteralText(text_of(value))
            except ExpressionError:
                pass  # it fails again, with an error, where its value is needed
        return VariableText(expression)


def _merge(pieces: list[LiteralText | VariableText]) -> list[LiteralText | VariableText]:
    """Join adjacent texts and drop empty ones."""
    merged: list[LiteralText | VariableText] = []
    for is_text, run in groupby(pieces, key=lambda piece: isinstance(piece, LiteralText)):
        if not is_text:
            merged += run
        elif text := "".join(piece.text for piece in run if isinstance(piece, LiteralText)):
            merged.append(LiteralText(text))
    return merged
