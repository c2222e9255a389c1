"""The operators of expressions that compute a value from values.

Out of scope: variables, scopes and syntax; `evaluate` evaluates the operands.

Invariants: an operator does not change its operands. It charges the meter before it uses time or
memory. Operands of a wrong type raise `expr.type`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from ..content import Json
from ..decoding.bounded_json import parse_json
from ..errors import ExpressionError, ProgramError
from . import values
from .budget import WorkBudget, exhausted
from .regex import Limit, LinearRegex, RegexError, compile_regex

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?")
_FENCE = "```"
_OPENING_FENCE = re.compile(_FENCE + r"[A-Za-z]*[ \t]*\r?\n?")
"""Every part after the fence is optional, so that a search is linear."""
PATTERN_OPERATORS = frozenset({"find", "find_all"})
"""Operators whose second operand is a regular expression."""
_FAIL_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_FAIL_MESSAGE = 4_096


class FuelMeter:
    """The budget of one evaluation: operations, and the size of new values."""

    __slots__ = ("_budget", "_granted", "_num_overdrawn", "fuel", "size")

    def __init__(self, fuel: int, budget: WorkBudget | None = None) -> None:
        """Create a meter.

        Args:
            fuel: operations of this evaluation.
            budget: budget of the program; `settle` charges it.
        """
        self.fuel = self._granted = fuel if budget is None else min(fuel, max(budget.left, 0))
        self.size = values.MAX_VALUE_SIZE
        self._budget = budget
        self._num_overdrawn = 0

    def settle(self) -> None:
        """Charge the program's budget with what the evaluation has used.

        A rejected operation did not run and is not charged.
        """
        if self._budget is not None:
            self._budget.left -= self._granted - max(self.fuel, 0) + self._num_overdrawn

    def spend(self, amount: int) -> None:
        """Pay for operations.

        Raises:
            ExpressionError: `expr.fuel` if the budget of the evaluation is exceeded, `quota.steps`
                if that of the program is.
        """
        self.fuel -= amount
        if self.fuel < 0:
            if self._budget is not None and self._budget.left <= self._granted:
                raise exhausted()
            raise ExpressionError(
                "expr.fuel", "the expression needs too many operations: split it up"
            )

    def charge(self, amount: int) -> None:
        """Pay for operations that were carried out already.

        Raises:
            ExpressionError: as `spend`.
        """
        self._num_overdrawn += max(0, amount - self.fuel)
        self.spend(amount)

    def foresee(self, amount: int) -> None:
        """Refuse a trial an operation that may take this many steps, but usually takes fewer."""
        if self._budget is not None and self._budget.is_trial and amount > self.fuel:
            self.spend(amount)

    def read(self, text: str) -> None:
        """Pay for one pass over a string."""
        self.spend(1 + (len(text) >> 8))

    def visit(self, count: int) -> None:
        """Pay for a look at each element of a value."""
        self.foresee(count >> 1)
        self.spend(count >> 6)

    def build(self, size: int) -> None:
        """Pay for a new string of `size` characters or a list of `size` elements.

        Raises:
            ExpressionError: `expr.size` if the budget is exceeded.
        """
        self.size -= size
        if self.size < 0:
            raise ExpressionError(
                "expr.size",
                f"an expression can build at most {values.MAX_VALUE_SIZE:,} characters",
            )

    def build_list(self, size: int) -> None:
        """Pay for a new list; each element also costs an operation."""
        self.spend(size)
        self.build(size)


Operation: TypeAlias = Callable[[FuelMeter, list[Json]], Json]


class ValueOperator(NamedTuple):
    """The number of operands of an operator (`most` None: unbounded) and its function."""

    least: int
    most: int | None
    run: Operation


def _wrong_type(name: str, expected: str, *operands: Json) -> ExpressionError:
    got = ", ".join(values.kind_of(operand) for operand in operands)
    return ExpressionError("expr.type", f"`{name}` needs {expected}, got {got}")


def _string(name: str, operand: Json) -> str:
    if not isinstance(operand, str):
        raise _wrong_type(name, "a string", operand)
    return operand


def _number(name: str, operand: Json) -> int | float:
    if isinstance(operand, bool) or not isinstance(operand, int | float):
        raise _wrong_type(name, "numbers", operand)
    values.check_number(operand)
    return operand


def _integer(name: str, operand: Json) -> int:
    if isinstance(operand, bool) or not isinstance(operand, int):
        raise _wrong_type(name, "an integer", operand)
    values.check_number(operand)
    return operand


def _text(meter: FuelMeter, operand: Json) -> str:
    """Return the text of an operand, after paying for it."""
    if isinstance(operand, str):
        return operand
    size = values.check_size(operand, meter.visit)
    meter.spend(size >> 8)
    meter.build(size)
    return values.text_of(operand)


def _get(meter: FuelMeter, operands: list[Json]) -> Json:
    value, *keys = operands
    for key in keys:
        if value is None:
            return None
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list | str) and isinstance(key, int) and not isinstance(key, bool):
            value = value[key] if -len(value) <= key < len(value) else None
        else:
            expected = "an object and a string, or a list or string and an integer"
            raise _wrong_type("get", expected, value, key)
    return value


def _concat(meter: FuelMeter, operands: list[Json]) -> Json:
    if any(isinstance(operand, list) for operand in operands):
        if not all(isinstance(operand, list) for operand in operands):
            raise _wrong_type("concat", "either only lists or no lists", *operands)
        meter.build_list(sum(map(len, operands)))
        return [item for operand in operands for item in operand]
    texts = [_text(meter, operand) for operand in operands]
    meter.build(sum(map(len, texts)))
    return "".join(texts)


def _join(meter: FuelMeter, operands: list[Json]) -> str:
    items, separator = operands
    if not isinstance(items, list) or not isinstance(separator, str):
        raise _wrong_type("join", "a list and a string", *operands)
    meter.spend(len(items))
    texts = [_text(meter, item) for item in items]
    meter.build(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _split(meter: FuelMeter, operands: list[Json]) -> list[Json]:
    text, separator = _string("split", operands[0]), _string("split", operands[1])
    if not separator:
        raise ExpressionError("expr.value", "`split` needs a separator that is not empty")
    meter.read(text)
    meter.build_list(text.count(separator) + 1)
    meter.build(len(text))
    return list(text.split(separator))


def _strip(meter: FuelMeter, operands: list[Json]) -> str:
    text = _string("strip", operands[0])
    meter.read(text)
    return text.strip()


def _lower(meter: FuelMeter, operands: list[Json]) -> str:
    text = _string("lower", operands[0])
    meter.read(text)
    meter.build(len(text))
    return text.lower()


def _slice(meter: FuelMeter, operands: list[Json]) -> Json:
    base, *bounds = operands
    if not isinstance(base, str | list):
        raise _wrong_type("slice", "a string or a list", base)
    ends = [None if bound is None else _integer("slice", bound) for bound in bounds]
    part = slice(ends[0], ends[1] if len(ends) > 1 else None)
    size = len(range(*part.indices(len(base))))
    if isinstance(base, list):
        meter.build_list(size)
        return base[part]
    meter.build(size)
    return base[part]


def _len(meter: FuelMeter, operands: list[Json]) -> int:
    if not isinstance(operands[0], str | list | dict):
        raise _wrong_type("len", "a string, a list or an object", operands[0])
    return len(operands[0])


def _find(meter: FuelMeter, operands: list[Json]) -> str | None:
    text = _string("find", operands[0])
    regex = _regex(meter, "find", operands)
    meter.foresee(regex.max_cost(text))
    meter.spend(regex.cost(text))
    return regex.find(text, meter.charge)


def _find_all(meter: FuelMeter, operands: list[Json]) -> list[Json]:
    text = _string("find_all", operands[0])
    found = _regex(meter, "find_all", operands).find_all(text, meter.spend)
    meter.build_list(len(found))
    meter.build(sum(len(each) for each in found if each is not None))
    return list(found)


def _regex(meter: FuelMeter, name: str, operands: list[Json]) -> LinearRegex:
    pattern = _string(name, operands[1])
    meter.spend(1 + len(pattern))
    meter.read(operands[0])
    # A pattern that the program contains was compiled when the program was checked.
    return _compiled(pattern, meter.foresee)


def pay_for_pattern(meter: FuelMeter, pattern: Json) -> None:
    """Pay for compiling a pattern that an expression has computed.

    Raises:
        ExpressionError: `expr.regex` if the pattern is not valid; as `FuelMeter.spend`.
    """
    if isinstance(pattern, str):
        meter.spend(1 + len(pattern))
        _compiled(pattern, meter.spend)


def _compiled(pattern: str, limit: Limit) -> LinearRegex:
    try:
        return compile_regex(pattern, limit)
    except RegexError as error:
        raise ExpressionError("expr.regex", str(error)) from None


def _parse_json(meter: FuelMeter, operands: list[Json]) -> Json:
    text = _string("parse_json", operands[0])
    meter.foresee(len(text) >> 2)
    meter.read(text)
    meter.build(len(text))
    reason = ""
    for candidate in (text, *_fenced(text)):
        try:
            parsed: Json = parse_json(candidate.strip().encode())
        except ProgramError as error:
            reason = reason or error.message
        except UnicodeEncodeError as error:
            reason = reason or str(error)
        else:
            return parsed
    raise ExpressionError("expr.json", f"{text[:80]!r} is not JSON: {reason}")


def _fenced(text: str) -> Iterator[str]:
    """Yield the content of the first fenced block, if there is one."""
    opening = _OPENING_FENCE.search(text)
    if opening is None:
        return
    end = text.find(_FENCE, opening.end())
    if end >= 0:
        yield text[opening.end() : end]


def _range(meter: FuelMeter, operands: list[Json]) -> list[Json]:
    bounds = [_integer("range", operand) for operand in operands]
    if len(bounds) == 3 and bounds[2] == 0:
        raise ExpressionError("expr.value", "the step of `range` cannot be 0")
    numbers = range(*bounds)
    # len() of a range fails beyond the size of a list.
    step = numbers.step
    count = max(0, (numbers.stop - numbers.start + step - (1 if step > 0 else -1)) // step)
    meter.build_list(count)
    return list(numbers)


def _not(meter: FuelMeter, operands: list[Json]) -> bool:
    return not values.is_true(operands[0])


def _eq(meter: FuelMeter, operands: list[Json]) -> bool:
    return values.equal(operands[0], operands[1], meter.spend)


def _ne(meter: FuelMeter, operands: list[Json]) -> bool:
    return not _eq(meter, operands)


def _lt(meter: FuelMeter, operands: list[Json], name: str = "lt") -> bool:
    left, right = operands
    if isinstance(left, str) and isinstance(right, str):
        meter.read(left)
        return left < right
    if isinstance(left, str) or isinstance(right, str):
        raise _wrong_type(name, "two numbers or two strings", left, right)
    return _number(name, left) < _number(name, right)


def _gt(meter: FuelMeter, operands: list[Json]) -> bool:
    return _lt(meter, operands[::-1], "gt")


def _contains(meter: FuelMeter, operands: list[Json]) -> bool:
    base, item = operands
    if isinstance(base, str):
        meter.read(base)
        return _string("contains", item) in base
    if isinstance(base, list):
        return any(values.equal(element, item, meter.spend) for element in base)
    if isinstance(base, dict):
        return _string("contains", item) in base
    raise _wrong_type("contains", "a string, a list or an object", base)


def _add(meter: FuelMeter, operands: list[Json]) -> Json:
    left, right = operands
    for kind in (str, list):
        if isinstance(left, kind) and isinstance(right, kind):
            return _concat(meter, operands)
    if isinstance(left, str | list) or isinstance(right, str | list):
        raise _wrong_type("add", "two numbers, two strings or two lists", left, right)
    return values.check_number(_number("add", left) + _number("add", right))


def _sub(meter: FuelMeter, operands: list[Json]) -> Json:
    left, right = (_number("sub", operand) for operand in operands)
    return values.check_number(left - right)


def _mul(meter: FuelMeter, operands: list[Json]) -> Json:
    left, right = (_number("mul", operand) for operand in operands)
    return values.check_number(left * right)


def _division(name: str, divide: Callable[[Json, Json], Json]) -> Operation:
    """Return an operation on two numbers, the second not 0."""

    def run(meter: FuelMeter, operands: list[Json]) -> Json:
        left, right = (_number(name, operand) for operand in operands)
        if right == 0:
            raise ExpressionError("expr.value", f"`{name}` cannot divide by 0")
        return values.check_number(divide(left, right))

    return run


def _fail(meter: FuelMeter, operands: list[Json]) -> Json:
    """Raise the error that the program defines."""
    message = _text(meter, operands[0])
    if len(message) > MAX_FAIL_MESSAGE:
        raise ExpressionError(
            "expr.size",
            f"the message of `fail` can have at most {MAX_FAIL_MESSAGE:,} characters, "
            f"got {len(message):,}",
        )
    if len(operands) == 1:
        raise ExpressionError("expr.fail", message)
    name = _string("fail", operands[1])
    if not _FAIL_CODE.fullmatch(name):
        raise ExpressionError(
            "expr.value", f"the code of `fail` must match {_FAIL_CODE.pattern}, got {name[:80]!r}"
        )
    raise ExpressionError(f"fail.{name}", message)


def _pyrepr(meter: FuelMeter, operands: list[Json]) -> str:
    size = values.check_size(operands[0], meter.visit)
    meter.spend(size >> 8)
    text = str(operands[0])
    meter.build(len(text))
    return text


def _json(meter: FuelMeter, operands: list[Json]) -> str:
    size = values.check_size(operands[0], meter.visit)
    meter.spend(size >> 8)
    meter.build(size)
    return values.compact_json(operands[0])


def _upper(meter: FuelMeter, operands: list[Json]) -> str:
    text = _string("upper", operands[0])
    meter.read(text)
    upper = text.upper()
    meter.build(len(upper))
    return upper


def _startswith(meter: FuelMeter, operands: list[Json]) -> bool:
    text, start = _string("startswith", operands[0]), _string("startswith", operands[1])
    meter.read(start)
    return text.startswith(start)


def _endswith(meter: FuelMeter, operands: list[Json]) -> bool:
    text, end = _string("endswith", operands[0]), _string("endswith", operands[1])
    meter.read(end)
    return text.endswith(end)


def _replace(meter: FuelMeter, operands: list[Json]) -> str:
    text, old, new = (_string("replace", operand) for operand in operands)
    if not old:
        raise ExpressionError("expr.value", "`replace` needs a text to replace, got an empty one")
    meter.read(text)
    meter.build(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new)


def _to_int(meter: FuelMeter, operands: list[Json]) -> int:
    operand = operands[0]
    if isinstance(operand, float):
        values.check_number(operand)
        return int(values.check_number(int(operand)))
    if not isinstance(operand, str):
        return int(operand) if isinstance(operand, bool) else _integer("to_int", operand)
    text = operand.strip()
    if not _INTEGER.fullmatch(text):
        raise ExpressionError("expr.value", f"{operand[:80]!r} is not an integer")
    return int(values.check_number(int(text)))


def _to_float(meter: FuelMeter, operands: list[Json]) -> float:
    operand = operands[0]
    if not isinstance(operand, str):
        return float(_number("to_float", operand))
    text = operand.strip()
    if not _NUMBER.fullmatch(text):
        raise ExpressionError("expr.value", f"{operand[:80]!r} is not a number")
    return float(values.check_number(float(text)))


def _elements(name: str, operand: Json) -> list[Json]:
    if not isinstance(operand, list):
        raise _wrong_type(name, "a list", operand)
    return operand


def _flatten(meter: FuelMeter, operands: list[Json]) -> list[Json]:
    parts = [_elements("flatten", part) for part in _elements("flatten", operands[0])]
    meter.build_list(len(parts) + sum(map(len, parts)))
    return [item for part in parts for item in part]


def _sum(meter: FuelMeter, operands: list[Json]) -> Json:
    items = _elements("sum", operands[0])
    meter.spend(len(items))
    total: int | float = 0
    for item in items:
        total = values.check_number(total + _number("sum", item))
    return total


def _sorted(meter: FuelMeter, operands: list[Json], name: str = "sort") -> list[Json]:
    """Return the numbers or strings of a list in order; equal ones keep their order."""
    items = _elements(name, operands[0])
    # Each comparison of two strings may read both of them.
    size = sum(len(item) for item in items if isinstance(item, str))
    meter.spend(len(items) * len(items).bit_length() + (size * len(items).bit_length() >> 8))
    meter.build_list(len(items))
    for item in items:
        if not isinstance(item, str):
            _number(name, item)
    if len({isinstance(item, str) for item in items}) > 1:
        raise ExpressionError("expr.type", f"`{name}` needs only numbers or only strings")
    return sorted(items)


def _min(meter: FuelMeter, operands: list[Json]) -> Json:
    return next(iter(_sorted(meter, operands, "min")), None)


def _max(meter: FuelMeter, operands: list[Json]) -> Json:
    return next(iter(_sorted(meter, operands, "max")[::-1]), None)


OPERATORS: dict[str, ValueOperator] = {
    "get": ValueOperator(2, None, _get),
    "concat": ValueOperator(1, None, _concat),
    "join": ValueOperator(2, 2, _join),
    "split": ValueOperator(2, 2, _split),
    "strip": ValueOperator(1, 1, _strip),
    "lower": ValueOperator(1, 1, _lower),
    "slice": ValueOperator(2, 3, _slice),
    "len": ValueOperator(1, 1, _len),
    "find": ValueOperator(2, 2, _find),
    "find_all": ValueOperator(2, 2, _find_all),
    "parse_json": ValueOperator(1, 1, _parse_json),
    "range": ValueOperator(1, 3, _range),
    "not": ValueOperator(1, 1, _not),
    "eq": ValueOperator(2, 2, _eq),
    "ne": ValueOperator(2, 2, _ne),
    "lt": ValueOperator(2, 2, _lt),
    "gt": ValueOperator(2, 2, _gt),
    "contains": ValueOperator(2, 2, _contains),
    "add": ValueOperator(2, 2, _add),
    "sub": ValueOperator(2, 2, _sub),
    "mul": ValueOperator(2, 2, _mul),
    "div": ValueOperator(2, 2, _division("div", operator.truediv)),
    "idiv": ValueOperator(2, 2, _division("idiv", operator.floordiv)),
    "mod": ValueOperator(2, 2, _division("mod", operator.mod)),
    "fail": ValueOperator(1, 2, _fail),
    "pyrepr": ValueOperator(1, 1, _pyrepr),
    "json": ValueOperator(1, 1, _json),
    "upper": ValueOperator(1, 1, _upper),
    "startswith": ValueOperator(2, 2, _startswith),
    "endswith": ValueOperator(2, 2, _endswith),
    "replace": ValueOperator(3, 3, _replace),
    "to_int": ValueOperator(1, 1, _to_int),
    "to_float": ValueOperator(1, 1, _to_float),
    "flatten": ValueOperator(1, 1, _flatten),
    "sum": ValueOperator(1, 1, _sum),
    "sort": ValueOperator(1, 1, _sorted),
    "min": ValueOperator(1, 1, _min),
    "max": ValueOperator(1, 1, _max),
}
