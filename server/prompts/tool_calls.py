"""Tool calls in an answer: the grammar that leaves room for them, and reading them out.

Under tools an answer is text, or calls, or text and then calls, as the choice says. A
grammar sees to it that a call, once begun, is of a tool that there is, with arguments of its
schema, spelled as the model's template spells them (`tool_format`). Schemas of tools that
are not strict are kept as far as a grammar can keep them, as OpenAI has it.

Knows formats and tool sets; refuses to know token ids and engines. Kept true: what
`ContentStream` gives out, joined, is the content that `read_answer` finds in the whole text.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from ..program.grammar import delimited, grammar_of, quoted
from ..program.ir import Constraint, Json
from ..program.tools import Tool, ToolSet
from .tool_format import ToolFormat

_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH: Final = 9
"""Some templates take ids of nine letters and digits and nothing else."""
_IRREGULAR: Final = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Looking around, and back at a group."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call and how its model writes them."""

    tools: ToolSet
    format: ToolFormat

    def grammar(self, constraint: Constraint | None) -> str | None:
        """What the answer is held to, as engines want it; None: nothing.

        Args:
            constraint: what text has to keep where it is no call.
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
            # Any text may begin like a call, so nothing could be forbidden.
            return None
        after = self.format.opening.partition(marker)[2]
        rest = f"{quoted(after)} calls" if after else "calls"
        return _lark(
            f"start: TEXT | begin {rest}\nbegin[lazy]: TEXT {quoted(marker)}\n"
            f"TEXT: /(.|\\n)*/\n{rules}"
        )

    def find(self, text: str) -> int:
        """Where the calls of a text begin; its length if it has none."""
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


def _rules(tools: ToolSet, form: ToolFormat) -> str:
    """Rules of `calls`: from the first name to the end."""
    more = "" if form.joint is None or not tools.is_parallel else f"({quoted(form.joint)} call)*"
    closing = quoted(form.closing) if form.closing else ""
    lines = [f"calls: call {more} {closing}"]
    heads = [
        f"{quoted(tool.name + form.middle)} arguments_{i}" for i, tool in enumerate(tools.tools)
    ]
    lines.append(f"call: {' | '.join(heads)}")
    lines += [f"arguments_{i}: %json {_schema(tool, form)}" for i, tool in enumerate(tools.tools)]
    return "\n".join(lines)


def _schema(tool: Tool, form: ToolFormat) -> str:
    schema: dict[str, Json] = dict(tool.parameters if tool.is_strict else _regular(tool.parameters))
    schema.setdefault("type", "object")
    if "properties" in schema:
        # What a function gets by name it cannot do anything with unless it has the name.
        schema.setdefault("additionalProperties", False)
    schema["x-guidance"] = {
        "whitespace_flexible": False,
        "item_separator": form.item_separator,
        "key_separator": form.key_separator,
        "lenient": not tool.is_strict,
    }
    return json.dumps(schema)


def _regular(schema: Json) -> Json:
    """A schema without the patterns that look around or back: no grammar can keep those."""
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


def read_answer(text: str, use: ToolUse, *, name: str) -> tuple[str, list[Json]]:
    """An answer's content and its tool calls, in OpenAI's shape.

    A call that was cut has its arguments as far as they were written; a text that only looks
    like a call is content.

    Args:
        text: the whole answer.
        use: its tools.
        name: of the answer; ids of calls are hashes of it, so the same answer has the same.
    """
    begin = use.find(text)
    form = use.format
    known = {tool.name for tool in use.tools.tools}
    calls: list[Json] = []
    at = begin
    opening = form.opening.lstrip()
    while True:
        start = _after(text, at, opening)
        if start is None or (middle := text.find(form.middle, start)) < 0:
            break
        function, begins = text[start:middle], middle + len(form.middle)
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
        if ends is None or form.joint is None:
            break
        at, opening = ends, form.joint
    return (text[:begin].rstrip() if calls else text), calls


def _after(text: str, at: int, expected: str) -> int | None:
    """The place behind a text that has to stand here, blanks before it aside."""
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
    """The content of an answer under tools, as it comes.

    Text that may turn out to be the beginning of a call, and the blanks before it, wait.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._text = ""
        self._num_told = 0

    def feed(self, text: str) -> str:
        """Take more of the answer; return what is certainly content."""
        self._text += text
        end = self._use.find(self._text)
        if end == len(self._text):
            end -= self._num_held()
        end = len(self._text[:end].rstrip())
        told = self._text[self._num_told : end]
        self._num_told = max(self._num_told, end)
        return told

    def _num_held(self) -> int:
        """Characters at the end that may be the beginning of a call."""
        if self._use.tools.choice == "none":
            return 0
        text, marker = self._text, self._use.format.marker
        if not marker:
            opening = self._use.format.opening.lstrip()
            return len(text) if opening.startswith(text.lstrip()) else 0
        most = min(len(marker) - 1, len(text))
        return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)
