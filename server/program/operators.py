"""The operators of expressions that compute a value from values.

Knows JSON values and the meter that every operator pays. Refuses to know variables,
scopes and syntax: `expression` evaluates the operands and calls these.

Kept true: no operator changes its operands, and each pays before it does what it pays
for, so neither time nor memory depends on trust. Wrong types raise `expr.type`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from . import value as values
from .decode import decode_json
from .errors import ExpressionError, ProgramError
from .ir import Json
from .linear_regex import Regex, StepsError
from .regex_syntax import RegexError

_STEPS_PER_FUEL = 8
"""Steps of a regular expression (about 200 ns each) that cost as much as one operation."""
_FENCE = re.compile(r"```[A-Za-z]*[ \t]*\r?\n?(.*?)```", re.DOTALL)


class Meter:
    """What one evaluation may still use: operations, and size of what it builds."""

    __slots__ = ("fuel", "size")

    def __init__(self, fuel: int) -> None:
        self.fuel = fuel
        self.size = values.MAX_VALUE_SIZE

    def spend(self, amount: int) -> None:
        """Pay for operations.

        Raises:
            ExpressionError: `expr.fuel` if there is not enough left.
        """
        self.fuel -= amount
        if self.fuel < 0:
            raise ExpressionError("expr.fuel", "the expression takes too many operations")

    def read(self, text: str) -> None:
        """Pay for looking at every character of a string once."""
        self.spend(1 + (len(text) >> 8))

    def build(self, size: int) -> None:
        """Pay for a new string of `size` characters or a list of `size` elements.

        Raises:
            ExpressionError: `expr.size` if the evaluation has built too much.
        """
        self.size -= size
        if self.size < 0:
            raise ExpressionError(
                "expr.size",
                f"an expression may build {values.MAX_VALUE_SIZE:,} characters and elements",
            )

    def build_list(self, size: int) -> None:
        """Pay for a new list: an element costs an operation too."""
        self.spend(size)
        self.build(size)


class Operator(NamedTuple):
    """How many operands an operator takes (`most` None: any number) and what it does."""

    least: int
    most: int | None
    run: Callable[[Meter, list[Json]], Json]


def _wrong(name: str, wants: str, *operands: Json) -> ExpressionError:
    got = ", ".join(values.kind_of(operand) for operand in operands)
    return ExpressionError("expr.type", f"`{name}` wants {wants}, got {got}")


def _string(name: str, operand: Json) -> str:
    if not isinstance(operand, str):
        raise _wrong(name, "a string", operand)
    return operand


def _number(name: str, operand: Json) -> int | float:
    if isinstance(operand, bool) or not isinstance(operand, int | float):
        raise _wrong(name, "numbers", operand)
    values.check_number(operand)
    return operand


def _integer(name: str, operand: Json) -> int:
    if isinstance(operand, bool) or not isinstance(operand, int):
        raise _wrong(name, "an integer", operand)
    values.check_number(operand)
    return operand


def _text(meter: Meter, operand: Json) -> str:
    """The text of an operand, paid for before it is made."""
    if isinstance(operand, str):
        return operand
    size = values.check_size(operand)
    meter.spend(size >> 8)
    meter.build(size)
    return values.text_of(operand)


def _get(meter: Meter, operands: list[Json]) -> Json:
    found, *keys = operands
    for key in keys:
        if found is None:
            return None
        if isinstance(found, dict) and isinstance(key, str):
            found = found.get(key)
        elif isinstance(found, list) and isinstance(key, int) and not isinstance(key, bool):
            found = found[key] if 0 <= key < len(found) else None
        else:
            raise _wrong("get", "an object and a string, or a list and an integer", found, key)
    return found


def _concat(meter: Meter, operands: list[Json]) -> Json:
    if any(isinstance(operand, list) for operand in operands):
        if not all(isinstance(operand, list) for operand in operands):
            raise _wrong("concat", "only lists or no list", *operands)
        meter.build_list(sum(map(len, operands)))
        return [item for operand in operands for item in operand]
    texts = [_text(meter, operand) for operand in operands]
    meter.build(sum(map(len, texts)))
    return "".join(texts)


def _join(meter: Meter, operands: list[Json]) -> str:
    items, separator = operands
    if not isinstance(items, list) or not isinstance(separator, str):
        raise _wrong("join", "a list and a string", *operands)
    meter.spend(len(items))
    texts = [_text(meter, item) for item in items]
    meter.build(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _split(meter: Meter, operands: list[Json]) -> list[Json]:
    text, separator = _string("split", operands[0]), _string("split", operands[1])
    if not separator:
        raise ExpressionError("expr.value", "`split` wants a separator that is not empty")
    meter.read(text)
    meter.build_list(text.count(separator) + 1)
    meter.build(len(text))
    return list(text.split(separator))


def _strip(meter: Meter, operands: list[Json]) -> str:
    text = _string("strip", operands[0])
    meter.read(text)
    return text.strip()


def _lower(meter: Meter, operands: list[Json]) -> str:
    text = _string("lower", operands[0])
    meter.read(text)
    meter.build(len(text))
    return text.lower()


def _slice(meter: Meter, operands: list[Json]) -> Json:
    base, *bounds = operands
    if not isinstance(base, str | list):
        raise _wrong("slice", "a string or a list", base)
    ends = [None if bound is None else _integer("slice", bound) for bound in bounds]
    part = slice(ends[0], ends[1] if len(ends) > 1 else None)
    size = len(range(*part.indices(len(base))))
    if isinstance(base, list):
        meter.build_list(size)
        return base[part]
    meter.build(size)
    return base[part]


def _len(meter: Meter, operands: list[Json]) -> int:
    if not isinstance(operands[0], str | list | dict):
        raise _wrong("len", "a string, a list or an object", operands[0])
    return len(operands[0])


def _find(meter: Meter, operands: list[Json]) -> str | None:
    text, pattern = _string("find", operands[0]), _string("find", operands[1])
    meter.spend(1 + len(pattern))
    meter.read(text)
    try:
        found, steps = Regex(pattern).find(text, max_steps=meter.fuel * _STEPS_PER_FUEL)
    except RegexError as error:
        raise ExpressionError("expr.regex", str(error)) from None
    except StepsError:
        raise ExpressionError("expr.fuel", "`find` takes too many steps on this text") from None
    meter.spend(steps // _STEPS_PER_FUEL)
    return None if found is None else found.text


def _parse_json(meter: Meter, operands: list[Json]) -> Json:
    text = _string("parse_json", operands[0])
    meter.read(text)
    meter.build(len(text))
    candidates = [text, *(match[1] for match in [_FENCE.search(text)] if match is not None)]
    reason = ""
    for candidate in candidates:
        try:
            parsed: Json = decode_json(candidate.strip().encode(), Any)
        except ProgramError as error:
            reason = reason or error.message
        except UnicodeEncodeError as error:
            reason = reason or str(error)
        else:
            return parsed
    raise ExpressionError("expr.json", f"{text[:80]!r} is not JSON: {reason}")


def _range(meter: Meter, operands: list[Json]) -> list[Json]:
    bounds = [_integer("range", operand) for operand in operands]
    if len(bounds) == 3 and bounds[2] == 0:
        raise ExpressionError("expr.value", "`range` cannot step by 0")
    numbers = range(*bounds)
    # len() of a range refuses what no list could hold anyway.
    step = numbers.step
    count = max(0, (numbers.stop - numbers.start + step - (1 if step > 0 else -1)) // step)
    meter.build_list(count)
    return list(numbers)


def _not(meter: Meter, operands: list[Json]) -> bool:
    return not values.is_true(operands[0])


def _eq(meter: Meter, operands: list[Json]) -> bool:
    return values.equal(operands[0], operands[1], meter.spend)


def _ne(meter: Meter, operands: list[Json]) -> bool:
    return not _eq(meter, operands)


def _lt(meter: Meter, operands: list[Json], name: str = "lt") -> bool:
    left, right = operands
    if isinstance(left, str) and isinstance(right, str):
        meter.read(left)
        return left < right
    if isinstance(left, str) or isinstance(right, str):
        raise _wrong(name, "two numbers or two strings", left, right)
    return _number(name, left) < _number(name, right)


def _gt(meter: Meter, operands: list[Json]) -> bool:
    return _lt(meter, operands[::-1], "gt")


def _contains(meter: Meter, operands: list[Json]) -> bool:
    base, item = operands
    if isinstance(base, str):
        meter.read(base)
        return _string("contains", item) in base
    if isinstance(base, list):
        return any(values.equal(element, item, meter.spend) for element in base)
    if isinstance(base, dict):
        return _string("contains", item) in base
    raise _wrong("contains", "a string, a list or an object", base)


def _add(meter: Meter, operands: list[Json]) -> Json:
    left, right = (_number("add", operand) for operand in operands)
    return values.check_number(left + right)


def _sub(meter: Meter, operands: list[Json]) -> Json:
    left, right = (_number("sub", operand) for operand in operands)
    return values.check_number(left - right)


def _div(meter: Meter, operands: list[Json]) -> Json:
    left, right = (_number("div", operand) for operand in operands)
    if right == 0:
        raise ExpressionError("expr.value", "`div` by 0")
    return values.check_number(left / right)


def _pyrepr(meter: Meter, operands: list[Json]) -> str:
    size = values.check_size(operands[0])
    meter.spend(size >> 8)
    text = str(operands[0])
    meter.build(len(text))
    return text


def _json(meter: Meter, operands: list[Json]) -> str:
    size = values.check_size(operands[0])
    meter.spend(size >> 8)
    meter.build(size)
    return values.compact_json(operands[0])


OPERATORS: dict[str, Operator] = {
    "get": Operator(2, None, _get),
    "concat": Operator(1, None, _concat),
    "join": Operator(2, 2, _join),
    "split": Operator(2, 2, _split),
    "strip": Operator(1, 1, _strip),
    "lower": Operator(1, 1, _lower),
    "slice": Operator(2, 3, _slice),
    "len": Operator(1, 1, _len),
    "find": Operator(2, 2, _find),
    "parse_json": Operator(1, 1, _parse_json),
    "range": Operator(1, 3, _range),
    "not": Operator(1, 1, _not),
    "eq": Operator(2, 2, _eq),
    "ne": Operator(2, 2, _ne),
    "lt": Operator(2, 2, _lt),
    "gt": Operator(2, 2, _gt),
    "contains": Operator(2, 2, _contains),
    "add": Operator(2, 2, _add),
    "sub": Operator(2, 2, _sub),
    "div": Operator(2, 2, _div),
    "pyrepr": Operator(1, 1, _pyrepr),
    "json": Operator(1, 1, _json),
}
