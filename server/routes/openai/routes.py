"""Handlers of OpenAI's completion and model endpoints.

`chat` and `completions` translate requests, `execution` follows their calls, `chat_answers` and
`completion_answers` build the responses, and `errors` builds error bodies in OpenAI's format.

Invariants: a client that disconnects cancels its calls; an error before the first text is an HTTP
error, a later one is the last event of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Struct

from conure.engine.protocol import ModelPurpose

from ...program.decoding.bodies import MAX_BODY_BYTES, revalidate
from ...program.errors import NotFoundError, ProgramError, PromptError
from ...program.ir import AnyNode
from ...service import ModelInfo
from ..middleware import RequestTimeMiddleware, timer_of
from ..openapi import error_responses, json_body, success_response
from ..parrot.sessions import Sessions
from ..problem import public_error_of
from ..request_context import (
    AnyRequest,
    EventStreamResponse,
    draining_of,
    service_of,
    tenant_of,
    while_connected,
)
from .chat import ChatRequest, lower_chat
from .chat_answers import ChatCompletion, ChatResponseBuilder
from .completion_answers import Completion, CompletionResponseBuilder
from .completions import CompletionRequest, Prompt, lower_completion, prompts_of
from .errors import ErrorAnswer, error_answer
from .execution import CompletionDelta, RequestCall, RequestExecution, RequestResult
from .request_fields import (
    OpenAIRequest,
    answer_variable,
    call_node,
    objective_of,
    read_request,
    submission_of,
)
from .session import append_calls
from .streaming import ChunkBuilder, sse_data

_ERRORS = error_responses(404, 422, 424, content=ErrorAnswer)


class Model(Struct, frozen=True, kw_only=True):
    """A model that this server runs."""

    id: str
    aliases: list[str] = []
    """Other names that a request may use, such as `owner/name` on the Hugging Face Hub."""
    object: str = "model"
    created: int
    owned_by: str = "conure"
    max_model_len: int
    description: str = ""
    capabilities: list[str] = []
    purpose: ModelPurpose = "general"
    notice: str = ""
    """What a user must know before the first answer; empty for an ordinary model."""


class ModelList(Struct, frozen=True, kw_only=True):
    """All models of this server."""

    object: str = "list"
    data: list[Model]


@post(
    "/v1/chat/completions",
    status_code=200,
    operation_class=json_body(ChatRequest),
    responses={
        200: success_response(ChatCompletion, "The completion, or a stream of its chunks"),
        **_ERRORS,
    },
    middleware=[RequestTimeMiddleware()],
    tags=["openai"],
)
async def complete_chat(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Create a chat completion.

    With `stream: true` the response is a stream of server-sent events.
    """
    body: ChatRequest = await read_request(request, ChatRequest)
    check_model(request, body.model)
    await _check_copies(request, body)
    nodes = lower_chat(body)

    def builder(request_id: str) -> ChunkBuilder:
        return ChatResponseBuilder(
            request_id, body.model, with_usage=_with_usage(body), num_answers=len(nodes)
        )

    return await _run_request(request, body, "chat", nodes, builder)


@post(
    "/v1/completions",
    status_code=200,
    operation_class=json_body(CompletionRequest),
    responses={
        200: success_response(Completion, "The completion, or a stream of its chunks"),
        **_ERRORS,
    },
    middleware=[RequestTimeMiddleware()],
    tags=["openai"],
)
async def complete_text(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Create completions of one or more prompts.

    With `stream: true` the response is a stream of server-sent events.
    """
    body: CompletionRequest = await read_request(request, CompletionRequest)
    model = check_model(request, body.model)
    await _check_copies(request, body)
    nodes = lower_completion(body)
    echoes = [""] * len(nodes)
    if body.echo:
        texts = await _prompt_texts(request, prompts_of(body), model)
        echoes = [text for text in texts for _ in range(body.n or 1)]

    def builder(request_id: str) -> ChunkBuilder:
        return CompletionResponseBuilder(
            request_id,
            body.model,
            with_usage=_with_usage(body),
            echoes=echoes,
            with_alternatives=bool(body.logprobs),
        )

    return await _run_request(request, body, "completion", nodes, builder)


@get("/v1/models", responses=_ERRORS, tags=["openai"])
async def list_models(request: Request[Any, Any, Any]) -> ModelList:
    """List the models of this server."""
    return ModelList(data=[_model(info) for info in service_of(request).models()])


@get("/v1/models/{model:path}", responses=_ERRORS, tags=["openai"])
async def read_model(request: Request[Any, Any, Any], model: FromPath[str]) -> Model:
    """Return one model. Its id may contain slashes."""
    return _model(check_model(request, model.removeprefix("/")))


def _model(info: ModelInfo) -> Model:
    return Model(
        id=info.id,
        aliases=[*info.aliases],
        created=info.created,
        max_model_len=info.context_len,
        description=info.description,
        capabilities=[*info.capabilities],
        purpose=info.purpose,
        notice=info.notice,
    )


def check_model(request: AnyRequest, name: str) -> ModelInfo:
    """Return the model of that name. `default` is the first model.

    Raises:
        NotFoundError: if no model has the name.
    """
    models = service_of(request).models()
    for i, info in enumerate(models):
        if name in (info.id, *info.aliases) or (i == 0 and name == "default"):
            return info
    known = ", ".join(info.id for info in models) or "none"
    raise NotFoundError(
        "model_not_found", f"model {name!r} does not exist; this server has: {known}", path="model"
    )


async def _check_copies(request: AnyRequest, body: OpenAIRequest) -> None:
    """Check the size of the program of a request, which has its prompts once per answer.

    Raises:
        ProgramError: `program.too_large`.
    """
    num_bytes, num_answers = len(await request.body()), body.n or 1
    if num_bytes * num_answers > MAX_BODY_BYTES:
        raise ProgramError(
            "program.too_large",
            f"{num_answers} answers to a request of {num_bytes:,} bytes exceed the limit of "
            f"{MAX_BODY_BYTES:,} bytes together: request fewer answers at once",
            path="n",
            status=413,
        )


async def _prompt_texts(
    request: AnyRequest, prompts: Sequence[Prompt], model: ModelInfo
) -> list[str]:
    """Return the texts of prompts.

    Raises:
        PromptError: `prompt.too_long`.
    """
    service = service_of(request)
    texts: list[str] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
            continue
        if len(prompt) > model.context_len:
            raise PromptError(
                "prompt.too_long",
                f"the prompt has {len(prompt)} tokens and the model reads {model.context_len}",
                path="prompt",
            )
        texts.append(await asyncio.to_thread(service.decode, prompt))
    return texts


def _with_usage(body: OpenAIRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


async def _run_request(
    request: AnyRequest,
    body: OpenAIRequest,
    name: str,
    nodes: Sequence[AnyNode],
    builder_of: Callable[[str], ChunkBuilder],
) -> ASGIResponse:
    execution, request_id = await _start(request, body, name, nodes)
    builder = builder_of(request_id)
    try:
        if body.stream:
            deltas = execution.stream(draining_of(request))
            # Wait for the first delta before sending the status line: most errors precede it.
            first = await while_connected(request, _next(deltas))
            return EventStreamResponse(_stream_chunks(request, execution, builder, first, deltas))
        result = await while_connected(request, execution.result())
    except BaseException:
        await execution.cancel()
        raise
    if len(nodes) == 1 and execution.owns_program:
        timer_of(request).engine_s = result.engine_s
    content = msgspec.json.encode(builder.complete(result))
    return ASGIResponse(body=content, media_type="application/json", status_code=200)


async def _start(
    request: AnyRequest, body: OpenAIRequest, name: str, nodes: Sequence[AnyNode]
) -> tuple[RequestExecution, str]:
    """Submit the calls of a request; return their execution, and an id for the response."""
    service, tenant = service_of(request), tenant_of(request)
    calls = [RequestCall(call_node(i), answer_variable(i)) for i in range(len(nodes))]
    after, kill = 0, None
    if body.conure is None:
        submission, encoded = revalidate(submission_of(name, body, nodes))
        accepted, _ = await service.submit(submission, body=encoded, tenant=tenant)
        program = request_id = accepted.id
    else:
        program, calls, after, kill = await append_calls(
            Sessions.of(request), body.conure, nodes, objective_of(body)
        )
        request_id = f"{program}-{calls[0].node}"
    execution = RequestExecution(
        service,
        program,
        calls,
        tenant=tenant,
        num_answers=body.n or 1,
        owns_program=body.conure is None,
        after=after,
        kill=kill,
    )
    return execution, request_id


async def _next(
    deltas: AsyncGenerator[CompletionDelta | RequestResult, None],
) -> CompletionDelta | RequestResult:
    """Return the next delta. `while_connected` accepts this coroutine, but not an awaitable."""
    return await anext(deltas)


async def _stream_chunks(
    request: AnyRequest,
    execution: RequestExecution,
    builder: ChunkBuilder,
    first: CompletionDelta | RequestResult,
    deltas: AsyncGenerator[CompletionDelta | RequestResult, None],
) -> AsyncGenerator[bytes, None]:
    has_ended = False
    try:
        async with aclosing(deltas):
            yield builder.start()
            delta = first
            while isinstance(delta, CompletionDelta):
                yield builder.delta(delta)
                delta = await anext(deltas)
            has_ended = True
            yield builder.end(delta)
    except Exception as exc:
        yield sse_data(error_answer(public_error_of(request, exc)))
    finally:
        if not has_ended:
            await execution.cancel()


ROUTES = (complete_chat, complete_text, list_models, read_model)
BODIES = (ChatRequest, CompletionRequest)
