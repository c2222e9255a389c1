"""Conversion of LlamaIndex's messages and responses to JSON and back.

Responsibility: the content blocks of core 0.12 to 0.14. Blocks are distinguished by `block_type`,
because older cores lack some of the classes.

Invariants: text is unchanged after a round trip; an unsupported block is rejected by name, never
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llama_index.core.base.llms import types
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

from ...speculation.answer_stream import answer_text
from .answer_checks import arguments_of

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
"""Roles with another name on the server."""

_IGNORED_BLOCKS = frozenset({"thinking", "tool_call", "cache"})
"""Blocks that are not content: thinking, tool calls (sent in a separate field), and cache hints
for other providers.
"""


def to_wire(message: ChatMessage) -> dict[str, Json]:
    """Convert a message to an item of a node's `messages`.

    Raises:
        ProgramError: `llamaindex.block` if the message has unsupported content.
    """
    role = MessageRole(message.role)
    wire: dict[str, Json] = {"role": _ROLES.get(role, role.value), "content": _content(message)}
    extra = message.additional_kwargs
    calls = _tool_calls(message)
    if calls:
        wire["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if extra.get(name):
            wire[name] = extra[name]
    return wire


def chat_response(value: Mapping[str, Json], *, program: str) -> ChatResponse:
    """Convert an answer in the `message` form to a chat response."""
    return ChatResponse(
        message=answer_message(answer_text(value), value),
        raw=raw_of(value, program=program),
        logprobs=_logprobs(value),
        additional_kwargs=counts_of(value),
    )


def completion_response(value: Mapping[str, Json], *, program: str) -> CompletionResponse:
    """Convert an answer in the `message` form to a completion response."""
    return CompletionResponse(
        text=answer_text(value),
        raw=raw_of(value, program=program),
        logprobs=_logprobs(value),
        additional_kwargs=counts_of(value),
    )


def answer_message(text: str, value: Mapping[str, Json] | None = None) -> ChatMessage:
    """Return an assistant message with the text so far and, with `value`, its tool calls.

    The calls are in `additional_kwargs`, and as blocks where the core has such blocks.
    """
    calls = (value or {}).get("tool_calls")
    message = ChatMessage(
        role=MessageRole.ASSISTANT,
        content=text,
        additional_kwargs={"tool_calls": calls} if calls else {},
    )
    make_block = getattr(types, "ToolCallBlock", None)
    if calls and make_block is not None:
        message.blocks += [
            make_block(
                tool_call_id=call.get("id"),
                tool_name=call["function"]["name"],
                tool_kwargs=call["function"].get("arguments") or "{}",
            )
            for call in calls
        ]
    return message


def raw_of(value: Mapping[str, Json], *, program: str) -> dict[str, Json]:
    """Return `raw` of a response: the answer without role and content, and the program's id."""
    raw = {name: item for name, item in value.items() if name not in ("role", "content")}
    return {**raw, "program": program}


def counts_of(value: Mapping[str, Json]) -> dict[str, int]:
    """Return the token counts under the keys that LlamaIndex's token counter reads."""
    usage = value.get("usage") or {}
    num_input = usage.get("prompt_tokens", 0)
    num_output = usage.get("completion_tokens", 0)
    return {
        "prompt_tokens": num_input,
        "completion_tokens": num_output,
        "total_tokens": usage.get("total_tokens", num_input + num_output),
    }


def tool_selections(message: ChatMessage) -> list[ToolSelection]:
    """Return the tool calls of an assistant message.

    Raises:
        RunError: `output.not_json` if the arguments of a call are not a JSON object.
    """
    return [
        ToolSelection(
            tool_id=call.get("id") or "",
            tool_name=call["function"]["name"],
            tool_kwargs=arguments_of(call["function"]),
        )
        for call in message.additional_kwargs.get("tool_calls") or []
    ]


def check_text(text: str) -> str:
    """Return a text that can be sent.

    Raises:
        ProgramError: `llamaindex.text` if it is not Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise ProgramError(
            "llamaindex.text",
            f"character {problem.start} of the prompt, {text[problem.start]!r}, is half of a "
            "surrogate pair; remove it, or decode the text with errors='replace'",
        ) from problem
    return text


def _content(message: ChatMessage) -> Json:
    """Return text-only content as one string, and other content as a list of parts."""
    parts: list[dict[str, Json]] = []
    for block in message.blocks:
        kind = block.block_type
        if kind == "text":
            text: str = getattr(block, "text")  # noqa: B009 - a union of blocks
            parts.append({"text": check_text(text)})
        elif kind == "image":
            parts.append({"part": _image(block)})
        elif kind not in _IGNORED_BLOCKS:
            raise ProgramError(
                "llamaindex.block",
                f"a message has content of class {type(block).__name__}, which this "
                "server does not support in a chat; send text or images",
            )
    if all("text" in part for part in parts):
        # The separator of `ChatMessage.content`.
        return "\n".join(part["text"] for part in parts)
    return parts


def _image(block: Any) -> dict[str, Json]:
    if block.url is not None:
        url = str(block.url)
    else:
        data = block.resolve_image(as_base64=True).read().decode()
        url = f"data:{block.image_mimetype or 'image/png'};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_calls(message: ChatMessage) -> Sequence[Json]:
    """Return the tool calls from `additional_kwargs`, or else from the blocks of core 0.14."""
    tool_calls = message.additional_kwargs.get("tool_calls")
    if tool_calls:
        return [call if isinstance(call, dict) else call.model_dump() for call in tool_calls]
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
    """Return one list per token: the token itself, then its alternatives."""
    logprobs = value.get("logprobs")
    if not logprobs:
        return None
    tokens = logprobs.get("content", []) if isinstance(logprobs, dict) else logprobs
    return [
        [_token_logprob(token), *(_token_logprob(other) for other in token.get("top_logprobs", []))]
        for token in tokens
    ]


def _token_logprob(token: Mapping[str, Json]) -> LogProb:
    return LogProb(
        token=token.get("token", ""),
        logprob=token.get("logprob", 0.0),
        bytes=token.get("bytes") or [],
    )
