"""What the requests of all OpenAI endpoints share: their fields, and parts of their translation.

Out of scope: the fields of one endpoint, HTTP, and the shape of responses.

Invariants: every field is supported, or ignored because it cannot change an answer, or rejected by
name. A field that would change an answer is never ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ...program.decoding.bodies import UnknownFieldError, decode_json
from ...program.errors import ProgramError
from ...program.ir import (
    MAX_OUTPUT_TOKENS,
    AnyNode,
    Constraint,
    Json,
    Objective,
    Options,
    Program,
    Sampling,
    Submission,
)
from ...program.seed import seed_of_answer
from ..request_context import AnyRequest, decode_body, read_json

R = TypeVar("R", bound=Struct)

MAX_ANSWERS = 16
_UINT63 = 2**63 - 1

Tokens = Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops: TypeAlias = Stop | Annotated[list[Stop], Meta(max_length=16)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """Ignored: the usage is sent once, at the end."""


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's constraint on an answer; exactly one field is set."""

    json: dict[str, Json] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A Lark grammar."""
    json_object: bool | None = None


class SessionBinding(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conure's extension: the session whose semantic variables a request reads and writes."""

    session: Annotated[str, Meta(min_length=1, max_length=256)]
    """The id of a program, or a name of the client's choice."""
    read: dict[str, Annotated[str, Meta(min_length=1, max_length=512)]] = {}
    """Variables by the names that `{{name}}` uses in the request's texts."""
    write: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """The variable that receives the answer's text."""


class GenerationRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of every endpoint that generates text."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None

    # Extensions that other servers support as well.
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    """A smaller number runs earlier, as in vLLM."""

    service_tier: Json | UnsetType = UNSET
    """`flex`: the calls run in the background. Other values have no effect."""

    # Accepted and ignored: these fields cannot change an answer.
    user: Json | UnsetType = UNSET
    safety_identifier: Json | UnsetType = UNSET
    prompt_cache_key: Json | UnsetType = UNSET
    prompt_cache_retention: Json | UnsetType = UNSET
    prompt_cache_options: Json | UnsetType = UNSET
    request_id: Json | UnsetType = UNSET


class OpenAIRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of both completion endpoints."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=_UINT63)] | None = None
    stop: Stops | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    """Number of answers to a prompt. They share the prompt's KV cache."""
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1_024)]
        | None
    ) = None
    metadata: Json | UnsetType = UNSET
    conure: SessionBinding | None = None

    guided_json: dict[str, Json] | str | None = None
    """vLLM's earlier spelling of `structured_outputs`, as the next three."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Rejected unless the value has no effect.
    add_special_tokens: Json | UnsetType = UNSET
    allowed_token_ids: Json | UnsetType = UNSET
    bad_words: Json | UnsetType = UNSET
    include_stop_str_in_output: Json | UnsetType = UNSET
    length_penalty: Json | UnsetType = UNSET
    prompt_logprobs: Json | UnsetType = UNSET
    return_tokens_as_token_ids: Json | UnsetType = UNSET
    skip_special_tokens: Json | UnsetType = UNSET
    spaces_between_special_tokens: Json | UnsetType = UNSET
    truncate_prompt_tokens: Json | UnsetType = UNSET
    use_beam_search: Json | UnsetType = UNSET


_NO_OP_VALUES: dict[str, tuple[Json, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "annotations": ([],),
    "audio": (),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "conversation": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Unsupported fields, and the values (besides null) that have no effect and are therefore
accepted."""

_CURES = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "suffix": "write the text after the gap into the prompt",
    "truncate_prompt_tokens": "shorten the prompt; nothing is truncated here",
    "truncation": "shorten the input; nothing is truncated here",
    "prompt_logprobs": "use `logprobs` for the answer's tokens",
    "conversation": "use `previous_response_id`",
    "documents": "write the documents into a message",
    "bad_words": "use `logit_bias`",
    "allowed_token_ids": "use `structured_outputs`",
}


async def read_request(request: AnyRequest, record: type[R]) -> R:
    """Read and decode the body of a request; see `decode_request`."""
    body = await read_json(request)
    return await decode_body(request, body, lambda body: decode_request(body, record))


def decode_request(body: bytes, record: type[R]) -> R:
    """Decode the body of a request.

    Raises:
        ProgramError: if it is not valid. For an unknown option it names the nearest known one.
    """
    try:
        return decode_json(body, record)
    except UnknownFieldError as error:
        name, path = error.field, error.path
        message = f"unknown option {name!r}: {error.hint or 'remove it'}"
        location = f"{path}.{name}" if path else name
        raise ProgramError("unknown_parameter", message, path=location) from error


def reject_unsupported(record: Struct, path: str = "") -> None:
    """Raise a ProgramError for the first field whose value requests an unsupported feature."""
    for name in record.__struct_fields__:
        if name not in _NO_OP_VALUES:
            continue
        value = getattr(record, name)
        if (
            value is UNSET
            or value is None
            or any(_same(value, idle) for idle in _NO_OP_VALUES[name])
        ):
            continue
        cure = _CURES.get(name, "remove it")
        raise unsupported(f"{name!r} is not supported by this server: {cure}", path + name)


def unsupported(message: str, path: str) -> ProgramError:
    """Return the error of a feature that this server lacks."""
    return ProgramError("unsupported_parameter", message, path=path)


def _same(value: Json, idle: Json) -> bool:
    return type(value) is type(idle) and bool(value == idle)


# --- translation ------------------------------------------------------------------------------


def call_node(index: int) -> str:
    """Return the id of the node that generates an answer."""
    return f"call_{index}" if index else "call"


def answer_variable(index: int) -> str:
    """Return the name of the variable that holds an answer."""
    return f"answer_{index}" if index else "answer"


def submission_of(
    name: str, request: GenerationRequest, nodes: Sequence[AnyNode], *, detach: bool = False
) -> Submission:
    """Return the program of a request, with one call per answer.

    Args:
        name: name of the program.
        request: supplies the options.
        nodes: the calls, whose outputs are named by `answer_variable`.
        detach: whether the program runs on without its client.
    """
    outputs = [answer_variable(i) for i in range(len(nodes))]
    # Attached: after a server crash the client is gone, so the program should not run again.
    options = Options(detach=detach, cache_salt=request.cache_salt)
    return Submission(
        program=Program(name=name, nodes=list(nodes), outputs=outputs),
        objectives=dict.fromkeys(outputs, objective_of(request)),
        options=options,
    )


def objective_of(request: GenerationRequest) -> Objective:
    """Return the objective of a request's calls."""
    return "throughput" if request.service_tier == "flex" else "latency"


def sampling_of(request: GenerationRequest, max_tokens: int | None) -> dict[str, Any]:
    """Return the sampling fields that the request sets; others keep the program's defaults."""
    fields = {name: getattr(request, name, None) for name in _COPIED_SAMPLING}
    stop = getattr(request, "stop", None)
    fields["stop"] = [stop] if isinstance(stop, str) else stop
    fields["top_k"] = None if request.top_k is None else max(0, request.top_k)
    fields["max_tokens"] = max_tokens
    return {name: value for name, value in fields.items() if value is not None}


_COPIED_SAMPLING = tuple(
    name
    for name in Sampling.__struct_fields__
    if name in OpenAIRequest.__struct_fields__
    and name not in {"max_tokens", "seed", "stop", "top_k"}
)
"""Sampling fields with the same name and meaning in both APIs. The excluded ones are converted."""


def seed_of(request: OpenAIRequest, index: int) -> dict[str, Any]:
    """Return the seed of an answer to a prompt. The first answer uses the request's own."""
    seed = request.seed
    if seed is None:
        return {}
    # OpenAI's seeds may be negative. A seed only selects a noise stream, so any mapping works.
    return {"seed": seed & _UINT63 if index == 0 else seed_of_answer(seed, index)}


def node_fields(request: GenerationRequest) -> dict[str, Any]:
    """Return the fields of a call's node that the request sets."""
    # vLLM runs smaller numbers first, nodes larger ones.
    return {"model": request.model, "priority": -(request.priority or 0)}


def constraint_of(
    request: GenerationRequest, response_format: Constraint | None = None
) -> Constraint | None:
    """Return the constraint of the answers.

    Raises:
        ProgramError: if there is more than one, or one is malformed.
    """
    found: dict[str, Constraint] = {}
    if response_format is not None:
        found["response_format"] = response_format
    if request.structured_outputs is not None:
        for name in StructuredOutputs.__struct_fields__:
            value = getattr(request.structured_outputs, name)
            if value is not None and value is not False:
                found[f"structured_outputs.{name}"] = _constraint(
                    name, value, f"structured_outputs.{name}"
                )
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{name}", None)
        if value is not None:
            found[f"guided_{name}"] = _constraint(name, value, f"guided_{name}")
    if len(found) > 1:
        first, second, *_ = found
        raise ProgramError(
            "request.invalid", f"{first!r} and {second!r} exclude each other", path=second
        )
    return next(iter(found.values()), None)


def _constraint(kind: str, value: Json, path: str) -> Constraint:
    makers: dict[str, Callable[[Json], Constraint]] = {
        "json": lambda schema: Constraint(json_schema=_schema(schema, path)),
        "regex": lambda regex: Constraint(regex=regex),
        "choice": lambda choices: Constraint(choices=choices),
        "grammar": lambda grammar: Constraint(lark=grammar),
        "json_object": lambda _: Constraint(json_schema={"type": "object"}),
    }
    return makers[kind](value)


def _schema(schema: dict[str, Json] | str, path: str) -> dict[str, Json]:
    """Return a JSON schema that may be given as text."""
    if not isinstance(schema, str):
        return schema
    try:
        decoded = msgspec.json.decode(schema)
    except msgspec.DecodeError:
        decoded = None
    if not isinstance(decoded, dict):
        raise ProgramError("request.invalid", f"{path!r} is not a JSON schema", path=path)
    return decoded
