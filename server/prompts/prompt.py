"""A `generate` node and the values of its variables into the pieces of a prompt.

Knows the segments and messages of the IR and the order of their boundaries: in `prompt`
after each segment, in `messages` after each content segment of the flattened chat, where a
string is one segment, a message without content an empty one, and a splice one as a whole
(`rope.prefix_hash` without definitions).
Refuses to know token ids. Kept true: a value never becomes a special piece, and `ends` has
exactly one entry for each boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from ..program.errors import ConureError, PromptError
from ..program.expression import evaluate, input_expression
from ..program.ir import Expression, Generate, Json, Message, Segment
from ..program.value import text_of
from .chat import ChatMessage
from .chat_template import ChatTemplate
from .tokenizer import Piece

_SPLICED_ROLES: Final = frozenset(
    {"assistant", "developer", "function", "ipython", "system", "tool", "user"}
)
"""Roles of messages that come as values. In a program's own messages any word is one."""


class Rendered(NamedTuple):
    """A prompt, or the part of one that an output continues."""

    pieces: tuple[Piece, ...]
    ends: tuple[int, ...]
    """Characters of the joined pieces up to the end of each segment, never decreasing."""
    prefix_break: bool
    """True: the text up to an end may depend on what comes after it."""


def render_value(value: Json) -> str:
    """Return a value as it stands in a prompt: a string as it is, else compact JSON."""
    return text_of(value)


def render_slot(node: Generate, slot: int, values: Mapping[str, Json]) -> Rendered:
    """Return what stands in a growing prompt between an output and the one before it.

    Args:
        node: a node with `prompt`.
        slot: index of the output among the prompt's outputs.
        values: a value for every variable that these segments read.

    Raises:
        PromptError: `engine.unsupported_part` for a multimodal segment.
        ExpressionError: if an expression fails on the values.
    """
    assert node.prompt is not UNSET
    outputs = [i for i, segment in enumerate(node.prompt) if segment.output is not UNSET]
    start = outputs[slot - 1] + 1 if slot else 0
    pieces = [
        _render_segment(node.prompt[index], values, f"nodes.{node.id}.prompt[{index}]")
        for index in range(start, outputs[slot])
    ]
    ends: list[int] = []
    offset = 0
    for piece in pieces:
        offset += len(piece.text)
        ends.append(offset)
    return Rendered(tuple(pieces), tuple(ends), False)


def render_chat(node: Generate, values: Mapping[str, Json], template: ChatTemplate) -> Rendered:
    """Return a node's messages as one prompt, ready for the assistant's answer.

    Args:
        node: a node with `messages`.
        values: a value for every variable that the messages read.
        template: the model's.

    Raises:
        PromptError: `prompt.splice` if a spliced value is no message; else as
            `ChatTemplate.render` and `render_slot` do.
        ExpressionError: if an expression fails on the values.
    """
    assert node.messages is not UNSET
    messages: list[ChatMessage] = []
    lasts: list[int] = []
    """For each boundary, the index of the template's segment that ends there."""
    num_segments = 0
    for index, message in enumerate(node.messages):
        path = f"nodes.{node.id}.messages[{index}]"
        if message.splice is not UNSET:
            spliced = _read_splice(_spliced_value(message.splice, values), f"{path}.splice")
            messages += spliced
            num_segments += sum(len(each.content) for each in spliced)
            lasts.append(num_segments - 1)
        else:
            rendered = _render_message(message, values, path)
            messages.append(rendered)
            lasts += range(num_segments, num_segments + len(rendered.content))
            num_segments += len(rendered.content)
    tools = None if node.tools is UNSET or not node.tools else node.tools
    try:
        chat = template.render(messages, tools=tools)
    except PromptError as error:
        raise _at(error, f"nodes.{node.id}.messages") from error
    # Splices of no messages come before the first segment, or end with the one before.
    ends = tuple([chat.ends[last] if last >= 0 else 0 for last in lasts])
    return Rendered(chat.pieces, ends, chat.prefix_break)


def _render_segment(segment: Segment, values: Mapping[str, Json], path: str) -> Piece:
    """Return a text or an input as a piece."""
    if segment.text is not UNSET:
        return Piece(segment.text, segment.special)
    if segment.part is not UNSET:
        raise _unsupported_part(path)
    assert segment.input is not UNSET
    if isinstance(segment.input, str):
        value = values[segment.input]
    else:
        try:
            value = evaluate(input_expression(segment.input), values)
        except ConureError as error:
            raise _at(error, f"{path}.input") from error
    return Piece(render_value(value), special=False)


def _render_message(message: Message, values: Mapping[str, Json], path: str) -> ChatMessage:
    """Return a program's own message. Its text never yields special tokens, marked or not."""
    assert message.role is not UNSET
    content: tuple[Piece, ...]
    if isinstance(message.content, list) and message.content:
        content = tuple(
            [
                Piece(_render_segment(each, values, f"{path}.content[{i}]").text, special=False)
                for i, each in enumerate(message.content)
            ]
        )
    elif isinstance(message.content, str):
        content = (Piece(message.content, special=False),)
    else:
        content = (Piece("", special=False),)
    return ChatMessage(
        role=message.role,
        content=content,
        name=None if message.name is UNSET else message.name,
        tool_calls=_read_tool_calls(message.tool_calls),
        tool_call_id=None if message.tool_call_id is UNSET else message.tool_call_id,
    )


def _spliced_value(splice: Expression, values: Mapping[str, Json]) -> Json:
    return values[splice] if isinstance(splice, str) else evaluate(splice, values)


def _read_splice(value: Json, path: str) -> list[ChatMessage]:
    """Return the messages in a spliced value: one, or a list of them.

    Raises:
        PromptError: `prompt.splice` if it is neither.
    """
    if isinstance(value, list):
        return [_read_message(each, f"{path}[{index}]") for index, each in enumerate(value)]
    return [_read_message(value, path)]


def _read_message(value: Json, path: str) -> ChatMessage:
    """Return one message of a spliced value; fields that no template reads are left out.

    Raises:
        PromptError: `prompt.splice` if it has not a message's shape.
    """
    if not isinstance(value, dict):
        raise _no_message("it is no object with a role", path)
    role = value.get("role")
    if not isinstance(role, str) or role not in _SPLICED_ROLES:
        raise _no_message(f"its role {role!r} is none of {sorted(_SPLICED_ROLES)}", path)
    tool_calls = value.get("tool_calls")
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise _no_message("its tool_calls are no list", path)
    for key in ("name", "tool_call_id"):
        if not isinstance(value.get(key), str | None):
            raise _no_message(f"its {key} is no string", path)
    return ChatMessage(
        role=role,
        content=_read_content(value.get("content"), path),
        name=value.get("name"),
        tool_calls=_read_tool_calls(tool_calls),
        tool_call_id=value.get("tool_call_id"),
    )


def _read_content(content: Json, path: str) -> tuple[Piece, ...]:
    """Return a spliced message's content: a string, a list of text parts, or null.

    Raises:
        PromptError: `prompt.splice` for another shape, `engine.unsupported_part` for a part
            that is not text.
    """
    if isinstance(content, str):
        return (Piece(content, special=False),)
    if content is None:
        return (Piece("", special=False),)
    if not isinstance(content, list):
        raise _no_message("its content is neither a string nor a list nor null", path)
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
            raise _no_message(f"part {index} of its content has no type or no text", path)
    return (Piece("".join(texts), special=False),)


def _read_tool_calls(tool_calls: Sequence[Json] | msgspec.UnsetType | None) -> list[Json] | None:
    """Return tool calls as templates want them: arguments as an object, not as its JSON.

    OpenAI sends the arguments as the string that the model wrote. One that is no JSON
    object stays a string. No calls is the same as none.
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


def _no_message(reason: str, path: str) -> PromptError:
    return PromptError("prompt.splice", f"A spliced value is no message: {reason}.", path=path)


def _unsupported_part(path: str) -> PromptError:
    return PromptError(
        "engine.unsupported_part",
        "The model takes text only; leave the part out or use a model that takes it.",
        path=path,
    )


def _at(error: ConureError, path: str) -> ConureError:
    """Return the same error with a path, unless it has one."""
    if error.path is not None:
        return error
    return type(error)(error.code, error.message, path=path)
