"""OpenAI's requests: which fields there are, and what they mean as a program.

Knows the bodies of `/v1/chat/completions` and `/v1/completions` and lowers a request to a
program of one call. Refuses to know HTTP, the service, and what answers look like.

Kept true: a field is honoured, or harmless and listed, or refused by name. Nothing that
would change an answer is passed over in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..program.errors import ProgramError
from ..program.ir import (
    MAX_OUTPUT_TOKENS,
    AnyNode,
    Generate,
    Json,
    Message,
    Options,
    Output,
    Program,
    Segment,
    Submission,
)

CALL = "call"
"""Id of the one node."""
ANSWER = "answer"
"""The variable that the one call produces."""
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI gives a plain completion that names no limit."""

_UINT63 = 2**63 - 1
Tokens = Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops: TypeAlias = Stop | Annotated[list[Stop], Meta(max_length=16)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a stream is told."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that both endpoints share."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=_UINT63)] | None = None
    stop: Stops | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None

    # Not OpenAI's, but what other servers take as well.
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=64)] | None
    ) = None
    ignore_eos: bool | None = None

    # Harmless: they change no answer.
    user: Json | UnsetType = UNSET
    metadata: Json | UnsetType = UNSET
    service_tier: Json | UnsetType = UNSET
    safety_identifier: Json | UnsetType = UNSET
    prompt_cache_key: Json | UnsetType = UNSET
    prompt_cache_retention: Json | UnsetType = UNSET

    # Refused unless they say what is the case anyway.
    logit_bias: Json | UnsetType = UNSET
    logprobs: Json | UnsetType = UNSET


class TextPart(Struct, frozen=True, tag="text", tag_field="type", kw_only=True):
    """A piece of a message's text."""

    text: str


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message of a chat."""

    role: Annotated[str, Meta(pattern="^(system|developer|user|assistant|tool|function)$")]
    content: str | list[dict[str, Json]] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Json | UnsetType = UNSET
    tool_call_id: Json | UnsetType = UNSET
    function_call: Json | UnsetType = UNSET
    audio: Json | UnsetType = UNSET
    annotations: Json | UnsetType = UNSET


class ChatRequest(OpenAIRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Tokens | None = None
    store: Json | UnsetType = UNSET
    parallel_tool_calls: Json | UnsetType = UNSET

    response_format: Json | UnsetType = UNSET
    tools: Json | UnsetType = UNSET
    tool_choice: Json | UnsetType = UNSET
    functions: Json | UnsetType = UNSET
    function_call: Json | UnsetType = UNSET
    top_logprobs: Json | UnsetType = UNSET
    modalities: Json | UnsetType = UNSET
    audio: Json | UnsetType = UNSET
    prediction: Json | UnsetType = UNSET
    reasoning_effort: Json | UnsetType = UNSET
    verbosity: Json | UnsetType = UNSET
    web_search_options: Json | UnsetType = UNSET


class CompletionRequest(OpenAIRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Json]
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    suffix: Json | UnsetType = UNSET


_IDLE: dict[str, tuple[Json, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_call_id": (),
    "annotations": ([],),
}
"""Fields that are refused, and the values (besides null) that ask for nothing."""


def refuse_unsupported(record: Struct, path: str = "") -> None:
    """Raises a ProgramError for the first field that asks for what there is not."""
    for name in record.__struct_fields__:
        if name not in _IDLE:
            continue
        value = getattr(record, name)
        if value is UNSET or value is None or any(_same(value, idle) for idle in _IDLE[name]):
            continue
        raise ProgramError(
            "unsupported_parameter", f"{name!r} is not supported by this server", path=path + name
        )


def _same(value: Json, idle: Json) -> bool:
    return type(value) is type(idle) and bool(value == idle)


def lower_chat(request: ChatRequest) -> Submission:
    """The program of a chat completion.

    Raises:
        ProgramError: if the request asks for what is not supported.
    """
    refuse_unsupported(request)
    messages = [_message(message, i) for i, message in enumerate(request.messages)]
    limit = request.max_tokens
    if request.max_completion_tokens is not None:
        limit = request.max_completion_tokens
    output = Output(variable=ANSWER, form="message", **_sampling(request, limit))
    return _one_call(
        "chat", Generate(id=CALL, model=request.model, messages=messages, output=output)
    )


def lower_completion(request: CompletionRequest) -> Submission:
    """The program of a plain completion.

    Raises:
        ProgramError: if the request asks for what is not supported.
    """
    refuse_unsupported(request)
    if not isinstance(request.prompt, str):
        raise ProgramError("unsupported_parameter", "'prompt' must be one string", path="prompt")
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    output = Segment(output=ANSWER, form="message", **_sampling(request, limit))
    before = [Segment(text=request.prompt)] if request.prompt else []
    return _one_call("completion", Generate(id=CALL, model=request.model, prompt=[*before, output]))


def _one_call(name: str, node: AnyNode) -> Submission:
    # Attached: after a crash nobody reads the answer, so nobody should pay for it.
    return Submission(
        program=Program(name=name, nodes=[node], outputs=[ANSWER]), options=Options(detach=False)
    )


def _message(message: ChatMessage, i: int) -> Message:
    path = f"messages[{i}]."
    refuse_unsupported(message, path)
    if message.role in ("tool", "function"):
        raise ProgramError(
            "unsupported_parameter",
            f"messages of role {message.role!r} are not supported by this server",
            path=path + "role",
        )
    content: str | list[Segment] = ""
    if isinstance(message.content, str):
        content = message.content
    elif message.content is not None:
        content = [_text(part, f"{path}content[{k}]") for k, part in enumerate(message.content)]
    role = "system" if message.role == "developer" else message.role
    return Message(role=role, content=content, name=message.name or UNSET)


def _text(part: dict[str, Json], path: str) -> Segment:
    try:
        return Segment(text=msgspec.convert(part, TextPart).text)
    except msgspec.ValidationError:
        kind = part.get("type")
        raise ProgramError(
            "unsupported_parameter",
            f"content parts of type {kind!r} are not supported by this server",
            path=path,
        ) from None


def _sampling(request: OpenAIRequest, limit: int | None) -> dict[str, Any]:
    """The sampling fields that were given; those that were not keep the IR's defaults."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    given = {
        "max_tokens": limit,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        # OpenAI's seeds may be negative; ours are names of noise, any mapping will do.
        "seed": None if request.seed is None else request.seed & _UINT63,
        "stop": stop,
        "min_tokens": request.min_tokens,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
    }
    return {name: value for name, value in given.items() if value is not None}
