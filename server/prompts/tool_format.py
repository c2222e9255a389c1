r"""The format in which a model writes tool calls, derived from its chat template.

Every model family has its own format (`<tool_call>\n{"name": ...}\n</tool_call>`, a bare `{"name":
..., "parameters": ...}`, ...), and every template with tool support writes earlier calls in it. The
template therefore renders probe chats with one call, with two, and with plain text instead; the
text around names and arguments is the format. No list of families is needed, and the format that
the grammar enforces is, token for token, what the next prompt contains.

Out of scope: programs, grammars and token ids.

Invariants: a returned format writes the probe calls exactly as the template does; a template that
ignores tools, or does not write arguments as JSON, has no format.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from ..program.errors import PromptError
from ..program.ir import Json
from .chat import TemplateMessage
from .chat_template import ChatTemplate
from .tokenizer import PromptPiece

_NAMES: Final = ("probe_first", "probe_second")
_ARGUMENTS: Final[dict[str, Json]] = {"alpha": 1, "beta": 2}
_ARGUMENTS_PATTERN: Final = re.compile(
    r'\{"alpha"(?P<key>\s*:\s*)1(?P<item>\s*,\s*)"beta"(?P=key)2\}'
)
_TEXT: Final = "probe text"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text around the names and arguments of tool calls."""

    opening: str
    """Text before the first name."""
    middle: str
    """Text between a name and its arguments, a JSON object."""
    separator: str | None
    """Text between one call's arguments and the name of the next; None if only one call is
    possible."""
    closing: str
    """Text after the last arguments."""
    key_separator: str
    item_separator: str
    """The template's JSON separators: `": "` and `", "`."""

    @property
    def marker(self) -> str:
        """Return the text that only calls begin with, so that calls may follow other text.

        Empty if calls begin like any JSON. Calls are then recognised at the start of an answer
        only.
        """
        return self.opening.split("{", 1)[0].rstrip("[ \n").lstrip()

    def render_calls(self, calls: list[tuple[str, dict[str, Json]]]) -> str:
        """Return the text of an answer that consists of these calls."""
        parts: list[str] = []
        for name, arguments in calls:
            parts += [self.separator or "" if parts else self.opening, name, self.middle]
            parts.append(
                json.dumps(
                    arguments,
                    ensure_ascii=False,
                    separators=(self.item_separator, self.key_separator),
                )
            )
        return "".join([*parts, self.closing])


def find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """Return the format of a template's tool calls; None if it has no usable one."""
    for role in ("user", "tool"):
        tool_format = _find(
            template, TemplateMessage(role, _content("next"), tool_call_id="probe0001")
        )
        if tool_format is not None:
            return tool_format
    return None


def _find(template: ChatTemplate, follower: TemplateMessage) -> ToolFormat | None:
    """Return the format, from chats in which `follower` is the message after the calls."""
    try:
        plain = _render(template, follower, _TEXT, 0)
        one = _render(template, follower, "", 1)
    except PromptError:
        return None
    if _NAMES[0] not in plain or plain.count(_TEXT) != 1:
        return None  # The template ignores tools, or omits the message.
    before, after = plain.split(_TEXT)
    if not (one.startswith(before) and one.endswith(after)):
        return None
    single = re.fullmatch(
        f"(?P<opening>.*){_NAMES[0]}(?P<middle>.*){_ARGUMENTS_PATTERN.pattern}(?P<closing>.*)",
        one[len(before) : len(one) - len(after)],
        re.DOTALL,
    )
    if single is None or "probe0" in single["opening"] + single["middle"] + single["closing"]:
        return None
    tool_format = ToolFormat(
        opening=single["opening"],
        middle=single["middle"],
        separator=None,
        closing=single["closing"],
        key_separator=single["key"],
        item_separator=single["item"],
    )
    return _with_separator(tool_format, template, follower, before, after)


def _with_separator(
    tool_format: ToolFormat,
    template: ChatTemplate,
    follower: TemplateMessage,
    before: str,
    after: str,
) -> ToolFormat:
    """Return the format with the text between two calls, if the template writes two."""
    try:
        two = _render(template, follower, "", 2)
    except PromptError:
        return tool_format
    first = tool_format.render_calls([(_NAMES[0], _ARGUMENTS)]).removesuffix(tool_format.closing)
    start = f"{before}{first}"
    end = (
        tool_format.render_calls([(_NAMES[1], _ARGUMENTS)]).removeprefix(tool_format.opening)
        + after
    )
    if not (two.startswith(start) and two.endswith(end) and len(two) > len(start) + len(end)):
        return tool_format
    return ToolFormat(
        opening=tool_format.opening,
        middle=tool_format.middle,
        separator=two[len(start) : len(two) - len(end)],
        closing=tool_format.closing,
        key_separator=tool_format.key_separator,
        item_separator=tool_format.item_separator,
    )


def _render(
    template: ChatTemplate,
    follower: TemplateMessage,
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
        TemplateMessage("user", _content("question")),
        TemplateMessage("assistant", _content(text), tool_calls=calls or None),
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


def _content(text: str) -> tuple[PromptPiece, ...]:
    return (PromptPiece(text, special=False),)
