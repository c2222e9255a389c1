"""Messages and values of LangChain as JSON, and back.

Knows LangChain's message classes and the server's chat messages. Refuses to know calls,
chains and connections.

Kept true: text comes out as it went in; a value that would not come back from JSON equal
to itself is refused, never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolCallChunk,
    ToolMessage,
    convert_to_messages,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.prompt_values import PromptValue

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

_MESSAGE = "__langchain_message__"
"""Key under which a message travels as a value among other values."""

_TOOL_BLOCKS = {"tool_use", "tool_call", "function_call"}
"""Content blocks that repeat what a message's `tool_calls` say."""


def role_of(message: type[BaseMessage]) -> str:
    """The role of a message class on the wire.

    Raises:
        ProgramError: if chat models have no such role.
    """
    for kind, role in (
        (SystemMessage, "system"),
        (HumanMessage, "user"),
        (AIMessage, "assistant"),
        (ToolMessage, "tool"),
    ):
        if issubclass(message, kind):
            return role
    raise ProgramError(
        "langchain.message",
        f"a {message.__name__} has no role for a chat model; use human, ai, system, tool or "
        "ChatMessage",
    )


def to_wire(message: BaseMessage) -> dict[str, Json]:
    """One message in the shape of `messages` of a program.

    Raises:
        ProgramError: if its class has no role.
    """
    role = message.role if isinstance(message, ChatMessage) else role_of(type(message))
    wire: dict[str, Json] = {"role": role, "content": _content(message.content)}
    if message.name:
        wire["name"] = message.name
    if isinstance(message, ToolMessage):
        wire["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        calls = [
            _wire_call(call["id"], call["name"], msgspec.json.encode(call["args"]).decode())
            for call in message.tool_calls
        ]
        # What the model wrote and nobody could read is still what it said.
        calls += [
            _wire_call(call["id"], call["name"] or "", call["args"] or "")
            for call in message.invalid_tool_calls
        ]
        if calls:
            wire["tool_calls"] = calls
    return wire


def _wire_call(call_id: str | None, name: str, arguments: str) -> dict[str, Json]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id or "", "type": "function", "function": function}


def to_wire_list(value: Any) -> list[dict[str, Json]]:
    """What a chat model takes (text, a prompt value, messages) as messages of a program.

    Raises:
        ValueError: if a chat model does not take it; the message is LangChain's own.
    """
    if isinstance(value, str):
        return [to_wire(HumanMessage(content=value))]
    if isinstance(value, PromptValue):
        return [to_wire(message) for message in value.to_messages()]
    if isinstance(value, Sequence):
        return [to_wire(message) for message in convert_to_messages(value)]
    raise ValueError(
        f"Invalid input type {type(value)}. Must be a PromptValue, str, or list of BaseMessages."
    )


def from_wire(value: dict[str, Json], *, program: str) -> AIMessage:
    """The message that a call's `message` form stands for.

    Args:
        value: the variable's value.
        program: id of the program that made it, kept in the metadata.
    """
    calls, invalid = calls_of(value)
    return AIMessage(
        content=value.get("content") or "",
        tool_calls=calls,
        invalid_tool_calls=invalid,
        response_metadata=metadata_of(value, program=program),
        usage_metadata=usage_of(value),
    )


def calls_of(value: dict[str, Json]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Tool calls of a message form: those whose arguments can be read, and the others."""
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in value.get("tool_calls") or []:
        name, written, call_id = call["function"]["name"], call["function"]["arguments"], call["id"]
        try:
            arguments = msgspec.json.decode(written)
        except msgspec.DecodeError as problem:
            invalid.append(
                invalid_tool_call(name=name, args=written, id=call_id, error=str(problem))
            )
        else:
            calls.append(tool_call(name=name, args=arguments, id=call_id))
    return calls, invalid


def call_chunks_of(value: dict[str, Json]) -> list[ToolCallChunk]:
    """Tool calls of a message form, for a stream."""
    return [
        tool_call_chunk(
            name=call["function"]["name"],
            args=call["function"]["arguments"],
            id=call["id"],
            index=index,
        )
        for index, call in enumerate(value.get("tool_calls") or [])
    ]


def metadata_of(value: dict[str, Json], *, program: str) -> dict[str, Json]:
    """What a message form says about its making."""
    metadata = {"model_name": value.get("model"), "model_provider": "conure", "program": program}
    for name in ("finish_reason", "stop", "logprobs"):
        if value.get(name) is not None:
            metadata[name] = value[name]
    return metadata


def usage_of(value: dict[str, Json]) -> UsageMetadata:
    """The token counts of a message form."""
    usage = value.get("usage") or {}
    given = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    made = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return UsageMetadata(input_tokens=given, output_tokens=made, total_tokens=given + made)


def encode(value: Any, *, what: str) -> Json:
    """A value as JSON that `decode` turns back into an equal one; messages are allowed.

    Args:
        value: anything.
        what: names the value in the error.

    Raises:
        ProgramError: `langchain.not_json` if it would not come back equal.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [encode(item, what=f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: encode(item, what=f"{what}[{key!r}]") for key, item in value.items()}
    if isinstance(value, BaseMessage):
        return {_MESSAGE: message_to_dict(value)}
    raise ProgramError(
        "langchain.not_json",
        f"{what} is a {type(value).__name__}, which cannot travel as JSON; let the function "
        "return text, numbers, lists, dicts with text keys, or messages",
    )


def decode(value: Json) -> Any:
    """The value that `encode` made into JSON."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_MESSAGE}:
            return messages_from_dict([value[_MESSAGE]])[0]
        return {key: decode(item) for key, item in value.items()}
    return value


def _content(content: str | list[str | dict[Any, Any]]) -> Json:
    """Text alone becomes one string; anything else stays a list of parts."""
    if isinstance(content, str):
        return str.__str__(content)
    parts: list[dict[str, Json]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"text": part})
        elif part.get("type") == "text":
            parts.append({"text": part["text"]})
        elif part.get("type") not in _TOOL_BLOCKS:
            parts.append({"part": part})
    if all("text" in part for part in parts):
        return "".join(part["text"] for part in parts)
    return [part for part in parts if part.get("text") != ""]
