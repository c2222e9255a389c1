"""Conversion of LangChain's messages to the server's chat messages and back.

Out of scope: calls, chains and connections.

Invariant: text is unchanged after a round trip.
"""

from __future__ import annotations

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
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.prompt_values import PromptValue

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

_TOOL_BLOCKS = {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"}
"""Content blocks that duplicate a message's `tool_calls`."""
_THOUGHT_BLOCKS = {"reasoning", "reasoning_content", "thinking", "redacted_thinking"}
"""Content blocks in which other providers keep the thoughts of their models."""


def role_of(message: type[BaseMessage]) -> str:
    """Return the role of a message class in a program.

    Raises:
        ProgramError: if the class has no such role.
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
    """Convert a message to an item of a node's `messages`.

    Raises:
        ProgramError: if the message class has no role.
    """
    role = message.role if isinstance(message, ChatMessage) else role_of(type(message))
    wire: dict[str, Json] = {"role": role, "content": _content(message.content)}
    _check_encodable(wire)
    if message.name:
        wire["name"] = message.name
    if isinstance(message, ToolMessage):
        wire["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        calls = [
            _wire_call(call["id"], call["name"], msgspec.json.encode(call["args"]).decode())
            for call in message.tool_calls
        ]
        # Tool calls with invalid arguments are part of the history, too.
        calls += [
            _wire_call(call["id"], call["name"] or "", call["args"] or "")
            for call in message.invalid_tool_calls
        ]
        if calls:
            wire["tool_calls"] = calls
    return wire


def _check_encodable(wire: dict[str, Json]) -> None:
    try:
        msgspec.json.encode(wire["content"])
    except UnicodeEncodeError as problem:
        raise ProgramError(
            "langchain.text",
            f"a {wire['role']} message has half of a surrogate pair, which is not text "
            f"({problem.reason} at {problem.start}); replace it, for example by "
            "text.encode('utf-8', 'replace').decode()",
        ) from problem


def _wire_call(call_id: str | None, name: str, arguments: str) -> dict[str, Json]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id or "", "type": "function", "function": function}


def to_wire_list(value: Any) -> list[dict[str, Json]]:
    """Convert the input of a chat model (text, a prompt value, messages) to a node's `messages`.

    Raises:
        ValueError: with LangChain's message, if the input has another type.
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
    """Convert an answer in the `message` form to an `AIMessage`.

    Args:
        value: the variable's value.
        program: id of the program, for the metadata.
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
    """Return the valid and the invalid tool calls of an answer. Valid arguments are JSON."""
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
    """Return the tool calls of an answer as chunks of a stream."""
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
    """Return the response metadata of an answer."""
    metadata = {"model_name": value.get("model"), "model_provider": "conure", "program": program}
    for name in ("finish_reason", "stop", "logprobs"):
        if value.get(name) is not None:
            metadata[name] = value[name]
    return metadata


def usage_of(value: dict[str, Json]) -> UsageMetadata:
    """Return the token counts of an answer."""
    usage = value.get("usage") or {}
    num_input = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    num_output = usage.get("completion_tokens", usage.get("output_tokens", 0))
    counts = UsageMetadata(
        input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output
    )
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        counts["input_token_details"] = InputTokenDetails(cache_read=cached)
    return counts


def _content(content: str | list[str | dict[Any, Any]]) -> Json:
    """Return text-only content as one string, and other content as a list of parts.

    Blocks that only their own provider can read, such as thoughts, are left out.
    """
    if isinstance(content, str):
        return str.__str__(content)
    parts: list[dict[str, Json]] = []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type")
        if isinstance(part, str):
            parts.append({"text": part})
        elif kind in ("text", "text-plain") and isinstance(part.get("text"), str):
            parts.append({"text": part["text"]})
        elif kind == "json" and "json" in part:
            parts.append({"text": msgspec.json.encode(part["json"]).decode()})
        elif kind not in _TOOL_BLOCKS | _THOUGHT_BLOCKS:
            parts.append({"part": part})
    if all("text" in part for part in parts):
        return "".join(part["text"] for part in parts)
    return [part for part in parts if part.get("text") != ""]
