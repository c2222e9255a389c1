"""Lowering of expressions: Python's operators to the operators of `program.expressions`.

An expression with calls is lowered to nodes, and its value is read from their variables. The others
become one JSON expression.

Invariant: lowering an expression evaluates nothing but constants.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

from ...program.content import Expression, Json
from ..errors import SourceArgumentError, UnsupportedSourceError, position_of
from ..options import Kind
from . import calls
from .comprehensions import ComprehensionLowerer
from .emitter import Emitter
from .interfaces import Inliner, Signatures
from .scope import NameScope
from .values import (
    NULL,
    NotConstantError,
    Value,
    as_text,
    common_kind,
    element,
    repeats_base,
    text_of,
)

_NUMERIC: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Sub: ("sub", "-"),
    ast.Mult: ("mul", "*"),
    ast.Div: ("div", "/"),
    ast.FloorDiv: ("idiv", "//"),
    ast.Mod: ("mod", "%"),
}
_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Expression, Expression], Expression]]] = {
    ast.Eq: lambda a, b: {"eq": [a, b]},
    ast.NotEq: lambda a, b: {"ne": [a, b]},
    ast.Lt: lambda a, b: {"lt": [a, b]},
    ast.Gt: lambda a, b: {"gt": [a, b]},
    ast.LtE: lambda a, b: {"not": [{"gt": [a, b]}]},
    ast.GtE: lambda a, b: {"not": [{"lt": [a, b]}]},
    ast.In: lambda a, b: {"contains": [b, a]},
    ast.NotIn: lambda a, b: {"not": [{"contains": [b, a]}]},
    ast.Is: lambda a, b: {"eq": [a, b]},
    ast.IsNot: lambda a, b: {"ne": [a, b]},
}


_IDENTITY: Final[frozenset[type[ast.cmpop]]] = frozenset({ast.Is, ast.IsNot})

_LowerKind: TypeAlias = Callable[[Any, NameScope, str | None], Value]
"""Lowers expressions of one kind."""


class ExpressionLowerer:
    """Lowers the expressions of one text."""

    def __init__(self, emitter: Emitter, signatures: Signatures | None, inliner: Inliner) -> None:
        self.emitter = emitter
        self.signatures = signatures
        self.is_pure = 0
        """Positive inside of an `each`, where no node can be made."""
        self.inline = inliner
        lists = ComprehensionLowerer(self)
        self._lowerers: dict[type[ast.expr], _LowerKind] = {
            ast.Call: partial(calls.lower_call, self),
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.List: self._list,
            ast.Tuple: self._list,
            ast.Dict: self._dict,
            ast.JoinedStr: self._f_string,
            ast.Subscript: self._subscript,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._logical,
            ast.Compare: self._compare,
            ast.IfExp: lists.conditional,
            ast.ListComp: lists.comprehension,
        }

    def lower(self, node: ast.expr, scope: NameScope, hint: str | None = None) -> Value:
        """Return the value of an expression.

        Args:
            node: the expression.
            scope: the names it can read.
            hint: the variable that `NameScope.version` made for the value, or None to make one if
                needed.

        Raises:
            LanguageError: if the expression is not valid.
        """
        self.emitter.count_work()
        lowerer = self._lowerers.get(type(node))
        if lowerer is None:
            _refuse(node)
        return lowerer(node, scope, hint)

    def constant(self, node: ast.expr, scope: NameScope, what: str) -> Json:
        """Return the value of an expression that must be known when the text is compiled.

        Raises:
            SourceArgumentError: `language.constant`.
        """
        if type(node) is ast.Constant:
            return self.lower(node, scope).expression
        try:
            value = self.lower(node, scope).constant()
        except NotConstantError:
            raise SourceArgumentError(
                "language.constant",
                f"{what} must be known before the program runs: write it as a literal",
                position_of(node),
            ) from None
        self.emitter.count_texts(value)
        return value

    # --- literals -------------------------------------------------------------------------

    def _constant(self, node: ast.Constant, scope: NameScope, hint: str | None) -> Value:
        value = node.value
        if isinstance(value, str):
            self.emitter.count_text(len(value))
            return Value(value, "text")
        if value is None:
            return NULL
        return Value(value, "bool" if isinstance(value, bool) else "number")

    def _name(self, node: ast.Name, scope: NameScope, hint: str | None) -> Value:
        return scope.read(node)

    def _list(self, node: ast.List | ast.Tuple, scope: NameScope, hint: str | None) -> Value:
        return Value([self.lower(item, scope).expression for item in node.elts], "list")

    def _dict(self, node: ast.Dict, scope: NameScope, hint: str | None) -> Value:
        return self.lower_dict(node, scope, self.emitter.unique)

    def lower_dict(
        self, node: ast.Dict, scope: NameScope, variable_of: Callable[[str], str]
    ) -> Value:
        """Return the value of a dict.

        Args:
            node: the dict.
            scope: the names it can read.
            variable_of: returns the variable for a key whose value is a call.
        """
        fields: dict[str, Expression] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                where = node if key is None else key
                message = "keys of a dict must be strings, as in {'name': value}"
                raise SourceArgumentError("language.type", message, position_of(where))
            variable = None
            if isinstance(item, ast.Call) and calls.makes_variable(self, item, scope):
                variable = variable_of(key.value)
            self.emitter.count_text(len(key.value))
            fields[key.value] = self.lower(item, scope, variable).expression
        if "role" in fields and "context" in fields and "content" not in fields:
            # In the essay that the language comes from, `context` is the text of a message.
            fields["content"] = fields.pop("context")
        return Value({"object": fields}, "object")

    def _f_string(self, node: ast.JoinedStr, scope: NameScope, hint: str | None) -> Value:
        pieces = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            value = text_of(self.lower(inner, scope))
            pieces.append(value)
        if all(piece.kind == "text" for piece in pieces):
            expressions = [piece.expression for piece in pieces]
            return Value({"concat": expressions} if expressions else "", "text")
        return Value({"join": [[piece.expression for piece in pieces], ""]}, "text")

    # --- operators ------------------------------------------------------------------------

    def _binary(self, node: ast.BinOp, scope: NameScope, hint: str | None) -> Value:
        if isinstance(node.op, ast.Add):
            return self._sum(node, scope)
        name, symbol = _NUMERIC[type(node.op)]
        left, right = self.lower(node.left, scope), self.lower(node.right, scope)
        for value, operand in ((left, node.left), (right, node.right)):
            if value.kind not in ("number", "any"):
                raise SourceArgumentError(
                    "language.type",
                    f"`{symbol}` needs numbers, got {value.kind}",
                    position_of(operand),
                )
        return Value({name: [left.expression, right.expression]}, "number")

    def _sum(self, node: ast.BinOp, scope: NameScope) -> Value:
        """Lower a chain of `+`, from left to right."""
        operands: list[ast.expr] = [node.right]
        first = node.left
        while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
            operands.append(first.right)
            first = first.left
        total = self.lower(first, scope)
        for operand in reversed(operands):
            total = self._add(total, self.lower(operand, scope), operand)
        return total

    def _add(self, left: Value, right: Value, node: ast.expr) -> Value:
        left, right = self._addend(left, right), self._addend(right, left)
        kinds = {left.kind, right.kind} - {"any"}
        if len(kinds) > 1 or kinds & {"bool", "null", "object"}:
            hint = ""
            if "text" in kinds:
                hint = ": write an f-string, as f'{number}'"
            elif "list" in kinds:
                hint = ": put the element into a list, as `items + [element]`"
            raise SourceArgumentError(
                "language.type", f"cannot add {left.kind} and {right.kind}{hint}", position_of(node)
            )
        if not kinds:
            return Value({"add": [left.expression, right.expression]})
        kind = left.kind if right.kind == "any" else right.kind
        if kind == "number":
            return Value({"add": [left.expression, right.expression]}, "number")
        operands = [*_operands_of(left), *_operands_of(right)]
        return Value({"concat": operands}, kind)

    def _addend(self, value: Value, other: Value) -> Value:
        """Return an operand of `+`: a message becomes its text, except beside a list."""
        if value.kind == "stream" or (value.kind == "message" and other.kind != "list"):
            return text_of(value)
        return Value(value.expression, "object") if value.kind == "message" else value

    def _unary(self, node: ast.UnaryOp, scope: NameScope, hint: str | None) -> Value:
        value = self.lower(node.operand, scope)
        if isinstance(node.op, ast.Not):
            return Value({"not": [value.expression]}, "bool")
        expression = value.expression
        is_number = isinstance(expression, int | float) and not isinstance(expression, bool)
        if value.kind not in ("number", "any"):
            sign = "+" if isinstance(node.op, ast.UAdd) else "-"
            message = f"`{sign}` needs a number, got {value.kind}"
            raise SourceArgumentError("language.type", message, position_of(node.operand))
        if isinstance(node.op, ast.UAdd):
            return value
        if is_number:
            return Value(-expression, "number")
        return Value({"sub": [0, expression]}, "number")

    def _logical(self, node: ast.BoolOp, scope: NameScope, hint: str | None) -> Value:
        name = "and" if isinstance(node.op, ast.And) else "or"
        operands = [self.lower(operand, scope) for operand in node.values]
        kind = common_kind([operand.kind for operand in operands])
        return Value({name: [operand.expression for operand in operands]}, kind)

    def _compare(self, node: ast.Compare, scope: NameScope, hint: str | None) -> Value:
        values = [text_of(self.lower(each, scope)) for each in (node.left, *node.comparators)]
        for value in values[1:-1]:
            self.emitter.count_repetition(value.expression)
        tests = []
        for operator, left, right in zip(node.ops, values, values[1:], strict=False):
            if type(operator) in _IDENTITY and NULL not in (left, right):
                message = "`is` compares with None only: write `==`"
                raise UnsupportedSourceError(message, position_of(node))
            tests.append(_COMPARISONS[type(operator)](left.expression, right.expression))
        return Value(tests[0] if len(tests) == 1 else {"and": tests}, "bool")

    # --- access ---------------------------------------------------------------------------

    def _subscript(self, node: ast.Subscript, scope: NameScope, hint: str | None) -> Value:
        if calls.is_answer_text(node, scope):
            return calls.lower_answer_text(self, node, scope, hint)
        value = self.lower(node.value, scope)
        if isinstance(node.slice, ast.Slice):
            return self._slice(value, node.slice, scope)
        key = self.lower(node.slice, scope)
        if key.expression in ("context", "content") and value.kind in ("message", "text", "stream"):
            return text_of(value)
        index: Any = key.expression
        if value.kind in ("text", "stream"):
            if isinstance(index, int) and not isinstance(index, bool):
                part = {"slice": [value.expression, index, index + 1 or None]}
                return Value(part, "text")
            message = "the index of a text must be a literal number: write text[0], or text[a:b]"
            raise SourceArgumentError("language.type", message, position_of(node.slice))
        if repeats_base(index):
            self.emitter.count_repetition(value.expression)
        return element(value, index)

    def _slice(self, value: Value, node: ast.Slice, scope: NameScope) -> Value:
        if node.step is not None:
            raise UnsupportedSourceError("a step in `[a:b:c]` is not supported", position_of(node))
        value = text_of(value)
        bounds = [
            None if bound is None else self.lower(bound, scope).expression
            for bound in (node.lower, node.upper)
        ]
        kind: Kind = value.kind if value.kind in ("text", "list") else "any"
        return Value({"slice": [value.expression, *bounds]}, kind)

    def text(self, node: ast.expr, scope: NameScope) -> Expression:
        """Return an expression for the text of a value."""
        return as_text(self.lower(node, scope))


def _refuse(node: ast.expr) -> NoReturn:
    """Refuse an expression that has no value."""
    message = f"`{type(node).__name__}` cannot be used as a value"
    if isinstance(node, ast.Attribute):
        message = f"attributes are not supported: write ['{node.attr}'] after the value"
    raise UnsupportedSourceError(message, node)


def _operands_of(value: Value) -> list[Expression]:
    """Return the operands of a concatenation, or the expression itself as the only one."""
    expression = value.expression
    if isinstance(expression, dict) and "concat" in expression:
        return list(expression["concat"])
    return [expression]
