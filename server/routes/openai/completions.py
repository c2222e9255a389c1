"""The request of `/v1/completions`, and its translation to a program.

A request has one prompt or a list of them, each a text or token ids, and `n` answers per prompt.
Answers are numbered prompt by prompt.

Out of scope: HTTP, and the shape of responses.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from ...program.errors import ProgramError
from ...program.ir import AnyNode, GenerateNode, Json, Segment
from .chat import ResponseFormat, format_constraint
from .request_fields import (
    OpenAIRequest,
    TokenId,
    answer_variable,
    call_node,
    constraint_of,
    node_fields,
    reject_unsupported,
    sampling_of,
    seed_of,
    unsupported,
)

MAX_PROMPTS = 1_024
MAX_PROMPT_TOKENS = 4_194_304
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Prompt: TypeAlias = str | list[int]


class CompletionRequest(OpenAIRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Json]
    """A text, token ids, or a list of texts or of lists of token ids."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of alternatives that are returned for each token."""
    echo: bool | None = None
    """Whether answers begin with the prompt."""
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: Json | UnsetType = UNSET


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a request.

    Raises:
        ProgramError: if it has none, too many, or prompts of mixed types.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _invalid("'prompt' is an empty list: send at least one prompt")
    if _are_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise _invalid(f"{len(prompt)} prompts are more than {MAX_PROMPTS}: send several requests")
    if all(isinstance(each, str) for each in prompt):
        return prompt
    if all(isinstance(each, list) and each and _are_ids(each) for each in prompt):
        return prompt
    raise _invalid("'prompt' must be a text, token ids, or a list of only texts or only token ids")


def _are_ids(prompt: list[Json]) -> bool:
    return set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < 2**31


def _invalid(message: str) -> ProgramError:
    return ProgramError("request.invalid", message, path="prompt")


def lower_completion(request: CompletionRequest) -> list[AnyNode]:
    """Translate a completion to calls: `n` for each prompt, in order.

    Raises:
        ProgramError: if the request uses an unsupported feature.
    """
    reject_unsupported(request)
    num_answers = request.n or 1
    if request.best_of not in (None, num_answers):
        raise unsupported(
            "'best_of' is not supported by this server: request 'n' answers with 'logprobs', and "
            "choose among them",
            "best_of",
        )
    if request.echo and request.logprobs is not None:
        raise unsupported(
            "'echo' with 'logprobs' is not supported by this server, which has no log "
            "probabilities of prompts: remove one of them",
            "echo",
        )
    if request.chat_template_kwargs:
        raise unsupported(
            "'chat_template_kwargs' are for a chat: use /v1/chat/completions",
            "chat_template_kwargs",
        )
    sampling = sampling_of(request, request.max_tokens)
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
    constraint = constraint_of(request, format_constraint(request.response_format))
    nodes: list[AnyNode] = []
    for prompt in prompts_of(request):
        for answer in range(num_answers):
            i = len(nodes)
            output = Segment(
                output=answer_variable(i),
                form="message",
                constraint=constraint,
                **sampling,
                **seed_of(request, answer),
            )
            given: dict[str, Any] = {"prompt": [output]}
            if isinstance(prompt, list):
                given["prompt_ids"] = prompt
            elif prompt:
                given["prompt"] = [Segment(text=prompt), output]
            nodes.append(GenerateNode(id=call_node(i), **given, **node_fields(request)))
    return nodes
