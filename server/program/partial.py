"""The value of a `yield` while a text grows: `{"partial": x}` and `{"final": x}`.

`partial` is the text so far, `final` whether it is whole. Knows how these two stand in an
expression; everything else about expressions is `expression`'s business.

Kept true: what a whole text gives is what `as_whole` gives, an ordinary expression.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import ProgramError
from .ir import Expression


def as_whole(expression: Expression) -> Expression:
    """The expression once every text is whole: `partial` is the variable, `final` is true.

    Raises:
        ProgramError: `program.expression` if either takes anything but a name.
    """
    return _replace(expression, lambda name: {"var": name}, lambda name: True)


def as_growing(expression: Expression, whole: frozenset[str]) -> Expression:
    """The expression while texts grow: `final` is true for those that are whole."""
    return _replace(expression, lambda name: {"var": name}, lambda name: name in whole)


def growing_names(expression: Expression) -> frozenset[str]:
    """The variables whose text the expression wants before it is whole."""
    found: set[str] = set()

    def note(name: str) -> Expression:
        found.add(name)
        return None

    _replace(expression, note, note)
    return frozenset(found)


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
        ((operator, name),) = expression.items()
        if operator in ("partial", "final"):
            if not isinstance(name, str):
                raise ProgramError(
                    "program.expression", f"`{operator}` takes the name of a variable", path="value"
                )
            return partial(name) if operator == "partial" else final(name)
        if operator == "object" and isinstance(name, dict):
            fields = {key: _replace(item, partial, final) for key, item in name.items()}
            return {"object": fields}
        return {operator: _replace(name, partial, final)}
    return expression
