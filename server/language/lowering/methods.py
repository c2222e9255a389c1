"""Functions and methods of values: pure operations that become one JSON expression each.

Methods are looked up by name in a table. A name that is not in it is an error, whatever the value
is: no attribute of a Python object is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ...program.content import Expression
from ...program.suggestion import suggestion
from ..errors import Place, SourceArgumentError, SourceNameError
from ..options import Kind
from .values import Value, as_text, element, text_of


class PureFunction(NamedTuple):
    """A function of values: the bounds of its arguments, and its expression."""

    least: int
    most: int
    build: Callable[[Sequence[Value]], Value]
    example: str
    """A call of it, for messages."""


def _operator(
    name: str, kind: Kind, *, is_text: bool = False
) -> Callable[[Sequence[Value]], Value]:
    """Return a builder of one operator whose operands are the arguments."""

    def build(arguments: Sequence[Value]) -> Value:
        values = [text_of(each) for each in arguments] if is_text else arguments
        operands = [each.expression for each in values]
        return Value({name: operands}, kind)

    return build


def _message(role: str) -> Callable[[Sequence[Value]], Value]:
    def build(arguments: Sequence[Value]) -> Value:
        fields: dict[str, Expression] = {"role": role, "content": as_text(arguments[0])}
        return Value({"object": fields}, "object")

    return build


def _str(arguments: Sequence[Value]) -> Value:
    return Value(as_text(arguments[0]), "text")


def _bool(arguments: Sequence[Value]) -> Value:
    return Value({"not": [{"not": [arguments[0].expression]}]}, "bool")


def _join(arguments: Sequence[Value]) -> Value:
    items, *separator = arguments
    return Value({"join": [items.expression, separator[0].expression if separator else ""]}, "text")


def _joined_by(arguments: Sequence[Value]) -> Value:
    separator, items = arguments
    return Value({"join": [items.expression, separator.expression]}, "text")


def _split(arguments: Sequence[Value]) -> Value:
    operands = [text_of(each).expression for each in arguments]
    return Value({"split": operands}, "list")


def _first(arguments: Sequence[Value]) -> Value:
    return Value({"first": [each.expression for each in arguments]})


def _get(arguments: Sequence[Value]) -> Value:
    base, key, *default = arguments
    if key.expression in ("content", "context") and base.kind == "message":
        return text_of(base)
    found = element(base, key.expression).expression
    return Value({"first": [found, default[0].expression]} if default else found)


def _length(arguments: Sequence[Value]) -> Value:
    return Value({"len": [text_of(arguments[0]).expression]}, "number")


FUNCTIONS: Final[dict[str, PureFunction]] = {
    "len": PureFunction(1, 1, _length, "len(items)"),
    "str": PureFunction(1, 1, _str, "str(value)"),
    "int": PureFunction(1, 1, _operator("to_int", "number", is_text=True), "int(text)"),
    "float": PureFunction(1, 1, _operator("to_float", "number", is_text=True), "float(text)"),
    "bool": PureFunction(1, 1, _bool, "bool(value)"),
    "min": PureFunction(1, 1, _operator("min", "any"), "min([a, b])"),
    "max": PureFunction(1, 1, _operator("max", "any"), "max([a, b])"),
    "sum": PureFunction(1, 1, _operator("sum", "number"), "sum([a, b])"),
    "sorted": PureFunction(1, 1, _operator("sort", "list"), "sorted([a, b])"),
    "range": PureFunction(1, 3, _operator("range", "list"), "range(3)"),
    "join": PureFunction(1, 2, _join, "join(items, ', ')"),
    "first": PureFunction(1, 32, _first, "first(a, b)"),
    "parse_json": PureFunction(
        1, 1, _operator("parse_json", "any", is_text=True), "parse_json(text)"
    ),
    "to_json": PureFunction(1, 1, _operator("json", "text"), "to_json(value)"),
    "find": PureFunction(2, 2, _operator("find", "any", is_text=True), "find(text, '[a-z]+')"),
    "find_all": PureFunction(
        2, 2, _operator("find_all", "list", is_text=True), "find_all(text, '[a-z]+')"
    ),
    "user": PureFunction(1, 1, _message("user"), "user(text)"),
    "system": PureFunction(1, 1, _message("system"), "system(text)"),
    "assistant": PureFunction(1, 1, _message("assistant"), "assistant(text)"),
}
"""Functions of values, by name."""

METHODS: Final[dict[str, PureFunction]] = {
    "contains": PureFunction(1, 1, _operator("contains", "bool"), "text.contains('a')"),
    "startswith": PureFunction(
        1, 1, _operator("startswith", "bool", is_text=True), "text.startswith('a')"
    ),
    "endswith": PureFunction(
        1, 1, _operator("endswith", "bool", is_text=True), "text.endswith('a')"
    ),
    "lower": PureFunction(0, 0, _operator("lower", "text", is_text=True), "text.lower()"),
    "upper": PureFunction(0, 0, _operator("upper", "text", is_text=True), "text.upper()"),
    "strip": PureFunction(0, 0, _operator("strip", "text", is_text=True), "text.strip()"),
    "split": PureFunction(1, 1, _split, "text.split(' ')"),
    "replace": PureFunction(
        2, 2, _operator("replace", "text", is_text=True), "text.replace('a', 'b')"
    ),
    "join": PureFunction(1, 1, _joined_by, "', '.join(items)"),
    "get": PureFunction(1, 2, _get, "value.get('key')"),
}
"""Methods of values, by name; the arguments do not count the value itself."""

_ELSEWHERE: Final = {
    "append": "`append` is a statement: write `items.append(element)` on a separate line",
    "kill": "`kill` is a statement: write `name.kill()` on a separate line",
    "format": "`format` is not supported: write an f-string, as f'{name}'",
}


def call_function(name: str, arguments: Sequence[Value], place: Place) -> Value:
    """Return the value of a function of values.

    Raises:
        SourceArgumentError: `language.argument` for a wrong number of arguments.
    """
    function = FUNCTIONS[name]
    _check_count(name, function, len(arguments), place)
    return function.build(arguments)


def call_method(name: str, value: Value, arguments: Sequence[Value], place: Place) -> Value:
    """Return the value of a method.

    Raises:
        SourceNameError: `language.unknown_function`.
        SourceArgumentError: `language.argument` for a wrong number of arguments.
    """
    method = METHODS.get(name)
    if method is None:
        hint = suggestion(name, METHODS, f"the methods are {_listed(METHODS)}")
        message = _ELSEWHERE.get(name, f"unknown method `{name}`: {hint}")
        raise SourceNameError("language.unknown_function", message, place)
    _check_count(name, method, len(arguments), place)
    receiver = text_of(value) if name == "contains" else value
    return method.build([receiver, *map(text_of, arguments)])


def _check_count(name: str, function: PureFunction, count: int, place: Place) -> None:
    if function.least <= count <= function.most:
        return
    expected = str(function.least)
    if function.most != function.least:
        expected = f"{function.least} to {function.most}"
    noun = "argument" if expected == "1" else "arguments"
    message = f"`{name}` takes {expected} {noun}, got {count}: write `{function.example}`"
    raise SourceArgumentError("language.argument", message, place)


def _listed(names: dict[str, PureFunction]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
