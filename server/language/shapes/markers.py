"""Markers: what stands for a slot, a name or a line while a statement is compiled for its shape.

A marker is a name in Python's syntax with a number in it, so it can be found again in the JSON of
the nodes. A text that contains what looks like a marker is not compiled by its shapes.
"""

from __future__ import annotations

import re
from typing import Final

from .slots import MAX_SHORT_TEXT

_PREFIX: Final = "Zq7"
_FIRST_LINE: Final = 900_000_000
_MARKER = re.compile(rf"{_PREFIX}([0-9]+)<?_*z|(?<=\"line\":)({_FIRST_LINE // 10_000}[0-9]{{4}})")
MAX_LINES: Final = 10_000


def name_marker(number: int) -> str:
    """Return the marker of a name."""
    return f"{_PREFIX}{number}z"


def text_marker(number: int, example: str) -> str:
    """Return the marker of a string, with the properties of an example that the compiler tests."""
    control = "<" if "<" in example or "[" in example else ""
    filler = "_" * MAX_SHORT_TEXT if len(example) > MAX_SHORT_TEXT else ""
    return f"{_PREFIX}{number}{control}{filler}z"


def line_marker(offset: int) -> int:
    """Return the marker of the line at an offset from the first one of a statement."""
    return _FIRST_LINE + offset


def may_have_marker(text: str) -> bool:
    """Return whether a text contains what looks like a part of a marker."""
    return _PREFIX in text or str(_FIRST_LINE // 10_000) in text


def number_of(text: str) -> int | None:
    """Return the number of a marker; None for any other text."""
    match = _MARKER.fullmatch(text)
    return int(match[1]) if match and match[1] else None


def split_at_markers(json: str) -> list[str | int]:
    """Split JSON into literal parts and markers.

    Returns: alternately a literal text and what stands there: the number of a marker from 0 on, or
        -1 - the offset of a line.
    """
    parts: list[str | int] = []
    here = 0
    for match in _MARKER.finditer(json):
        parts.append(json[here : match.start()])
        parts.append(int(match[1]) if match[1] else _FIRST_LINE - int(match[2]) - 1)
        here = match.end()
    parts.append(json[here:])
    return parts
