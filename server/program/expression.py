"""Expressions: small pure computations on JSON values, written as JSON.

A scalar or an array stands for itself; an object has exactly one key, an operator.
`operators` computes values from values; what does not evaluate all its operands, or binds
a name, is here: `var lit object each if first and or`.

Refuses to know where the values come from: a scope is a mapping from names to values, and
a name that is missing from it is *absent* (its producer was skipped or killed).

Kept true: a checked expression fails on its values only; `evaluate` raises nothing but
ExpressionError, ends within its fuel, and gives a value of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from .errors import ExpressionError, ProgramError
from .ir import Expression, Json
from .linear_regex import Regex
from .operators import OPERATORS, Meter
from .regex_syntax import RegexError
from .value import check_size, is_true

MAX_EXPRESSION_DEPTH = 64
FUEL = 100_000

_UNBOUNDED = ("and", "or", "first")
_SPECIAL = frozenset({"var", "lit", "object", "each", "if", *_UNBOUNDED})
_OF_YIELD = frozenset({"partial", "final"})


def input_expression(value: Expression) -> Expression:
    """What stands where a bare string names a variable (`input`, `when`), as an expression."""
    return {"var": value} if isinstance(value, str) else value


def variables(expr: Expression) -> frozenset[str]:
    """The free names of a checked expression."""
    if isinstance(expr, dict):
        name = expr.get("var")
        if isinstance(name, str) and len(expr) == 1:
            return frozenset((name,))
    elif not isinstance(expr, list):
        return frozenset()
    found: set[str] = set()
    _collect(expr, frozenset(), found)
    return frozenset(found)


def check(expr: Expression, path: str) -> None:
    """Look at the form of an expression; `path` is where it stands in the submission.

    Raises:
        ProgramError: `program.expression` with the path of the operator that is unknown or
            has the wrong operands, or of a literal regular expression that is refused.
    """
    _check(expr, path, 0)


def evaluate(expr: Expression, scope: Mapping[str, Json], *, fuel: int = FUEL) -> Json:
    """The value of an expression, with the variables' values from `scope`.

    Raises:
        ExpressionError: `variable.absent` if a name is read (outside `first`) that the scope
            lacks; `expr.type`, `expr.value`, `expr.json`, `expr.regex`, `expr.number` if the
            values do not suit; `expr.fuel`, `expr.size`, `expr.depth` beyond the bounds;
            `expr.malformed` if `check` would have refused it.
    """
    evaluation = _Evaluation(scope, Meter(fuel))
    try:
        result = evaluation.run(expr, {}, 0)
    except _AbsentError as absent:
        raise ExpressionError(
            "variable.absent", f"variable `{absent.name}` has no value and never will"
        ) from None
    check_size(result)
    return result


class _AbsentError(Exception):
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
    """Operands of an operator: a list, or alone where the operator takes one."""
    if isinstance(argument, list):
        return argument
    operator = OPERATORS.get(name)
    is_unary = operator is not None and operator.least == 1 and operator.most is not None
    return [argument] if is_unary else []


class _Evaluation:
    __slots__ = ("_meter", "_scope")

    def __init__(self, scope: Mapping[str, Json], meter: Meter) -> None:
        self._scope = scope
        self._meter = meter

    def run(self, expr: Expression, bound: dict[str, Json], depth: int) -> Json:
        """Evaluate; `bound` holds what enclosing `each` bind and is not changed."""
        self._meter.spend(1)
        if depth > MAX_EXPRESSION_DEPTH:
            raise ExpressionError(
                "expr.depth", f"an expression may be nested {MAX_EXPRESSION_DEPTH} deep"
            )
        if isinstance(expr, list):
            self._meter.build(len(expr))
            return [self.run(item, bound, depth + 1) for item in expr]
        if not isinstance(expr, dict):
            return expr
        if len(expr) != 1:
            _malformed("an object with exactly one operator")
        ((name, argument),) = expr.items()
        if name in _SPECIAL:
            return self._run_special(name, argument, bound, depth)
        operator = OPERATORS.get(name)
        operands = _operands(name, argument)
        if operator is None or not _fits(len(operands), operator.least, operator.most):
            _malformed("a known operator with as many operands as it takes")
        ready = [self.run(operand, bound, depth + 1) for operand in operands]
        return operator.run(self._meter, ready)

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
        if not isinstance(argument, list):
            _malformed(f"`{name}` with a list")
        if name == "each":
            return self._run_each(argument, bound, depth)
        if name == "if":
            if len(argument) != 3:
                _malformed("`if` with three operands")
            is_taken = is_true(self.run(argument[0], bound, depth + 1))
            return self.run(argument[1 if is_taken else 2], bound, depth + 1)
        return self._run_until_decided(name, argument, bound, depth)

    def _run_until_decided(
        self, name: str, operands: list[Expression], bound: dict[str, Json], depth: int
    ) -> Json:
        """`and`, `or`: the operand that decides. `first`: what exists and is not null."""
        if not operands:
            _malformed(f"`{name}` with operands")
        result: Json = None
        for operand in operands:
            try:
                result = self.run(operand, bound, depth + 1)
            except _AbsentError:
                if name != "first":
                    raise
                continue
            if name == "first":
                if result is not None:
                    return result
            elif is_true(result) == (name == "or"):
                return result
        return None if name == "first" else result

    def _run_each(
        self, operands: list[Expression], bound: dict[str, Json], depth: int
    ) -> list[Json]:
        if not _fits(len(operands), 3, 4) or not all(
            isinstance(name, str) for name in operands[1:-1]
        ):
            _malformed("`each` with a list, one or two names, and an expression")
        each = _each(operands)
        items = self.run(each.items, bound, depth + 1)
        if not isinstance(items, list):
            raise ExpressionError("expr.type", "`each` wants a list")
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
            raise _AbsentError(name) from None


def _malformed(wanted: str) -> NoReturn:
    raise ExpressionError("expr.malformed", f"the expression is malformed: wanted {wanted}")


def _fits(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _collect(expr: Expression, bound: frozenset[str], found: set[str]) -> None:
    if isinstance(expr, list):
        for item in expr:
            _collect(item, bound, found)
        return
    if not isinstance(expr, dict):
        return
    for name, argument in expr.items():
        if name == "lit":
            continue
        if name == "var":
            if argument not in bound:
                found.add(argument)
        elif name == "object":
            for item in argument.values():
                _collect(item, bound, found)
        elif name == "each":
            each = _each(argument)
            _collect(each.items, bound, found)
            inner = bound | {each.name} | ({each.counter} if each.counter is not None else set())
            _collect(each.body, inner, found)
        else:
            _collect(argument, bound, found)


def _check(expr: Expression, path: str, depth: int) -> None:
    if depth > MAX_EXPRESSION_DEPTH:
        _refuse(f"an expression may be nested {MAX_EXPRESSION_DEPTH} deep", path)
    if isinstance(expr, list):
        for index, item in enumerate(expr):
            _check(item, f"{path}[{index}]", depth + 1)
        return
    if not isinstance(expr, dict):
        return
    if len(expr) != 1:
        keys = ", ".join(f"`{key}`" for key in expr) or "none"
        _refuse(
            f"an object in an expression has exactly one operator, this one has {keys} "
            "(`object` and `lit` build objects)",
            path,
        )
    ((name, argument),) = expr.items()
    for place, operand in _parts(name, argument, f"{path}.{name}"):
        _check(operand, place, depth + 1)


def _parts(name: str, argument: Expression, path: str) -> Iterator[tuple[str, Expression]]:
    """Check one operator's form and go through its operands with their paths."""
    if name == "lit":
        return
    if name == "var":
        if not isinstance(argument, str) or not argument:
            _refuse("`var` takes the name of a variable", path)
        return
    if name == "object":
        if not isinstance(argument, dict):
            _refuse("`object` takes an object of expressions", path)
        yield from ((f"{path}.{key}", item) for key, item in argument.items())
        return
    if name not in OPERATORS and name not in _SPECIAL:
        _refuse_operator(name, path)
    operands = _operands(name, argument)
    least, most = _arity(name)
    if not _fits(len(operands), least, most):
        wanted = (
            str(least) if least == most else f"{least} to {most}" if most else f"{least} or more"
        )
        got = f"{len(operands)}" if isinstance(argument, list) else "no list of them"
        _refuse(f"`{name}` takes {wanted} operands, got {got}", path)
    if name == "each" and not all(isinstance(item, str) and item for item in operands[1:-1]):
        _refuse("`each` takes [list, name, expression] or [list, name, name, expression]", path)
    if name == "find" and isinstance(operands[1], str):
        _check_regex(operands[1], f"{path}[1]")
    is_alone = not isinstance(argument, list)
    for index, operand in enumerate(operands):
        if name != "each" or index in (0, len(operands) - 1):
            yield (path if is_alone else f"{path}[{index}]"), operand


def _arity(name: str) -> tuple[int, int | None]:
    if name == "each":
        return 3, 4
    if name == "if":
        return 3, 3
    if name in _UNBOUNDED:
        return 1, None
    return OPERATORS[name].least, OPERATORS[name].most


def _check_regex(pattern: str, path: str) -> None:
    try:
        Regex(pattern)
    except RegexError as error:
        _refuse(str(error), path)


def _refuse_operator(name: str, path: str) -> NoReturn:
    if name in _OF_YIELD:
        _refuse(f"`{name}` is for the value of a `yield`; elsewhere use `var`", path)
    known = ", ".join(sorted({*OPERATORS, *_SPECIAL}))
    _refuse(f"there is no operator `{name}`; there are: {known}", path)


def _refuse(message: str, path: str) -> NoReturn:
    raise ProgramError("program.expression", message, path=path)
