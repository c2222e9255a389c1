"""The operators `partial` and `final`, for a `yield` while a text is generated.

`{"partial": x}` is the text so far, `{"final": x}` whether it is complete.
"""

from __future__ import annotations

from collections.abc import Callable

from ..content import Expression
from ..errors import ProgramError


def finalized(expression: Expression) -> Expression:
    """Return the expression once every text is complete, without these operators.

    Raises:
        ProgramError: `program.expression` if an operator has anything but a name.
    """
    return _replace(expression, lambda name: {"var": name}, lambda name: True)


def with_partial_texts(expression: Expression, complete: frozenset[str]) -> Expression:
    """Return the expression while texts are generated: `final` is true for `complete` ones."""
    return _replace(expression, lambda name: {"var": name}, lambda name: name in complete)


def partial_names(expression: Expression) -> frozenset[str]:
    """Return the variables whose text the expression reads before it is complete."""
    names: set[str] = set()

    def add(name: str) -> Expression:
        names.add(name)
        return None

    _replace(expression, add, add)
    return frozenset(names)


def _replace(
    expression: Expression,
    partial: Callable[[str], Expression],
    final: Callable[[str], Expression],
) -> Expression:
    if isinstance(expression, list):
        return [_replace(item, partial, final) for item in expression]
    if not isinstance(expression, dict) or "lit" in expression:
        return expression
    if len(expression) == 1:
        ((operator, argument),) = expression.items()
        if operator in ("partial", "final"):
            if not isinstance(argument, str):
                raise ProgramError(
                    "program.expression",
                    f"`{operator}` must have the name of a variable",
                    path="value",
                )
            return partial(argument) if operator == "partial" else final(argument)
        if operator == "object" and isinstance(argument, dict):
            fields = {key: _replace(item, partial, final) for key, item in argument.items()}
            return {"object": fields}
        return {operator: _replace(argument, partial, final)}
    return expression
