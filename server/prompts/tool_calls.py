"""Tool calls of an answer: the grammar that permits them, and parsing them from the text.

With tools an answer is text, calls, or text followed by calls, depending on the tool choice. A
grammar ensures that a call, once started, names a known tool, has arguments that match its schema,
and is written in the format of the model's template (`tool_format`). Schemas of tools that are not
strict are enforced as far as a grammar can, as in OpenAI's API.

Out of scope: token ids and engines.

Invariant: the concatenated output of `ContentStream` is the content that `parse_answer` finds in
the complete text.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from ..program.bounded_schema import bound_integers
from ..program.grammar import delimited, grammar_of, quoted
from ..program.ir import Constraint, Json
from ..program.tools import Tool, ToolSet
from .tool_format import ToolFormat

_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH: Final = 9
"""Some templates accept only ids of nine letters and digits."""
_IRREGULAR: Final = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Look-around and back-references."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call and the format in which its model writes calls."""

    tools: ToolSet
    format: ToolFormat

    def grammar(self, constraint: Constraint | None) -> str | None:
        """Return the grammar of the answer for engines; None for no restriction.

        Args:
            constraint: restricts the text of an answer without calls.
        """
        choice, marker = self.tools.choice, self.format.marker
        text = None if constraint is None else grammar_of(constraint)
        if choice == "none":
            return text if text or not marker else _lark(_text_without(marker))
        rules = _rules(self.tools, self.format)
        calls = f"{quoted(self.format.opening)} calls"
        if choice == "required":
            return _lark(f"start: {calls}\n{rules}")
        if text is not None:
            return _lark(f"start: @answer | {calls}\n{rules}", answer=text)
        if not marker:
            # Without a marker any text may begin like a call, so no text can be excluded.
            return None
        after = self.format.opening.partition(marker)[2]
        rest = f"{quoted(after)} calls" if after else "calls"
        return _lark(
            f"start: TEXT | begin {rest}\nbegin[lazy]: TEXT {quoted(marker)}\n"
            f"TEXT: /(.|\\n)*/\n{rules}"
        )

    def find(self, text: str) -> int:
        """Return where the calls of a text begin; its length if there are none."""
        if self.tools.choice == "none":
            return len(text)
        marker = self.format.marker
        at = text.find(marker) if marker else 0 if _begins(text, self.format.opening) else -1
        return len(text) if at < 0 else at


def _begins(text: str, opening: str) -> bool:
    return text.lstrip().startswith(opening.lstrip())


def _text_without(marker: str) -> str:
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", marker)
    return f"start: TEXT\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{delimited(escaped)}(.|\\n)*/"


def _rules(tools: ToolSet, tool_format: ToolFormat) -> str:
    """Return the grammar rules of `calls`, from the first name to the end."""
    more = (
        ""
        if tool_format.separator is None or not tools.is_parallel
        else f"({quoted(tool_format.separator)} call)*"
    )
    closing = quoted(tool_format.closing) if tool_format.closing else ""
    lines = [f"calls: call {more} {closing}"]
    heads = [
        f"{quoted(tool.name + tool_format.middle)} arguments_{i}"
        for i, tool in enumerate(tools.tools)
    ]
    lines.append(f"call: {' | '.join(heads)}")
    lines += [
        f"arguments_{i}: %json {_schema(tool, tool_format)}" for i, tool in enumerate(tools.tools)
    ]
    return "\n".join(lines)


def _schema(tool: Tool, tool_format: ToolFormat) -> str:
    parameters = tool.parameters if tool.is_strict else _regular(tool.parameters)
    schema = dict(bound_integers(parameters))
    schema.setdefault("type", "object")
    if "properties" in schema:
        # A function cannot use arguments that it does not declare.
        schema.setdefault("additionalProperties", False)
    schema["x-guidance"] = {
        "whitespace_flexible": False,
        "item_separator": tool_format.item_separator,
        "key_separator": tool_format.key_separator,
        "lenient": not tool.is_strict,
    }
    return json.dumps(schema)


def _regular(schema: Json) -> Json:
    """Return a schema without patterns that use look-around or back-references."""
    if isinstance(schema, list):
        return [_regular(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    pattern = schema.get("pattern")
    is_kept = not (isinstance(pattern, str) and _IRREGULAR.search(pattern))
    return {key: _regular(each) for key, each in schema.items() if is_kept or key != "pattern"}


def _lark(grammar: str, *, answer: str | None = None) -> str:
    grammars: list[Json] = [{"lark_grammar": grammar}]
    if answer is not None:
        grammars.append({**msgspec.json.decode(answer)["grammars"][0], "name": "answer"})
    return msgspec.json.encode({"grammars": grammars}).decode()


def parse_answer(text: str, use: ToolUse, *, name: str) -> tuple[str, list[Json]]:
    """Return an answer's content and its tool calls in OpenAI's shape.

    A truncated call has its arguments as far as they were written. Text that only resembles a call
    is content.

    Args:
        text: the complete answer.
        use: its tools.
        name: name of the answer. Ids of calls are hashes of it, so the same answer has the same
            ids.
    """
    begin = use.find(text)
    tool_format = use.format
    known = {tool.name for tool in use.tools.tools}
    calls: list[Json] = []
    at = begin
    opening = tool_format.opening.lstrip()
    while True:
        start = _after(text, at, opening)
        if start is None or (middle := text.find(tool_format.middle, start)) < 0:
            break
        function, begins = text[start:middle], middle + len(tool_format.middle)
        if function not in known:
            break
        ends = _end_of_json(text, begins)
        written = text[begins:] if ends is None else text[begins:ends]
        calls.append(
            {
                "id": _id(f"{name}/{len(calls)}"),
                "type": "function",
                "function": {"name": function, "arguments": written},
            }
        )
        if ends is None or tool_format.separator is None:
            break
        at, opening = ends, tool_format.separator
    return (text[:begin].rstrip() if calls else text), calls


def _after(text: str, at: int, expected: str) -> int | None:
    """Return the position after the expected text, ignoring blanks before it; None if it is
    missing.
    """
    if text.startswith(expected, at):
        return at + len(expected)
    at += len(text[at:]) - len(text[at:].lstrip())
    expected = expected.lstrip()
    return at + len(expected) if text.startswith(expected, at) else None


def _end_of_json(text: str, at: int) -> int | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return end if isinstance(value, dict) else None


def _id(name: str) -> str:
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest())
    letters = []
    for _ in range(_ID_LENGTH):
        number, index = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[index])
    return "".join(letters)


class ContentStream:
    """Streams the content of an answer with tools.

    Text that may be the start of a call, and blanks before it, are withheld.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._text = ""
        self._num_emitted = 0

    def feed(self, text: str) -> str:
        """Add text of the answer; return the part that is certainly content."""
        self._text += text
        end = self._use.find(self._text)
        if end == len(self._text):
            end -= self._num_withheld()
        end = len(self._text[:end].rstrip())
        new_content = self._text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return new_content

    def _num_withheld(self) -> int:
        """Return the number of characters at the end that may be the start of a call."""
        if self._use.tools.choice == "none":
            return 0
        text, marker = self._text, self._use.format.marker
        if not marker:
            opening = self._use.format.opening.lstrip()
            return len(text) if opening.startswith(text.lstrip()) else 0
        max_overlap = min(len(marker) - 1, len(text))
        return next((n for n in range(max_overlap, 0, -1) if text.endswith(marker[:n])), 0)
