"""A constraint as the grammar that an engine compiles: llguidance's JSON form.

    choices      one terminal, the alternatives literally
    regex        one terminal; it has to match the whole text
    json_schema  as it stands, written compactly: `{"a":1}`, no blanks between tokens
    type         string, list: a schema; int, float, bool: a terminal of JSON's own spelling
    lark         as it stands

Compact JSON leaves a model the fewest turns to take, and no way to write blanks for ever.
Numbers are bounded so that whatever comes out fits 64 bits; a list is one of strings, and
bounded too, so that it ends.

Pure: from a record to text. Refuses to know whether a grammar compiles; the engine says so.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec
from msgspec import UNSET

from .ir import Constraint, Json

MAX_LIST_ITEMS: Final = 64
MAX_LIST_CHARACTERS: Final = 1_024
"""Of one string in a list."""

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
    """The constraint as an engine wants it; the same constraint gives the same text."""
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
    # One terminal: as rules of their own, thousands would be too many for the parser. It
    # may not be empty, so an empty choice stands beside it.
    written = [quoted(choice) for choice in choices if choice]
    starts = ['""'] * ("" in choices) + ["CHOICE"] * bool(written)
    rule = f"start: {' | '.join(starts)}"
    return f"{rule}\nCHOICE: {' | '.join(written)}" if written else rule


def _schema(schema: dict[str, Json] | bool) -> str:
    if schema is False:
        return _encode({"json_schema": False})
    # How the text is written is ours to say, whatever the schema brings along.
    content = {} if schema is True else schema
    return _encode({"json_schema": {**content, "x-guidance": _OPTIONS}})


def _encode(grammar: dict[str, Json]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def delimited(regex: str) -> str:
    """A regex as it may stand between slashes on one line."""
    written: list[str] = []
    is_escaped = False
    for char in regex:
        if char < " " or char == "\x7f":
            # No character of its own between slashes; a backslash before it changes nothing.
            written.append(f"{'' if is_escaped else chr(92)}x{ord(char):02x}")
        elif char == "/" and not is_escaped:
            written.append("\\/")
        else:
            written.append(char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(written)
