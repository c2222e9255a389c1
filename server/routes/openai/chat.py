"""The request of `/v1/chat/completions`, and its translation to a program.

Out of scope: HTTP, and the shape of responses.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ...program.decoding.typed_json import convert_record
from ...program.errors import ProgramError
from ...program.ir import AnyNode, Constraint, GenerateNode, Json, Message, Output, Segment
from .request_fields import (
    OpenAIRequest,
    Tokens,
    answer_variable,
    call_node,
    constraint_of,
    node_fields,
    reject_unsupported,
    sampling_of,
    seed_of,
    unsupported,
)


class SchemaFormat(Struct, frozen=True, kw_only=True):
    """A JSON schema. Its name and `strict` are accepted and ignored."""

    schema: dict[str, Json]


class TextFormat(Struct, frozen=True, tag="text", tag_field="type"):
    """Text without a required format."""


class ObjectFormat(Struct, frozen=True, tag="json_object", tag_field="type"):
    """Any JSON object."""


class JsonFormat(Struct, frozen=True, tag="json_schema", tag_field="type"):
    """JSON that matches a schema."""

    json_schema: SchemaFormat


ResponseFormat: TypeAlias = TextFormat | ObjectFormat | JsonFormat


class TextPart(Struct, frozen=True, tag="text", tag_field="type", kw_only=True):
    """A text part of a message."""

    text: str


class RefusalPart(Struct, frozen=True, tag="refusal", tag_field="type", kw_only=True):
    """A refusal in a message of the assistant."""

    refusal: str


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message of a chat."""

    role: Annotated[str, Meta(pattern="^(system|developer|user|assistant|tool|function)$")]
    content: str | list[dict[str, Json]] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[Json], Meta(max_length=1_000)] | None = None
    tool_call_id: str | None = None
    function_call: Json | UnsetType = UNSET
    audio: Json | UnsetType = UNSET
    annotations: Json | UnsetType = UNSET


class ChatRequest(OpenAIRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Tokens | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: Json | UnsetType = UNSET
    tools: Annotated[list[Json], Meta(max_length=1_000)] | None = None
    tool_choice: Json | UnsetType = UNSET
    parallel_tool_calls: bool | None = None

    # Rejected unless the value has no effect.
    add_generation_prompt: Json | UnsetType = UNSET
    continue_final_message: Json | UnsetType = UNSET
    documents: Json | UnsetType = UNSET
    functions: Json | UnsetType = UNSET
    function_call: Json | UnsetType = UNSET
    modalities: Json | UnsetType = UNSET
    moderation: Json | UnsetType = UNSET
    audio: Json | UnsetType = UNSET
    prediction: Json | UnsetType = UNSET
    reasoning_effort: Json | UnsetType = UNSET
    verbosity: Json | UnsetType = UNSET
    web_search_options: Json | UnsetType = UNSET


def lower_chat(request: ChatRequest) -> list[AnyNode]:
    """Translate a chat completion to calls, one per answer.

    Raises:
        ProgramError: if the request uses an unsupported feature.
    """
    reject_unsupported(request)
    messages = [_message(message, i) for i, message in enumerate(request.messages)]
    sampling = {**sampling_of(request, _limit_of(request)), **_logprobs(request)}
    constraint = constraint_of(request, format_constraint(request.response_format))
    tools = tool_fields(request.tools, request.tool_choice, request.parallel_tool_calls)
    return [
        GenerateNode(
            id=call_node(i),
            messages=messages,
            output=Output(
                variable=answer_variable(i),
                form="message",
                constraint=constraint,
                **sampling,
                **seed_of(request, i),
            ),
            template_options=request.chat_template_kwargs or {},
            **tools,
            **node_fields(request),
        )
        for i in range(request.n or 1)
    ]


def _limit_of(request: ChatRequest) -> int | None:
    """Return the maximum number of tokens of an answer, under its old or its new name.

    Raises:
        ProgramError: if the request has both, with different values.
    """
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ProgramError(
            "request.invalid",
            f"'max_tokens' is {old} and 'max_completion_tokens' is {new}: send one of them",
            path="max_tokens",
        )
    return old if new is None else new


def _logprobs(request: ChatRequest) -> dict[str, int]:
    """Combine `logprobs` and `top_logprobs` into one sampling field.

    Raises:
        ProgramError: if `top_logprobs` is set without `logprobs`.
    """
    if not request.logprobs:
        if request.top_logprobs:
            raise ProgramError(
                "request.invalid", "'top_logprobs' needs 'logprobs': true", path="top_logprobs"
            )
        return {}
    return {"logprobs": request.top_logprobs or 0}


def tool_fields(
    tools: list[Json] | None, tool_choice: Json | UnsetType, parallel: bool | None
) -> dict[str, Any]:
    """Return the tool fields of a call."""
    if not tools:
        return {"tool_choice": tool_choice}
    return {
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel is not False,
    }


def format_constraint(response_format: ResponseFormat | None) -> Constraint | None:
    """Return the constraint of a response format."""
    match response_format:
        case ObjectFormat():
            return Constraint(json_schema={"type": "object"})
        case JsonFormat(json_schema=SchemaFormat(schema=schema)):
            return Constraint(json_schema=schema)
        case _:
            return None


def _message(message: ChatMessage, i: int) -> Message:
    path = f"messages[{i}]."
    reject_unsupported(message, path)
    if message.role == "function":
        raise unsupported(
            "messages of role 'function' are not supported by this server: use 'tool'",
            path + "role",
        )
    content: str | list[Segment] = ""
    if isinstance(message.content, str):
        content = message.content
    elif message.content is None:
        if message.role in ("user", "system", "developer"):
            raise ProgramError(
                "request.invalid",
                f"a message of role {message.role!r} needs content: send a text",
                path=f"{path}content",
            )
        content = message.refusal or ""
    else:
        kinds = TextPart | RefusalPart if message.role == "assistant" else TextPart
        content = [
            _text(part, kinds, f"{path}content[{k}]") for k, part in enumerate(message.content)
        ]
    role = "system" if message.role == "developer" else message.role
    return Message(
        role=role,
        content=content,
        name=message.name or UNSET,
        tool_calls=message.tool_calls or UNSET,
        tool_call_id=message.tool_call_id or UNSET,
    )


def _text(part: dict[str, Json], kinds: Any, path: str) -> Segment:
    try:
        known: TextPart | RefusalPart = convert_record(part, kinds)
    except msgspec.ValidationError:
        raise part_error(part.get("type"), path) from None
    return Segment(text=known.refusal if isinstance(known, RefusalPart) else known.text)


def part_error(kind: Json, path: str) -> ProgramError:
    """Return the error of a content part that is not text."""
    return unsupported(
        f"content parts of type {kind!r} are not supported: this server's models read text only, "
        "so send the content as text",
        path,
    )
