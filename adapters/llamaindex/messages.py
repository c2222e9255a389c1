"""LlamaIndex's messages and responses as JSON of the server, and back.

Knows the content blocks of core 0.12 and 0.14 (blocks that a version lacks are told by
their `block_type`). Refuses to know calls and connections.

Kept true: text comes out as it went in; a block that has no place on the wire is refused
by name, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
)
from llama_index.core.llms.llm import ToolSelection

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

from .call import text_of

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
"""Roles that have another name on the wire."""

_IGNORED = frozenset({"thinking", "tool_call", "cache"})
"""Blocks that say nothing to the model as content: earlier thoughts, calls (which travel
beside the content), hints to other providers."""


def to_wire(message: ChatMessage) -> dict[str, Json]:
    """One message in the shape of `messages` of a program.

    Raises:
        ProgramError: `llamaindex.block` if it has content that cannot travel.
    """
    role = MessageRole(message.role)
    wire: dict[str, Json] = {"role": _ROLES.get(role, role.value), "content": _content(message)}
    given = message.additional_kwargs
    calls = _calls(message)
    if calls:
        wire["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if given.get(name):
            wire[name] = given[name]
    return wire


def chat_response(value: Mapping[str, Json], *, program: str) -> ChatResponse:
    """The response that an answer in the `message` form stands for."""
    return ChatResponse(
        message=answer_message(text_of(value), value),
        raw=raw_of(value, program=program),
        logprobs=_logprobs(value),
        additional_kwargs=counts_of(value),
    )


def completion_response(value: Mapping[str, Json], *, program: str) -> CompletionResponse:
    """The same for a completion."""
    return CompletionResponse(
        text=text_of(value),
        raw=raw_of(value, program=program),
        logprobs=_logprobs(value),
        additional_kwargs=counts_of(value),
    )


def answer_message(text: str, value: Mapping[str, Json] | None = None) -> ChatMessage:
    """A message of the model: text so far, and with `value` the calls to tools it asks for."""
    calls = (value or {}).get("tool_calls")
    return ChatMessage(
        role=MessageRole.ASSISTANT,
        content=text,
        additional_kwargs={"tool_calls": calls} if calls else {},
    )


def raw_of(value: Mapping[str, Json], *, program: str) -> dict[str, Json]:
    """What `raw` of a response says: the answer without its text, and who made it."""
    raw = {name: item for name, item in value.items() if name not in ("role", "content")}
    return {**raw, "program": program}


def counts_of(value: Mapping[str, Json]) -> dict[str, int]:
    """Token counts, where LlamaIndex's token counter looks for them."""
    usage = value.get("usage") or {}
    given = usage.get("prompt_tokens", 0)
    made = usage.get("completion_tokens", 0)
    return {
        "prompt_tokens": given,
        "completion_tokens": made,
        "total_tokens": usage.get("total_tokens", given + made),
    }


def selections(message: ChatMessage) -> list[ToolSelection]:
    """The calls to tools that a message of the model asks for."""
    made = []
    for call in message.additional_kwargs.get("tool_calls") or []:
        function = call["function"]
        try:
            arguments = msgspec.json.decode(function.get("arguments") or "{}")
        except msgspec.DecodeError:
            arguments = {}
        made.append(
            ToolSelection(
                tool_id=call.get("id") or "", tool_name=function["name"], tool_kwargs=arguments
            )
        )
    return made


def _content(message: ChatMessage) -> Json:
    """Text alone becomes one string; anything else is a list of parts."""
    parts: list[dict[str, Json]] = []
    for block in message.blocks:
        kind = block.block_type
        if kind == "text":
            parts.append({"text": getattr(block, "text")})  # noqa: B009 - a union of blocks
        elif kind == "image":
            parts.append({"part": _image(block)})
        elif kind not in _IGNORED:
            raise ProgramError(
                "llamaindex.block",
                f"a message has content of class {type(block).__name__}, which has no place "
                "in a chat with this server; send text or images",
            )
    if all("text" in part for part in parts):
        # As `ChatMessage.content` joins them.
        return "\n".join(part["text"] for part in parts)
    return parts


def _image(block: Any) -> dict[str, Json]:
    if block.url is not None:
        url = str(block.url)
    else:
        data = block.resolve_image(as_base64=True).read().decode()
        url = f"data:{block.image_mimetype or 'image/png'};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _calls(message: ChatMessage) -> Sequence[Json]:
    """Calls to tools: from `additional_kwargs`, else from the blocks that 0.14 has for them."""
    given = message.additional_kwargs.get("tool_calls")
    if given:
        return [call if isinstance(call, dict) else call.model_dump() for call in given]
    calls = []
    for block in message.blocks:
        if block.block_type == "tool_call":
            call: Any = block
            arguments = call.tool_kwargs
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
            function = {"name": call.tool_name, "arguments": arguments}
            calls.append({"id": call.tool_call_id or "", "type": "function", "function": function})
    return calls


def _logprobs(value: Mapping[str, Json]) -> list[list[LogProb]] | None:
    """One list per token: the token, then the others that were told beside it."""
    told = value.get("logprobs")
    if not told:
        return None
    tokens = told.get("content", []) if isinstance(told, dict) else told
    return [
        [_chance(token), *(_chance(other) for other in token.get("top_logprobs", []))]
        for token in tokens
    ]


def _chance(token: Mapping[str, Json]) -> LogProb:
    return LogProb(
        token=token.get("token", ""),
        logprob=token.get("logprob", 0.0),
        bytes=token.get("bytes") or [],
    )
