r"""How a model writes tool calls: read off what its chat template makes of one.

Every family has its own spelling (`<tool_call>\n{"name": ...}\n</tool_call>`, a bare
`{"name": ..., "parameters": ...}`, ...), and every template that takes tools spells calls of
earlier turns just so. So the template is asked: it renders a chat with one call, with two,
and with plain text in their place, and what stands around names and arguments is the format.
No list of families is kept, and what a model is held to when it calls a tool is, token for
token, what its next prompt will contain.

Knows templates. Refuses to know programs, grammars and token ids. Kept true: a format that
was found spells the probes' calls exactly as the template does; where the template shows no
tools, or spells arguments otherwise than as JSON, there is none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from ..program.errors import PromptError
from ..program.ir import Json
from .chat import ChatMessage
from .chat_template import ChatTemplate
from .tokenizer import Piece

_NAMES: Final = ("probe_first", "probe_second")
_ARGUMENTS: Final[dict[str, Json]] = {"alpha": 1, "beta": 2}
_SPELLED: Final = re.compile(r'\{"alpha"(?P<key>\s*:\s*)1(?P<item>\s*,\s*)"beta"(?P=key)2\}')
_TEXT: Final = "probe text"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What stands around the names and arguments of an answer's tool calls."""

    opening: str
    """Before the first name."""
    middle: str
    """Between a name and its arguments, which are a JSON object."""
    joint: str | None
    """From the end of one call's arguments to the name of the next; None: one call at most."""
    closing: str
    """After the last arguments."""
    key_separator: str
    item_separator: str
    """How the template spells JSON: `": "` and `", "`."""

    @property
    def marker(self) -> str:
        """What begins a call and nothing else, so that it may follow text.

        Empty where calls begin like any JSON: those stand at the beginning or are none.
        """
        return self.opening.split("{", 1)[0].rstrip("[ \n").lstrip()

    def spell(self, calls: list[tuple[str, dict[str, Json]]]) -> str:
        """The text of an answer that consists of these calls."""
        parts: list[str] = []
        for name, arguments in calls:
            parts += [self.joint or "" if parts else self.opening, name, self.middle]
            parts.append(
                json.dumps(
                    arguments,
                    ensure_ascii=False,
                    separators=(self.item_separator, self.key_separator),
                )
            )
        return "".join([*parts, self.closing])


def find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """The format of a template's tool calls; None if it has none that can be followed."""
    for role in ("user", "tool"):
        found = _find(template, ChatMessage(role, _said("next"), tool_call_id="probe0001"))
        if found is not None:
            return found
    return None


def _find(template: ChatTemplate, follower: ChatMessage) -> ToolFormat | None:
    """The format, from chats in which this message follows the calls."""
    try:
        plain = _render(template, follower, _TEXT, 0)
        one = _render(template, follower, "", 1)
    except PromptError:
        return None
    if _NAMES[0] not in plain or plain.count(_TEXT) != 1:
        return None  # it shows no tools, or does not show what was said
    before, after = plain.split(_TEXT)
    if not (one.startswith(before) and one.endswith(after)):
        return None
    single = re.fullmatch(
        f"(?P<opening>.*){_NAMES[0]}(?P<middle>.*){_SPELLED.pattern}(?P<closing>.*)",
        one[len(before) : len(one) - len(after)],
        re.DOTALL,
    )
    if single is None or "probe0" in single["opening"] + single["middle"] + single["closing"]:
        return None
    found = ToolFormat(
        opening=single["opening"],
        middle=single["middle"],
        joint=None,
        closing=single["closing"],
        key_separator=single["key"],
        item_separator=single["item"],
    )
    return _with_joint(found, template, follower, before, after)


def _with_joint(
    found: ToolFormat, template: ChatTemplate, follower: ChatMessage, before: str, after: str
) -> ToolFormat:
    """The format with what stands between two calls, if the template writes two."""
    try:
        two = _render(template, follower, "", 2)
    except PromptError:
        return found
    first = found.spell([(_NAMES[0], _ARGUMENTS)]).removesuffix(found.closing)
    start = f"{before}{first}"
    end = found.spell([(_NAMES[1], _ARGUMENTS)]).removeprefix(found.opening) + after
    if not (two.startswith(start) and two.endswith(end) and len(two) > len(start) + len(end)):
        return found
    return ToolFormat(
        opening=found.opening,
        middle=found.middle,
        joint=two[len(start) : len(two) - len(end)],
        closing=found.closing,
        key_separator=found.key_separator,
        item_separator=found.item_separator,
    )


def _render(
    template: ChatTemplate,
    follower: ChatMessage,
    text: str,
    num_calls: int,
) -> str:
    calls: list[Json] = [
        {
            "id": f"probe000{i}",
            "type": "function",
            "function": {"name": name, "arguments": _ARGUMENTS},
        }
        for i, name in enumerate(_NAMES[:num_calls])
    ]
    messages = [
        ChatMessage("user", _said("question")),
        ChatMessage("assistant", _said(text), tool_calls=calls or None),
        follower,
    ]
    properties = {name: {"type": "integer"} for name in _ARGUMENTS}
    tools: list[Json] = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "a probe",
                "parameters": {"type": "object", "properties": properties},
            },
        }
        for name in _NAMES
    ]
    rendered = template.render(messages, tools=tools, add_generation_prompt=False)
    return "".join([piece.text for piece in rendered.pieces])


def _said(text: str) -> tuple[Piece, ...]:
    return (Piece(text, special=False),)
