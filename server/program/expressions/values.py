"""JSON values of programs: text in a prompt, truth, equality, type and size.

Out of scope: variables and expressions.

Invariants: `text_of` is the only conversion of a value to prompt text. No function recurses deeper
than a value may be nested, and none copies a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ..content import Json
from ..errors import ExpressionError

MAX_VALUE_SIZE = 16 * 1024 * 1024
"""Characters and elements of one value as a tree: shared parts count once per occurrence."""
MAX_VALUE_DEPTH = 64


def text_of(value: Json) -> str:
    """Return a value as prompt text: a string unchanged, any other value as compact JSON.

    Raises:
        ExpressionError: `expr.json` if it is not a JSON value.
    """
    return value if isinstance(value, str) else compact_json(value)


def compact_json(value: Json) -> str:
    """Return JSON without spaces, keys in their order, non-ASCII characters not escaped.

    Raises:
        ExpressionError: `expr.json` if it is not a JSON value.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise ExpressionError(
            "expr.json", f"the value cannot be written as JSON: {error}"
        ) from None


def is_true(value: Json) -> bool:
    """Return False for false, null, 0 and empty values, True for all others."""
    return bool(value)


def kind_of(value: Json) -> str:
    """Return the name of a value's JSON type, for messages."""
    if value is None:
        return "null"
    for kind, python in _KINDS:
        if isinstance(value, python):
            return kind
    return type(value).__name__


_KINDS: tuple[tuple[str, type], ...] = (
    ("bool", bool),
    ("int", int),
    ("float", float),
    ("string", str),
    ("list", list),
    ("object", dict),
)


def has_type(value: Json, name: str | None) -> bool:
    """Return whether a value has a declared variable's `type`; an int is also a float."""
    if name is None or name == "any":
        return True
    kind = kind_of(value)
    return kind == name or (name == "float" and kind == "int")


def equal(left: Json, right: Json, spend: Callable[[int], None]) -> bool:
    """Return whether values are equal as JSON: true is not 1, 1 is 1.0, keys have no order.

    `spend` is called with the cost of each comparison, and may raise to stop.
    """
    spend(1)
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, str) and isinstance(right, str):
        spend(min(len(left), len(right)) >> 8)
        return left == right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(
            equal(a, b, spend) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            equal(value, right[key], spend) for key, value in left.items()
        )
    return left is None and right is None


def check_size(value: Json, visit: Callable[[int], None] | None = None) -> int:
    """Return the size of a value as a tree.

    `visit` is called with the number of elements of each level before they are looked at, and may
    raise to stop.

    Raises:
        ExpressionError: `expr.size` if it is larger than MAX_VALUE_SIZE or nested deeper
            than MAX_VALUE_DEPTH; `expr.number` if a number in it is not finite.
    """
    size = 0
    depth = 0
    level = [value]
    # Level by level: the depth is the number of levels. Shared parts are visited once per
    # occurrence, which is what encoding the value costs.
    while level:
        below: list[Json] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, list | dict):
                if depth == MAX_VALUE_DEPTH:
                    raise ExpressionError(
                        "expr.size",
                        f"a value can be nested at most {MAX_VALUE_DEPTH} levels deep",
                    )
                size += len(item)
                if isinstance(item, dict):
                    size += sum(map(len, item))
                    below.extend(item.values())
                else:
                    below.extend(item)
            else:
                check_number(item)
            if size > MAX_VALUE_SIZE:
                raise ExpressionError(
                    "expr.size",
                    f"a value can have at most {MAX_VALUE_SIZE:,} characters and elements",
                )
        level = below
        depth += 1
        if visit is not None and below:
            visit(len(below))
    return size


def check_number(value: Json) -> Json:
    """Return the value, unless it is a number that JSON or 64 bits cannot represent.

    Raises:
        ExpressionError: `expr.number` otherwise.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ExpressionError(
            "expr.number", f"an integer of {value.bit_length()} bits is too large (64 bits)"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ExpressionError("expr.number", f"{value} is not a JSON number")
    return value
