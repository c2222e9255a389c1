"""`calc`: arithmetic written as text, such as a model writes it.

The text is parsed by Python's grammar and evaluated by an allow-list of nodes. Numbers only: no
names but the listed functions and constants, no attributes, no strings.

Invariant: every text gives a number or an error within a few milliseconds.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from ..program.errors import ExpressionError, RunError
from ..program.expressions.values import check_number
from .registry import function

Number: TypeAlias = int | float

MAX_TEXT = 1_000
MAX_DEPTH = 50
MAX_EXPONENT_BITS = 64
MAX_DIGITS = 400
"""The most places left or right of the point to which `round` rounds; no float is written with as
many."""

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _round(number: Number, digits: Number | None = None) -> Number:
    """Round a number. The digits are bounded because Python computes `10 ** -digits`."""
    if digits is None:
        return round(number)
    if not isinstance(digits, int) or abs(digits) > MAX_DIGITS:
        _refuse(f"the digits of `round` are an integer from -{MAX_DIGITS} to {MAX_DIGITS}")
    return round(number, digits)


FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "exp": (math.exp, 1, 1),
    "log": (math.log, 1, 2),
    "log2": (math.log2, 1, 1),
    "log10": (math.log10, 1, 1),
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
    "tan": (math.tan, 1, 1),
    "min": (min, 2, 100),
    "max": (max, 2, 100),
}
"""Functions with the least and the greatest number of arguments."""
CONSTANTS = {"pi": math.pi, "e": math.e}


@function(timeout_s=5)
def calculate(expression: str) -> Number:
    """Return the value of an arithmetic expression: + - * / // % **, ( ), functions, pi and e."""
    if len(expression) > MAX_TEXT:
        _refuse(f"at most {MAX_TEXT:,} characters are allowed, got {len(expression):,}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        _refuse(f"{expression[:80]!r} is not an arithmetic expression")
    try:
        return _evaluate(tree.body, 0)
    except ZeroDivisionError:
        _refuse("division by 0")
    except RecursionError:  # from `unparse`, which quotes what is not arithmetic
        _refuse(f"{expression[:80]!r} is not arithmetic, or nested too deeply")
    except (OverflowError, ValueError, TypeError, ExpressionError) as error:
        _refuse(str(error))


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        _refuse(f"expressions can be nested at most {MAX_DEPTH} levels deep")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value: Number = number
        case ast.Name(id=name) if name in CONSTANTS:
            value = CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value = _evaluate(inner, depth + 1)
            value = -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_evaluate(left, depth + 1), _evaluate(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_evaluate(left, depth + 1), _evaluate(right, depth + 1))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            run, least, most = FUNCTIONS[name]
            if not least <= len(args) <= most:
                _refuse(f"`{name}` takes {least} to {most} arguments, got {len(args)}")
            value = run(*[_evaluate(argument, depth + 1) for argument in args])
        case _:
            known = ", ".join((*FUNCTIONS, *CONSTANTS))
            _refuse(
                f"`{ast.unparse(node)[:80]}` is not arithmetic: use numbers, + - * / // % **, "
                f"( ), and {known}"
            )
    check_number(value)
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if abs(base) > 1 and base.bit_length() * exponent > 2 * MAX_EXPONENT_BITS:
            _refuse(f"{base} ** {exponent} is too large (64 bits)")
        integer: int = base**exponent
        return integer
    power = float(base) ** exponent
    if isinstance(power, complex):
        _refuse("the power of a negative number needs an integer exponent")
    return power


def _refuse(message: str) -> NoReturn:
    raise RunError("calc.invalid", f"calc: {message}")
