"""What a JSON value is to a program: its text in a prompt, its truth, its equality, its size.

Knows JSON values alone. Refuses to know variables and expressions.

Kept true: `text_of` is the one way a value becomes prompt text, on every path; no function
here recurses deeper than a value may be nested, and none copies a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from .errors import ExpressionError
from .ir import Json

MAX_VALUE_SIZE = 4 * 1024 * 1024
"""Characters and elements of one value as a tree: what stands in it twice counts twice."""
MAX_VALUE_DEPTH = 64


def text_of(value: Json) -> str:
    """A value as it stands in a prompt: a string as it is, anything else as compact JSON.

    Raises:
        ExpressionError: `expr.json` if the value is no JSON value.
    """
    return value if isinstance(value, str) else compact_json(value)


def compact_json(value: Json) -> str:
    """JSON without spaces, keys in the order they have, characters beyond ASCII as they are.

    Raises:
        ExpressionError: `expr.json` if the value is no JSON value.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise ExpressionError(
            "expr.json", f"the value cannot be written as JSON: {error}"
        ) from None


def is_true(value: Json) -> bool:
    """False for false, null, 0, and what is empty; true for everything else."""
    return bool(value)


def kind_of(value: Json) -> str:
    """The name of a value's JSON type, for messages."""
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
    """Whether a value is of a declared variable's `type`; an int is a float too."""
    if name is None or name == "any":
        return True
    kind = kind_of(value)
    return kind == name or (name == "float" and kind == "int")


def equal(left: Json, right: Json, spend: Callable[[int], None]) -> bool:
    """JSON equality: true is not 1, 1 is 1.0, the order of keys does not count.

    `spend` is called with the work done, and may raise to stop it.
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


def check_size(value: Json) -> int:
    """The size of a value as a tree.

    Raises:
        ExpressionError: `expr.size` if it is larger than MAX_VALUE_SIZE or nested deeper
            than MAX_VALUE_DEPTH; `expr.number` if a number in it is not finite.
    """
    size = 0
    depth = 0
    level = [value]
    # Level by level, so that depth is a count of rounds and no stack is needed. Shared parts
    # are walked as often as they stand there, which is what writing the value would cost.
    while level:
        below: list[Json] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, list | dict):
                if depth == MAX_VALUE_DEPTH:
                    raise ExpressionError(
                        "expr.size", f"a value may be nested {MAX_VALUE_DEPTH} deep"
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
                    "expr.size", f"a value may have {MAX_VALUE_SIZE:,} characters and elements"
                )
        level = below
        depth += 1
    return size


def check_number(value: Json) -> Json:
    """The value itself, if it is no number or one that JSON and 64 bits can carry.

    Raises:
        ExpressionError: `expr.number` otherwise.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ExpressionError("expr.number", "an integer does not fit 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ExpressionError("expr.number", f"{value} is no JSON number")
    return value
