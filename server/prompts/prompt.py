"""Rendering of a `generate` node and the values of its variables into the pieces of a prompt.

A `prompt` has a boundary after each segment. `messages` have one after each content segment of the
flattened chat, where a string is one segment, a message without content an empty one, and a splice
is one segment as a whole (see `prompt_prefix`).

Out of scope: token ids.

Invariants: a value never becomes a special piece; `ends` has exactly one entry per boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from ..program.checks import listed
from ..program.errors import ConureError, PromptError
from ..program.expressions.budget import WorkBudget
from ..program.expressions.evaluate import evaluate, input_expression, variables
from ..program.expressions.values import text_of
from ..program.ir import Expression, GenerateNode, Json, Message, Segment
from .chat import TemplateMessage
from .chat_template import ChatTemplate
from .tokenizer import PromptPiece

_SPLICED_ROLES: Final = frozenset(
    {"assistant", "developer", "function", "ipython", "system", "tool", "user"}
)
"""Roles of messages in values. In a program's own messages any word is allowed."""
MAX_MESSAGES: Final = 100_000
"""Messages of a chat with splices: a list may be spliced several times."""
MAX_CHARS: Final = 128 * 1024 * 1024
"""Characters of a prompt, more than any model's context: a value may be read many times."""


class PromptLength:
    """Counts the characters of a prompt while it is rendered."""

    def __init__(self) -> None:
        self._num_chars = 0

    def add(self, num_chars: int, path: str) -> None:
        """Add the characters of a part.

        Raises:
            PromptError: `prompt.too_long` if the prompt has more than `MAX_CHARS`.
        """
        self._num_chars += num_chars
        if self._num_chars > MAX_CHARS:
            advice = "insert shorter values, or insert them less often"
            raise _too_long(f"{MAX_CHARS:,} characters", advice, path)


class _NotAMessageError(Exception):
    """A value, or an item of it, is not a message."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(reason)
        self.path = path


class RenderedPrompt(NamedTuple):
    """A prompt, or the part of it before an output."""

    pieces: tuple[PromptPiece, ...]
    ends: tuple[int, ...]
    """Number of characters of the joined pieces up to the end of each segment; never decreases."""
    prefix_break: bool
    """Whether the text up to an end may depend on later segments."""
    messages: tuple[TemplateMessage, ...] | None = None
    """The messages that the chat template received; None for a `prompt`."""


def render_value(value: Json) -> str:
    """Return the text of a value in a prompt: strings unchanged, other values as compact JSON."""
    return text_of(value)


def slot_segments(node: GenerateNode) -> list[range]:
    """Return the indices of the segments before each output of a `prompt`; empty for messages."""
    if node.prompt is UNSET:
        return []
    ends = [index for index, segment in enumerate(node.prompt) if segment.output is not UNSET]
    starts = [0, *(end + 1 for end in ends)]
    return [range(start, end) for start, end in zip(starts, ends, strict=False)]


def render_slot(
    node: GenerateNode,
    slot: int,
    values: Mapping[str, Json],
    budget: WorkBudget | None = None,
    *,
    segments: range | None = None,
) -> RenderedPrompt:
    """Return the part of a prompt between the previous output and an output.

    Args:
        node: a node with `prompt`.
        slot: index of the output among the prompt's outputs.
        values: values of all variables that these segments read.
        budget: charged for expressions.
        segments: the indices of the part's segments, if `slot_segments` has found them.

    Raises:
        PromptError: `engine.unsupported_part` for a multimodal segment; `prompt.too_long` if the
            part has more than `MAX_CHARS` characters.
        ExpressionError: if an expression fails on the values.
    """
    assert node.prompt is not UNSET
    length = PromptLength()
    pieces = [
        _render_segment(
            node.prompt[index], values, f"nodes.{node.id}.prompt[{index}]", budget, length
        )
        for index in (slot_segments(node)[slot] if segments is None else segments)
    ]
    ends: list[int] = []
    offset = 0
    for piece in pieces:
        offset += len(piece.text)
        ends.append(offset)
    return RenderedPrompt(tuple(pieces), tuple(ends), False)


def render_chat(
    node: GenerateNode,
    values: Mapping[str, Json],
    template: ChatTemplate,
    budget: WorkBudget | None = None,
) -> RenderedPrompt:
    """Return a node's messages as one prompt that the assistant's answer continues.

    Args:
        node: a node with `messages`.
        values: values of all variables that the messages read.
        template: the model's chat template.
        budget: charged for expressions.

    Raises:
        PromptError: `prompt.splice` if a spliced value is not a message; `prompt.too_long` if the
            splices give too many messages, or all messages too many characters; otherwise as
            `ChatTemplate.render` and `render_slot`.
        ExpressionError: if an expression fails on the values.
    """
    assert node.messages is not UNSET
    messages: list[TemplateMessage] = []
    last_segments: list[int] = []
    """Index of the last template segment before each boundary."""
    num_segments, length = 0, PromptLength()
    for index, message in enumerate(node.messages):
        path = f"nodes.{node.id}.messages[{index}]"
        if message.splice is not UNSET:
            value = _spliced_value(message.splice, values, budget)
            _check_count(len(messages) + (len(value) if isinstance(value, list) else 1), path)
            try:
                spliced = _read_splice(value, f"{path}.splice", length)
            except _NotAMessageError as error:
                raise _splice_error(node.id, message.splice, error) from None
            messages += spliced
            num_segments += sum(len(each.content) for each in spliced)
            last_segments.append(num_segments - 1)
        else:
            rendered = _render_message(message, values, path, budget, length)
            messages.append(rendered)
            last_segments += range(num_segments, num_segments + len(rendered.content))
            num_segments += len(rendered.content)
    tools = None if node.tools is UNSET or not node.tools else node.tools
    try:
        chat = template.render(messages, tools=tools, options=node.template_options)
    except PromptError as error:
        raise _at(error, f"nodes.{node.id}.messages") from error
    # A splice of no messages ends with the segment before it, or at 0.
    ends = tuple([chat.ends[last] if last >= 0 else 0 for last in last_segments])
    return RenderedPrompt(chat.pieces, ends, chat.prefix_break, tuple(messages))


def _render_segment(
    segment: Segment,
    values: Mapping[str, Json],
    path: str,
    budget: WorkBudget | None,
    length: PromptLength,
) -> PromptPiece:
    """Return a text or input segment as a piece."""
    if segment.text is not UNSET:
        length.add(len(segment.text), path)
        return PromptPiece(segment.text, segment.special)
    if segment.part is not UNSET:
        raise _unsupported_part(path)
    assert segment.input is not UNSET
    if isinstance(segment.input, str):
        value = values[segment.input]
    else:
        try:
            value = evaluate(input_expression(segment.input), values, budget=budget)
        except ConureError as error:
            raise _at(error, f"{path}.input") from error
    text = render_value(value)
    length.add(len(text), path)
    return PromptPiece(text, special=False)


def _render_message(
    message: Message,
    values: Mapping[str, Json],
    path: str,
    budget: WorkBudget | None,
    length: PromptLength,
) -> TemplateMessage:
    """Return a message of the program. Its text never yields special tokens, even if marked
    special.
    """
    assert message.role is not UNSET
    content: tuple[PromptPiece, ...]
    if isinstance(message.content, list) and message.content:
        content = tuple(
            [
                PromptPiece(
                    _render_segment(each, values, f"{path}.content[{i}]", budget, length).text,
                    special=False,
                )
                for i, each in enumerate(message.content)
            ]
        )
    elif isinstance(message.content, str):
        content = (PromptPiece(message.content, special=False),)
    else:
        content = (PromptPiece("", special=False),)
    return TemplateMessage(
        role=message.role,
        content=content,
        name=None if message.name is UNSET else message.name,
        tool_calls=_read_tool_calls(message.tool_calls),
        tool_call_id=None if message.tool_call_id is UNSET else message.tool_call_id,
    )


def _spliced_value(
    splice: Expression, values: Mapping[str, Json], budget: WorkBudget | None
) -> Json:
    if isinstance(splice, str):
        return values[splice]
    return evaluate(splice, values, budget=budget)


def _splice_error(node_id: str, splice: Expression, error: _NotAMessageError) -> PromptError:
    names = listed(sorted(variables(input_expression(splice))))
    return PromptError(
        "prompt.splice",
        f"Node `{node_id}` splices {names}, which is not a message or a list of messages: {error}.",
        path=error.path,
    )


def _check_count(num_messages: int, path: str) -> None:
    if num_messages > MAX_MESSAGES:
        advice = "splice a shorter list, or splice it less often"
        raise _too_long(f"{MAX_MESSAGES:,} messages", advice, path)


def _too_long(most: str, advice: str, path: str) -> PromptError:
    return PromptError("prompt.too_long", f"More than {most} in one prompt; {advice}.", path=path)


def _read_splice(value: Json, path: str, length: PromptLength) -> list[TemplateMessage]:
    """Return the messages of a spliced value: one message or a list of messages.

    Raises:
        _NotAMessageError: if the value is neither.
        PromptError: `prompt.too_long`; as `_read_content`.
    """
    if isinstance(value, list):
        messages = [_read_message(each, f"{path}[{index}]") for index, each in enumerate(value)]
    else:
        messages = [_read_message(value, path)]
    for message in messages:
        length.add(sum(len(piece.text) for piece in message.content), path)
        if message.tool_calls is not None:
            length.add(len(msgspec.json.encode(message.tool_calls)), path)
    return messages


def _read_message(value: Json, path: str) -> TemplateMessage:
    """Return one message of a spliced value, without the fields that templates do not read.

    Raises:
        _NotAMessageError: if the value is not a message.
        PromptError: as `_read_content`.
    """
    if not isinstance(value, dict):
        raise _NotAMessageError("it is not an object with a role", path)
    role = value.get("role")
    if not isinstance(role, str) or role not in _SPLICED_ROLES:
        raise _NotAMessageError(
            f"its role {role!r:.80} is not one of {sorted(_SPLICED_ROLES)}", path
        )
    tool_calls = value.get("tool_calls")
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise _NotAMessageError("its tool_calls must be a list", path)
    if value.get("content") is None and not tool_calls:
        others = sorted(value.keys() - {"role", "content"})
        has = f"it has {', '.join(map(repr, others[:10]))}, but " if others else "it has "
        raise _NotAMessageError(
            f"{has}no `content`, so the prompt would contain an empty turn", path
        )
    for key in ("name", "tool_call_id"):
        if not isinstance(value.get(key), str | None):
            raise _NotAMessageError(f"its {key} must be a string", path)
    return TemplateMessage(
        role=role,
        content=_read_content(value.get("content"), path),
        name=value.get("name"),
        tool_calls=_read_tool_calls(tool_calls),
        tool_call_id=value.get("tool_call_id"),
    )


def _read_content(content: Json, path: str) -> tuple[PromptPiece, ...]:
    """Return the content of a spliced message: a string, a list of text parts, or null.

    Raises:
        _NotAMessageError: for another type.
        PromptError: `engine.unsupported_part` for a part that is not text.
    """
    if isinstance(content, str):
        return (PromptPiece(content, special=False),)
    if content is None:
        return (PromptPiece("", special=False),)
    if not isinstance(content, list):
        raise _NotAMessageError("its content must be a string, a list or null", path)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        elif isinstance(kind, str) and kind != "text":
            raise _unsupported_part(f"{path}.content[{index}]")
        else:
            raise _NotAMessageError(f"part {index} of its content has no type or no text", path)
    return (PromptPiece("".join(texts), special=False),)


def _read_tool_calls(tool_calls: Sequence[Json] | msgspec.UnsetType | None) -> list[Json] | None:
    """Return tool calls as templates expect them: arguments as an object instead of JSON text.

    OpenAI sends the arguments as the string that the model wrote. A string that is not a JSON
    object stays a string. An empty list becomes None.
    """
    if not tool_calls:
        return None
    return [_read_tool_call(call) for call in tool_calls]


def _read_tool_call(call: Json) -> Json:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return call
    if not isinstance(decoded, dict):
        return call
    return {**call, "function": {**function, "arguments": decoded}}


def _unsupported_part(path: str) -> PromptError:
    return PromptError(
        "engine.unsupported_part",
        "The model accepts text only; remove the part or use a multimodal model.",
        path=path,
    )


def _at(error: ConureError, path: str) -> ConureError:
    """Return the error with a path, unless it has one."""
    if error.path is not None:
        return error
    return type(error)(error.code, error.message, path=path)
