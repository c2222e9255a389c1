"""Expressions: small pure computations on JSON values, written as JSON.

A scalar or an array is its own value. An object has exactly one key, an operator. Operators that
compute a value from values are in `operators`. Those that do not evaluate all their operands, or
that bind a name, are here: `var lit object each if first and or`.

Out of scope: where values come from. A scope is a mapping from names to values. The value of a
name that it lacks is missing: its producer was skipped or killed.

Invariants: evaluating a checked expression fails because of its values only. `evaluate` raises
only ExpressionError, ends within its fuel, and returns a value of bounded size.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple, NoReturn

from ..content import Expression, Json
from ..errors import ExpressionError, ProgramError
from ..suggestion import suggestion
from .budget import WorkBudget
from .operators import OPERATORS, PATTERN_OPERATORS, FuelMeter, pay_for_pattern
from .paths import Path, shown_key
from .regex import RegexError, check_pattern
from .values import check_size, is_true

MAX_EXPRESSION_DEPTH = 64
FUEL = 100_000
MAX_SHOWN_KEYS = 10
"""Keys of an object in a message."""

SPECIAL_OPERATORS = frozenset({"var", "lit", "object", "each", "if", "first", "and", "or"})
"""Operators that are evaluated here, not in `operators`."""
_YIELD_OPERATORS = frozenset({"partial", "final"})

_ARITIES: dict[str, tuple[int, int | None]] = {
    **{name: (operator.least, operator.most) for name, operator in OPERATORS.items()},
    "each": (3, 4),
    "if": (3, 3),
    "first": (1, None),
    "and": (1, None),
    "or": (1, None),
}
"""The minimum and maximum number of operands in a list; None: unbounded."""


def input_expression(value: Expression) -> Expression:
    """Return a reference (`input`, `when`), in which a bare string is a variable, as expression."""
    return {"var": value} if isinstance(value, str) else value


def variables(expr: Expression) -> frozenset[str]:
    """Return the free names of a checked expression."""
    if isinstance(expr, dict):
        name = expr.get("var")
        if isinstance(name, str) and len(expr) == 1:
            return frozenset((name,))
    elif not isinstance(expr, list):
        return frozenset()
    return frozenset(references(expr))


def references(expr: Expression) -> list[str]:
    """Return the free names of a checked expression, each as often as it occurs."""
    names: list[str] = []
    _collect(expr, frozenset(), names)
    return names


def uses_first(expr: Expression) -> bool:
    """Return whether an expression has the operator `first`, which accepts missing values."""
    if isinstance(expr, list):
        return any(uses_first(item) for item in expr if isinstance(item, dict | list))
    if not isinstance(expr, dict) or "lit" in expr:
        return False
    if "object" in expr:
        return any(map(uses_first, expr["object"].values()))
    if "first" in expr:
        return True
    return any(uses_first(item) for item in expr.values() if isinstance(item, dict | list))


def check(expr: Expression, path: str) -> None:
    """Check the form of an expression; `path` is its position in the submission.

    Raises:
        ProgramError: `program.expression`, with the path of an operator that is unknown or has
            invalid operands, or of an invalid regular expression.
    """
    _check(expr, path, 0)


def evaluate(
    expr: Expression,
    scope: Mapping[str, Json],
    *,
    fuel: int = FUEL,
    budget: WorkBudget | None = None,
) -> Json:
    """Return the value of an expression, with the variables' values from `scope`.

    Args:
        expr: the expression.
        scope: values by name.
        fuel: operations of this evaluation.
        budget: the steps of the program; each operation takes some.

    Raises:
        ExpressionError: `variable.absent` if a name that `scope` lacks is read outside `first`;
            `expr.type`, `expr.value`, `expr.json`, `expr.regex`, `expr.number` for invalid
            values; `expr.fail` or `fail.*` for `fail`; `expr.fuel`, `expr.size`, `expr.depth`,
            `quota.steps` beyond the bounds; `expr.malformed` if `check` would refuse the
            expression.
    """
    meter = FuelMeter(fuel, budget)
    try:
        result = _Evaluation(scope, meter).run(expr, {}, 0)
        check_size(result, meter.visit)
    except _MissingValueError as missing:
        raise ExpressionError(
            "variable.absent", f"variable `{missing.name}` has no value and will never have one"
        ) from None
    finally:
        meter.settle()
    return result


class _MissingValueError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Each(NamedTuple):
    """The operands of `each`, by name."""

    items: Expression
    name: str
    counter: str | None
    body: Expression


def _each(operands: list[Expression]) -> _Each:
    *names, body = operands[1:]
    return _Each(operands[0], names[0], names[1] if len(names) == 2 else None, body)


def _operands(name: str, argument: Expression) -> list[Expression]:
    """Return the operands of an operator: a list, or a single operand if it accepts one."""
    if isinstance(argument, list):
        return argument
    operator = OPERATORS.get(name)
    is_unary = operator is not None and operator.least == 1 and operator.most is not None
    return [argument] if is_unary else []


class _Evaluation:
    __slots__ = ("_meter", "_scope")

    def __init__(self, scope: Mapping[str, Json], meter: FuelMeter) -> None:
        self._scope = scope
        self._meter = meter

    def run(self, expr: Expression, bound: dict[str, Json], depth: int) -> Json:
        """Evaluate; `bound` has the names that enclosing `each` operators bind, unchanged."""
        self._meter.spend(1)
        if depth > MAX_EXPRESSION_DEPTH:
            raise ExpressionError("expr.depth", _too_deep())
        if isinstance(expr, list):
            self._meter.build(len(expr))
            return [self.run(item, bound, depth + 1) for item in expr]
        if not isinstance(expr, dict):
            return expr
        if len(expr) != 1:
            _malformed("an object with exactly one operator")
        ((name, argument),) = expr.items()
        if name in SPECIAL_OPERATORS:
            return self._run_special(name, argument, bound, depth)
        operator = OPERATORS.get(name)
        operands = _operands(name, argument)
        if operator is None or not _has_arity(name, len(operands)):
            _malformed("a known operator with the right number of operands")
        values = [self.run(operand, bound, depth + 1) for operand in operands]
        if name in PATTERN_OPERATORS and not isinstance(operands[1], str):
            pay_for_pattern(self._meter, values[1])
        return operator.run(self._meter, values)

    def _run_special(
        self, name: str, argument: Expression, bound: dict[str, Json], depth: int
    ) -> Json:
        if name == "lit":
            return argument
        if name == "var":
            return self._read(argument, bound)
        if name == "object":
            if not isinstance(argument, dict):
                _malformed("`object` with an object")
            self._meter.build(len(argument))
            return {key: self.run(item, bound, depth + 1) for key, item in argument.items()}
        if not isinstance(argument, list) or not _has_arity(name, len(argument)):
            _malformed(f"`{name}` with the right number of operands")
        if name == "each":
            return self._run_each(argument, bound, depth)
        if name == "if":
            is_taken = is_true(self.run(argument[0], bound, depth + 1))
            return self.run(argument[1 if is_taken else 2], bound, depth + 1)
        if name == "first":
            return self._run_first(argument, bound, depth)
        return self._run_logical(name, argument, bound, depth)

    def _run_logical(
        self, name: str, operands: list[Expression], bound: dict[str, Json], depth: int
    ) -> Json:
        """Return the operand that decides an `and` or `or`."""
        result: Json = None
        for operand in operands:
            result = self.run(operand, bound, depth + 1)
            if is_true(result) == (name == "or"):
                break
        return result

    def _run_first(self, operands: list[Expression], bound: dict[str, Json], depth: int) -> Json:
        """Return the first value that is neither missing nor null."""
        for operand in operands:
            try:
                result = self.run(operand, bound, depth + 1)
            except _MissingValueError:
                continue
            if result is not None:
                return result
        return None

    def _run_each(
        self, operands: list[Expression], bound: dict[str, Json], depth: int
    ) -> list[Json]:
        if not all(isinstance(name, str) for name in operands[1:-1]):
            _malformed("`each` with a list, one or two names, and an expression")
        each = _each(operands)
        items = self.run(each.items, bound, depth + 1)
        if not isinstance(items, list):
            raise ExpressionError("expr.type", "the first operand of `each` must be a list")
        self._meter.build_list(len(items))
        inner = dict(bound)
        results: list[Json] = []
        for index, item in enumerate(items):
            inner[each.name] = item
            if each.counter is not None:
                inner[each.counter] = index
            results.append(self.run(each.body, inner, depth + 1))
        return results

    def _read(self, name: Expression, bound: dict[str, Json]) -> Json:
        if not isinstance(name, str):
            _malformed("`var` with a name")
        if name in bound:
            return bound[name]
        try:
            return self._scope[name]
        except KeyError:
            raise _MissingValueError(name) from None


def _malformed(expected: str) -> NoReturn:
    raise ExpressionError("expr.malformed", f"the expression is malformed: expected {expected}")


def _too_deep() -> str:
    return f"expressions can be nested at most {MAX_EXPRESSION_DEPTH} levels deep"


def _has_arity(name: str, count: int) -> bool:
    least, most = _ARITIES[name]
    return least <= count and (most is None or count <= most)


def _collect(expr: Expression, bound: frozenset[str], names: list[str]) -> None:
    """Add the free names of an expression to `names`, each as often as it occurs."""
    if isinstance(expr, list):
        for item in expr:
            if isinstance(item, dict | list):
                _collect(item, bound, names)
        return
    if not isinstance(expr, dict):
        return
    for name, argument in expr.items():
        if name == "lit":
            continue
        if name == "var":
            if argument not in bound:
                names.append(argument)
        elif name == "object":
            for item in argument.values():
                _collect(item, bound, names)
        elif name == "each":
            each = _each(argument)
            _collect(each.items, bound, names)
            inner = bound | {each.name} | ({each.counter} if each.counter is not None else set())
            _collect(each.body, inner, names)
        else:
            _collect(argument, bound, names)


# --- checks -----------------------------------------------------------------------------------


def _check(expr: Expression, path: Path | str, depth: int) -> None:
    if depth > MAX_EXPRESSION_DEPTH:
        _refuse(_too_deep(), path)
    if isinstance(expr, list):
        for index, item in enumerate(expr):
            _check(item, Path(path, index), depth + 1)
        return
    if not isinstance(expr, dict):
        return
    if len(expr) != 1:
        keys = ", ".join(f"`{shown_key(key)}`" for key in islice(expr, MAX_SHOWN_KEYS)) or "none"
        keys += ", ..." if len(expr) > MAX_SHOWN_KEYS else ""
        _refuse(
            f"an object in an expression must have exactly one operator, got {keys} "
            "(use `object` or `lit` to build an object)",
            path,
        )
    ((name, argument),) = expr.items()
    for operand_path, operand in _check_operator(name, argument, Path(path, name)):
        _check(operand, operand_path, depth + 1)


def _check_operator(name: str, argument: Expression, path: Path) -> list[tuple[Path, Expression]]:
    """Check the form of one operator; return its operands that are expressions, with paths."""
    match name:
        case "lit":
            return []
        case "var":
            if not isinstance(argument, str) or not argument:
                _refuse("`var` must have the name of a variable", path)
            return []
        case "object":
            if not isinstance(argument, dict):
                _refuse("`object` must have an object of expressions", path)
            return [(Path(path, key), item) for key, item in argument.items()]
        case _:
            return _check_operands(name, argument, path)


def _check_operands(name: str, argument: Expression, path: Path) -> list[tuple[Path, Expression]]:
    if name not in _ARITIES:
        _refuse_operator(name, path)
    operands = _operands(name, argument)
    if not _has_arity(name, len(operands)):
        _refuse_arity(name, argument, path)
    if name in PATTERN_OPERATORS and isinstance(operands[1], str):
        _check_pattern(operands[1], Path(path, 1))
    if not isinstance(argument, list):
        return [(path, argument)]
    paths = [(Path(path, index), operand) for index, operand in enumerate(operands)]
    if name == "each":
        if not all(isinstance(item, str) and item for item in operands[1:-1]):
            _refuse("`each` takes [list, name, expression] or [list, name, name, expression]", path)
        return [paths[0], paths[-1]]
    return paths


def _check_pattern(pattern: str, path: Path) -> None:
    try:
        check_pattern(pattern)
    except RegexError as error:
        _refuse(str(error), path)


def _refuse_arity(name: str, argument: Expression, path: Path) -> NoReturn:
    least, most = _ARITIES[name]
    expected = f"{least} or more"
    if most is not None:
        expected = str(least) if least == most else f"{least} to {most}"
    got = len(argument) if isinstance(argument, list) else "a value that is not a list"
    _refuse(f"`{name}` takes {expected} operands in a list, got {got}", path)


def _refuse_operator(name: str, path: Path) -> NoReturn:
    if name in _YIELD_OPERATORS:
        _refuse(f"`{name}` needs a `yield` with `mode: partial`; elsewhere use `var`", path)
    known = sorted({*OPERATORS, *SPECIAL_OPERATORS})
    hint = suggestion(name, known, f"the operators are: {', '.join(known)}")
    _refuse(f"unknown operator `{shown_key(name)}`; {hint}", path)


def _refuse(message: str, path: Path | str) -> NoReturn:
    raise ProgramError("program.expression", message, path=str(path))
