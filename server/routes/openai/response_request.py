"""The request of `/v1/responses`, and its translation to a program with one call.

The input is a list of items: messages, function calls and their outputs. The items of earlier
responses precede those of the request.

Out of scope: HTTP, and finding earlier responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from ...program.errors import ProgramError
from ...program.ir import Constraint, GenerateNode, Json, Message, Output, Segment
from .chat import part_error, tool_fields
from .request_fields import (
    GenerationRequest,
    StreamOptions,
    Tokens,
    answer_variable,
    call_node,
    constraint_of,
    node_fields,
    reject_unsupported,
    sampling_of,
    unsupported,
)

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
}
"""Values of `include`. All but the first name contents that no answer here has."""
# Tuples, because a client may send an object where a name belongs.
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


class PlainText(Struct, frozen=True, tag="text", tag_field="type"):
    """Text without a required format."""


class AnyObject(Struct, frozen=True, tag="json_object", tag_field="type"):
    """Any JSON object."""


class SchemaText(Struct, frozen=True, tag="json_schema", tag_field="type", kw_only=True):
    """JSON that matches a schema."""

    schema: dict[str, Json]
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form of the answer's text."""

    format: PlainText | AnyObject | SchemaText | None = None
    verbosity: Json | UnsetType = UNSET


Item: TypeAlias = dict[str, Json]


class ResponseRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/responses`."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Tokens | None = None
    tools: Annotated[list[Json], Meta(max_length=1_000)] | None = None
    tool_choice: Json | UnsetType = UNSET
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    """Whether the response is generated without its client."""
    store: bool | None = None
    """false: the response cannot be read later. The journal keeps it for recovery."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=64)],
                Annotated[str, Meta(max_length=512)],
            ],
            Meta(max_length=16),
        ]
        | None
    ) = None

    # Rejected unless the value has no effect.
    conversation: Json | UnsetType = UNSET
    max_tool_calls: Json | UnsetType = UNSET
    moderation: Json | UnsetType = UNSET
    prompt: Json | UnsetType = UNSET
    reasoning: Json | UnsetType = UNSET
    truncation: Json | UnsetType = UNSET


def items_of(request: ResponseRequest) -> list[Item]:
    """Return the input of a request as items."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def lower_response(request: ResponseRequest, earlier: Sequence[Item], record: Json) -> GenerateNode:
    """Translate a request to a call.

    Args:
        request: the request.
        earlier: items of the responses before it.
        record: stored with the call.

    Raises:
        ProgramError: if the request uses an unsupported feature, or an item is malformed.
    """
    reject_unsupported(request)
    if request.text is not None:
        reject_unsupported(request.text, "text.")
    if request.prompt not in (UNSET, None):
        raise unsupported("'prompt' is not supported: send the text as 'input'", "prompt")
    if request.reasoning not in (UNSET, None, {}):
        _check_reasoning(request.reasoning)
    if request.background and request.store is False:
        raise ProgramError(
            "request.invalid", "'background' needs 'store': remove 'store': false", path="store"
        )
    for i, included in enumerate(request.include or ()):
        if included not in _INCLUDED:
            raise unsupported(f"{included!r} cannot be included: remove it", f"include[{i}]")
    messages = []
    if request.instructions:
        messages.append(Message(role="system", content=request.instructions))
    items = items_of(request)
    first = len(earlier)
    for i, item in enumerate([*earlier, *items]):
        _add_item(messages, item, f"input[{i - first}]")
    if not messages:
        raise ProgramError("request.invalid", "'input' is empty", path="input")
    sampling = sampling_of(request, request.max_output_tokens)
    if request.top_logprobs is not None or LOGPROBS in (request.include or ()):
        sampling["logprobs"] = request.top_logprobs or 0
    constraint = constraint_of(request, _format_constraint(request.text))
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    choice = _tool_choice(request.tool_choice)
    return GenerateNode(
        id=call_node(0),
        messages=messages,
        output=Output(
            variable=answer_variable(0), form="message", constraint=constraint, **sampling
        ),
        template_options=request.chat_template_kwargs or {},
        meta={"response": record},
        **tool_fields(tools, choice, request.parallel_tool_calls),
        **node_fields(request),
    )


def _check_reasoning(reasoning: Json) -> None:
    """Reject options of reasoning except those that disable it."""
    options = reasoning if isinstance(reasoning, dict) else {"": reasoning}
    if any(value not in (None, "none") for value in options.values()):
        raise unsupported("'reasoning' is not supported by this server: remove it", "reasoning")


def _format_constraint(text: TextOptions | None) -> Constraint | None:
    match None if text is None else text.format:
        case AnyObject():
            return Constraint(json_schema={"type": "object"})
        case SchemaText(schema=schema):
            return Constraint(json_schema=schema)
        case _:
            return None


def _tool(tool: Json, path: str) -> Json:
    """Return a function tool in the form of chat completions."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function" or not isinstance(tool, dict):
        raise unsupported(
            f"tools of type {kind!r} are not supported: use type 'function', and run it in the "
            "client",
            path,
        )
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Json | UnsetType) -> Json | UnsetType:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


# --- items ------------------------------------------------------------------------------------


def _add_item(messages: list[Message], item: Item, path: str) -> None:
    """Add the message of an item. Function calls join the assistant's message before them."""
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") in _ROLES:
        role = "system" if item["role"] == "developer" else item["role"]
        content = _content(item.get("content"), f"{path}.content")
        messages.append(Message(role=role, content=content))
    elif kind == "function_call":
        call = {
            "id": _field(item, "call_id", path),
            "type": "function",
            "function": {
                "name": _field(item, "name", path),
                "arguments": _field(item, "arguments", path),
            },
        }
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        if last is None:
            messages.append(Message(role="assistant", content="", tool_calls=[call]))
        elif last.tool_calls:
            last.tool_calls.append(call)  # a list of this function
        else:
            messages[-1] = replace(last, tool_calls=[call])
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{path}.output")
        call_id = _field(item, "call_id", path)
        messages.append(Message(role="tool", content=content, tool_call_id=call_id))
    else:
        raise unsupported(
            f"input items of type {kind!r} and role {item.get('role')!r} are not supported: use "
            "messages, function calls and their outputs",
            path,
        )


def _field(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ProgramError("request.invalid", f"{name!r} must be a string", path=f"{path}.{name}")
    return value


def _content(content: Json, path: str) -> str | list[Segment]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ProgramError(
            "request.invalid", "content must be a string or a list of parts", path=path
        )
    segments = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if kind == "refusal" else "text"
        if kind not in _TEXT_PARTS and kind != "refusal":
            raise part_error(kind, f"{path}[{i}]")
        if not isinstance(part.get(key), str):
            raise ProgramError(
                "request.invalid", f"{key!r} must be a string", path=f"{path}[{i}].{key}"
            )
        segments.append(Segment(text=part[key]))
    return segments


def request_record(request: ResponseRequest) -> dict[str, Json]:
    """Return what a later request needs of this one; stored with its call."""
    kept = {
        name: value
        for name in _RECORDED
        if (value := getattr(request, name)) is not UNSET and value is not None
    }
    record: dict[str, Json] = msgspec.to_builtins({**kept, "input": items_of(request)})
    return record


_RECORDED = (
    "model",
    "instructions",
    "previous_response_id",
    "max_output_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_logprobs",
    "text",
    "background",
    "store",
    "metadata",
    "user",
)
"""Fields that a response repeats."""
