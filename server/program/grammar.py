"""Conversion of a constraint to the grammar that an engine compiles: llguidance's JSON form.

    choices      one terminal, the alternatives as literals
    regex        one terminal that matches the whole text
    json_schema  compact: `{"a":1}`, no spaces between tokens; integers fit 64 bits
    type         string, list: a schema; int, float, bool: a terminal with JSON's spelling
    lark         unchanged

Compact JSON leaves a model the fewest choices, and it cannot write spaces forever. The numbers of
`int` and `float` fit 64 bits. The length of a list and of its strings is bounded, so that it ends.

Out of scope: whether a grammar compiles; the engine checks that.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec
from msgspec import UNSET

from .bounded_schema import bound_integers
from .content import Constraint, Json

MAX_LIST_ITEMS: Final = 64
MAX_LIST_CHARACTERS: Final = 1_024
"""The maximum length of one string in a list."""

_INT: Final = r"-?(0|[1-9][0-9]{0,17})"
_FLOAT: Final = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?([eE][-+]?[0-9]{1,2})?"
_STRING: Final[dict[str, Json]] = {"type": "string"}
_LIST: Final[dict[str, Json]] = {
    "type": "array",
    "items": {"type": "string", "maxLength": MAX_LIST_CHARACTERS},
    "minItems": 1,
    "maxItems": MAX_LIST_ITEMS,
}
_OPTIONS: Final = {"whitespace_flexible": False}


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of a checked constraint; equal constraints give equal text."""
    if constraint.choices is not UNSET:
        return _lark(_choices(constraint.choices))
    if constraint.regex is not UNSET:
        return _lark(f"start: /{delimited(constraint.regex)}/")
    if constraint.json_schema is not UNSET:
        return _schema(constraint.json_schema)
    if constraint.lark is not UNSET:
        return _lark(constraint.lark)
    match constraint.type:
        case "string":
            return _schema(_STRING)
        case "list":
            return _schema(_LIST)
        case "int":
            return _lark(f"start: /{_INT}/")
        case "float":
            return _lark(f"start: /{_FLOAT}/")
        case "bool":
            return _lark('start: "true" | "false"')
    raise AssertionError("a checked constraint has exactly one field")


def _lark(grammar: str) -> str:
    return _encode({"lark_grammar": grammar})


def _choices(choices: list[str]) -> str:
    # One terminal: thousands of rules would be too many for the parser. A terminal cannot be
    # empty, so an empty choice is a separate alternative.
    written = [quoted(choice) for choice in choices if choice]
    starts = ['""'] * ("" in choices) + ["CHOICE"] * bool(written)
    rule = f"start: {' | '.join(starts)}"
    return f"{rule}\nCHOICE: {' | '.join(written)}" if written else rule


def _schema(schema: dict[str, Json] | bool) -> str:
    if schema is False:
        return _encode({"json_schema": False})
    # Our options replace those of the schema.
    content = {} if schema is True else bound_integers(schema)
    return _encode({"json_schema": {**content, "x-guidance": _OPTIONS}})


def _encode(grammar: dict[str, Json]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def quoted(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def delimited(regex: str) -> str:
    """Return a regex that can be written between slashes on one line."""
    written: list[str] = []
    is_escaped = False
    for char in regex:
        if char < " " or char == "\x7f":
            # Control characters must be escaped; an escaped one already has its backslash.
            written.append(f"{'' if is_escaped else chr(92)}x{ord(char):02x}")
        elif char == "/" and not is_escaped:
            written.append("\\/")
        else:
            written.append(char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(written)
