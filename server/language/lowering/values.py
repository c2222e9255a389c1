"""The static description of a value: its expression and its kind."""

from __future__ import annotations

from msgspec import Struct

from ...program.content import Expression, Json
from ...program.errors import ExpressionError
from ...program.expressions.evaluate import evaluate, variables
from ..options import Kind

MAX_INLINE_TEXT = 64
"""Longer constants become variables, so that copies do not enlarge the program."""


class NotConstantError(Exception):
    """A value depends on the run of the program."""


class Value(Struct, frozen=True):
    """A value of the language. Thousands are made for a text, hence no named tuple."""

    expression: Expression
    kind: Kind = "any"
    definition: Expression = None
    """The constant expression that was assigned to the variable; None for any other value."""
    is_answer: bool = False
    """The JSON that `llm_chat` gave for `schema` or `type`. Its text is the value itself."""

    @property
    def variable(self) -> str | None:
        """The variable that holds the value, None for any other expression."""
        expression = self.expression
        if isinstance(expression, dict) and "var" in expression:
            name: str = expression["var"]
            return name
        return None

    @property
    def fields(self) -> dict[str, Expression] | None:
        """The fields of a dict that the text writes out; None for any other expression."""
        expression = self.expression
        fields = expression.get("object") if isinstance(expression, dict) else None
        return fields if isinstance(fields, dict) else None

    @property
    def reference(self) -> Expression:
        """The value for a field in which a bare string names a variable, as `cond` of an `if`."""
        expression = self.expression
        return {"lit": expression} if isinstance(expression, str) else self.variable or expression

    @property
    def is_inline(self) -> bool:
        """Whether the expression may be repeated wherever the value is read."""
        expression = self.expression
        if isinstance(expression, dict):
            return "var" in expression
        if isinstance(expression, str):
            return len(expression) <= MAX_INLINE_TEXT
        return not isinstance(expression, list)

    @property
    def is_constant(self) -> bool:
        """Whether the value is known before the program runs."""
        expression = self.expression if self.definition is None else self.definition
        return not variables(expression)

    def constant(self) -> Json:
        """Return the value of an expression without variables.

        Raises:
            NotConstantError: if it has variables, or fails.
        """
        if not self.is_constant:
            raise NotConstantError
        try:
            return evaluate(self.expression if self.definition is None else self.definition, {})
        except ExpressionError as error:
            raise NotConstantError from error


NULL = Value(None, "null")


def var(name: str, kind: Kind = "any") -> Value:
    """Return the value of a variable."""
    return Value({"var": name}, kind)


def text_of(value: Value) -> Value:
    """Return the text of a message, or the value itself."""
    if value.kind == "message":
        return Value({"get": [value.expression, "content"]}, "text")
    return Value(value.expression, "text") if value.kind == "stream" else value


def element(value: Value, key: Expression) -> Value:
    """Return the element of a list or dict.

    If `llm_chat` gave JSON, its `content` is that JSON; for any other answer it is the text.
    A message has `content` where the text wrote `context`. So `context` of a value that may be a
    message, as an element of a list, is its `content` unless it has its own `context`.
    """
    if value.is_answer and key in ("content", "context"):
        return value
    found: Expression = {"get": [value.expression, key]}
    if repeats_base(key):
        found = {"first": [found, {"get": [value.expression, "content"]}]}
    return Value(found)


def repeats_base(key: Expression) -> bool:
    """Whether `element` repeats the expression of the list or dict for this key."""
    return isinstance(key, str) and key == "context"


def as_text(value: Value) -> Expression:
    """Return an expression that converts a value to text, as prompts do."""
    value = text_of(value)
    if value.kind == "text":
        return value.expression
    return {"join": [[value.expression], ""]}


def common_kind(kinds: list[Kind]) -> Kind:
    """Return the kind of a value that has one of several kinds."""
    unlike_text: list[Kind] = ["text" if kind == "stream" else kind for kind in kinds]
    return unlike_text[0] if len(set(unlike_text)) == 1 else "any"
