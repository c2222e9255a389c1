"""OpenAI's requests: which fields there are, and what they mean as a program.

Knows the bodies of `/v1/chat/completions` and `/v1/completions` and lowers a request to a
program with a call for each answer. Refuses to know HTTP, the service, and what answers look
like.

Kept true: a field is honoured, or harmless and listed, or refused by name. Nothing that
would change an answer is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..program.errors import ProgramError
from ..program.ir import (
    MAX_OUTPUT_TOKENS,
    AnyNode,
    Constraint,
    Generate,
    Json,
    Message,
    Options,
    Output,
    Program,
    Segment,
    Submission,
)
from ..program.seed import seed_of_answer

MAX_ANSWERS = 16
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
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    """Answers to one prompt: as many calls, which share it."""
    logit_bias: (
        Annotated[
            dict[Annotated[int, Meta(ge=0, lt=2**31)], Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1_024),
        ]
        | None
    ) = None

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


class SchemaFormat(Struct, frozen=True, kw_only=True):
    """A JSON schema; what it is called and whether it is strict changes nothing here."""

    schema: dict[str, Json]


class TextFormat(Struct, frozen=True, tag="text", tag_field="type"):
    """Text without a form."""


class ObjectFormat(Struct, frozen=True, tag="json_object", tag_field="type"):
    """Any JSON object."""


class JsonFormat(Struct, frozen=True, tag="json_schema", tag_field="type"):
    """JSON of a schema."""

    json_schema: SchemaFormat


ResponseFormat: TypeAlias = TextFormat | ObjectFormat | JsonFormat


class TextPart(Struct, frozen=True, tag="text", tag_field="type", kw_only=True):
    """A piece of a message's text."""

    text: str


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

    # Refused unless they say what is the case anyway.
    functions: Json | UnsetType = UNSET
    function_call: Json | UnsetType = UNSET
    modalities: Json | UnsetType = UNSET
    audio: Json | UnsetType = UNSET
    prediction: Json | UnsetType = UNSET
    reasoning_effort: Json | UnsetType = UNSET
    verbosity: Json | UnsetType = UNSET
    web_search_options: Json | UnsetType = UNSET


class CompletionRequest(OpenAIRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Json]
    # Refused unless they say what is the case anyway.
    logprobs: Json | UnsetType = UNSET
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    suffix: Json | UnsetType = UNSET


_IDLE: dict[str, tuple[Json, ...]] = {
    "logprobs": (False,),
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
    "annotations": ([],),
}
"""Fields that are refused, and the values (besides null) that ask for nothing."""


def refuse_unsupported(record: Struct, path: str = "") -> None:
    """Raises a ProgramError for the first field that asks for what there is not."""
    for name in record.__struct_fields__:
        if name not in _IDLE or (name == "logprobs" and isinstance(record, ChatRequest)):
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
    sampling = {**_sampling(request, limit), **_logprobs(request)}
    constraint = _constraint(request.response_format)

    def node(name: str, variable: str, seed: dict[str, int]) -> AnyNode:
        given = {**sampling, **seed, "constraint": constraint}
        output = Output(variable=variable, form="message", **given)
        return Generate(
            id=name, model=request.model, messages=messages, output=output, **_tools(request)
        )

    return _calls("chat", request, node)


def lower_completion(request: CompletionRequest) -> Submission:
    """The program of a plain completion.

    Raises:
        ProgramError: if the request asks for what is not supported.
    """
    refuse_unsupported(request)
    if not isinstance(request.prompt, str):
        raise ProgramError("unsupported_parameter", "'prompt' must be one string", path="prompt")
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = _sampling(request, limit)
    before = [Segment(text=request.prompt)] if request.prompt else []

    def node(name: str, variable: str, seed: dict[str, int]) -> AnyNode:
        output = Segment(output=variable, form="message", **{**sampling, **seed})
        return Generate(id=name, model=request.model, prompt=[*before, output])

    return _calls("completion", request, node)


def num_answers(request: OpenAIRequest) -> int:
    """How many answers a request wants."""
    return request.n or 1


def call_of(index: int) -> str:
    """Id of the node that makes an answer."""
    return f"call_{index}" if index else "call"


def answer_of(index: int) -> str:
    """The variable that an answer becomes."""
    return f"answer_{index}" if index else "answer"


def _calls(
    name: str, request: OpenAIRequest, node: Callable[[str, str, dict[str, int]], AnyNode]
) -> Submission:
    """One call for each answer. A seed that was given is the first answer's own."""
    indices = range(num_answers(request))
    nodes = [node(call_of(i), answer_of(i), _seed(request.seed, i)) for i in indices]
    program = Program(name=name, nodes=nodes, outputs=[answer_of(i) for i in indices])
    # Attached: after a crash nobody reads the answer, so nobody should pay for it.
    return Submission(program=program, options=Options(detach=False))


def _seed(seed: int | None, index: int) -> dict[str, int]:
    if seed is None:
        return {}
    # OpenAI's seeds may be negative; ours are names of noise, any mapping will do.
    if index == 0:
        return {"seed": seed & _UINT63}
    return {"seed": seed_of_answer(seed, index)}


def _logprobs(request: ChatRequest) -> dict[str, int]:
    """The sampling field for what `logprobs` and `top_logprobs` ask together.

    Raises:
        ProgramError: if only the second does.
    """
    if not request.logprobs:
        if request.top_logprobs:
            raise ProgramError(
                "request.invalid", "'top_logprobs' needs 'logprobs': true", path="top_logprobs"
            )
        return {}
    return {"logprobs": request.top_logprobs or 0}


def _tools(request: ChatRequest) -> dict[str, Any]:
    """Fields of the call that say what functions its answer may ask for."""
    if not request.tools:
        return {"tool_choice": request.tool_choice}
    return {
        "tools": request.tools,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
    }


def _constraint(wanted: ResponseFormat | None) -> Constraint | None:
    match wanted:
        case ObjectFormat():
            return Constraint(json_schema={"type": "object"})
        case JsonFormat(json_schema=SchemaFormat(schema=schema)):
            return Constraint(json_schema=schema)
        case _:
            return None


def _message(message: ChatMessage, i: int) -> Message:
    path = f"messages[{i}]."
    refuse_unsupported(message, path)
    if message.role == "function":
        raise ProgramError(
            "unsupported_parameter",
            "messages of role 'function' are not supported by this server; use 'tool'",
            path=path + "role",
        )
    content: str | list[Segment] = ""
    if isinstance(message.content, str):
        content = message.content
    elif message.content is not None:
        content = [_text(part, f"{path}content[{k}]") for k, part in enumerate(message.content)]
    role = "system" if message.role == "developer" else message.role
    return Message(
        role=role,
        content=content,
        name=message.name or UNSET,
        tool_calls=message.tool_calls or UNSET,
        tool_call_id=message.tool_call_id or UNSET,
    )


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
        "stop": stop,
        "min_tokens": request.min_tokens,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "logit_bias": request.logit_bias,
    }
    return {name: value for name, value in given.items() if value is not None}
