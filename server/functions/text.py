"""`regex.extract` and `text.template`: parts of a text, and a text from parts."""

from __future__ import annotations

from typing import Any

from ..program.errors import RunError
from ..program.expressions.evaluate import evaluate
from ..program.expressions.placeholders import NamedPlaceholder, split_placeholders
from ..program.expressions.values import MAX_VALUE_SIZE, text_of
from .registry import function


@function(timeout_s=5)
def extract(text: str, pattern: str, all: bool = False) -> Any:  # noqa: A002 - the name callers use
    """Return group 1 of the first match of a pattern, or the whole match; null without a match.

    With `all`, return a list for all matches. Patterns are those of the expression `find`.
    """
    operator = "find_all" if all else "find"
    return evaluate({operator: [{"var": "text"}, pattern]}, {"text": text})


@function(timeout_s=5)
def fill_template(template: str, values: dict[str, Any]) -> str:
    """Replace `{{name}}` in a template by values; `{{{{` is a literal `{{`."""
    try:
        parts = split_placeholders(template)
    except ValueError as error:
        raise RunError("text.template", str(error)) from None
    texts: list[str] = []
    size = 0
    for part in parts:
        if isinstance(part, NamedPlaceholder):
            if part.name not in values:
                raise RunError("text.template", f"`values` has no `{part.name}`")
            texts.append(text_of(values[part.name]))
        else:
            texts.append(part)
        size += len(texts[-1])
        if size > MAX_VALUE_SIZE:
            raise RunError("text.template", f"the text exceeds {MAX_VALUE_SIZE:,} characters")
    return "".join(texts)
