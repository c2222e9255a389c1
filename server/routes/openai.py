"""OpenAI's endpoints: a chat or a completion is a program of one call, or of `n`.

Knows the routes. Fields and what they mean are in `openai_wire`, shapes of answers in
`openai_answers`, the waiting in `openai_call`; errors come in OpenAI's own shape here.

Kept true: a client that leaves takes its program with it; an error that shows before the
first piece of text is a proper HTTP error, a later one is the stream's last event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from ..program.decode import decode_json, seal
from ..program.errors import NotFoundError
from ..program.ir import Submission
from ..service import ModelInfo
from . import openai_answers as answers
from .connection import (
    AnyRequest,
    EventStream,
    draining_of,
    read_json,
    service_of,
    tenant_of,
    while_connected,
)
from .document import answers as answered_by
from .document import problems, reads
from .openai_answers import ChatDialect, Dialect, TextDialect
from .openai_call import Call, Final, Piece
from .openai_wire import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    lower_chat,
    lower_completion,
    num_answers,
)
from .problem import failure_of

_ERRORS = problems(404, 422, 424, content=answers.ErrorAnswer)


@post(
    "/v1/chat/completions",
    status_code=200,
    operation_class=reads(ChatRequest),
    responses={200: answered_by(answers.ChatCompletion, "The answer, or a stream"), **_ERRORS},
    tags=["openai"],
)
async def complete_chat(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Completes a chat."""
    wanted: ChatRequest = decode_json(await read_json(request), ChatRequest)
    check_model(request, wanted.model)
    return await _answer(request, wanted, lower_chat(wanted), ChatDialect)


@post(
    "/v1/completions",
    status_code=200,
    operation_class=reads(CompletionRequest),
    responses={200: answered_by(answers.Completion, "The answer, or a stream"), **_ERRORS},
    tags=["openai"],
)
async def complete_text(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Completes a text."""
    wanted: CompletionRequest = decode_json(await read_json(request), CompletionRequest)
    check_model(request, wanted.model)
    return await _answer(request, wanted, lower_completion(wanted), TextDialect)


@get("/v1/models", responses=_ERRORS, tags=["openai"])
async def list_models(request: Request[Any, Any, Any]) -> answers.ModelList:
    """All models that requests can name."""
    return answers.ModelList(data=[_model(info) for info in service_of(request).models()])


@get("/v1/models/{model:path}", responses=_ERRORS, tags=["openai"])
async def read_model(request: Request[Any, Any, Any], model: FromPath[str]) -> answers.Model:
    """One model; its id may contain slashes."""
    return _model(check_model(request, model.removeprefix("/")))


def _model(info: ModelInfo) -> answers.Model:
    return answers.Model(
        id=info.id,
        created=info.created,
        max_model_len=info.context_len,
        description=info.description,
        capabilities=[*info.capabilities],
    )


def check_model(request: AnyRequest, name: str) -> ModelInfo:
    """Returns the model of that name; `default` is the first one.

    Raises:
        NotFoundError: if there is none.
    """
    models = service_of(request).models()
    for i, info in enumerate(models):
        if info.id == name or (i == 0 and name == "default"):
            return info
    known = ", ".join(info.id for info in models) or "none"
    raise NotFoundError(
        "model_not_found", f"there is no model {name!r}; this server has: {known}", path="model"
    )


def answer_error(request: AnyRequest, exc: Exception) -> Response[answers.ErrorAnswer]:
    """The exception handler of these routes."""
    failure = failure_of(request, exc)
    return Response(
        answers.error_answer(failure),
        status_code=failure.status,
        headers=failure.headers,
        media_type="application/json",
    )


async def _answer(
    request: AnyRequest,
    wanted: OpenAIRequest,
    submission: Submission,
    dialect_type: type[Dialect],
) -> ASGIResponse:
    service, tenant = service_of(request), tenant_of(request)
    submission, body = seal(submission)
    accepted, _ = await service.submit(submission, body=body, tenant=tenant)
    count = num_answers(wanted)
    call = Call(service, accepted.id, tenant=tenant, num_answers=count)
    options = wanted.stream_options
    dialect = dialect_type(
        accepted.id,
        wanted.model,
        with_usage=bool(options and options.include_usage),
        num_answers=count,
    )
    try:
        if wanted.stream:
            pieces = call.pieces(draining_of(request))
            # The first piece decides the status line: most errors come before it.
            first = await while_connected(request, _next(pieces))
            return EventStream(_chunks(request, call, dialect, first, pieces))
        final = await while_connected(request, call.whole())
    except BaseException:
        await call.abandon()
        raise
    answer = msgspec.json.encode(dialect.whole(final))
    return ASGIResponse(body=answer, media_type="application/json", status_code=200)


async def _next(pieces: AsyncGenerator[Piece | Final, None]) -> Piece | Final:
    return await anext(pieces)


async def _chunks(
    request: AnyRequest,
    call: Call,
    dialect: Dialect,
    first: Piece | Final,
    pieces: AsyncGenerator[Piece | Final, None],
) -> AsyncGenerator[bytes, None]:
    has_ended = False
    try:
        async with aclosing(pieces):
            yield dialect.start()
            piece = first
            while isinstance(piece, Piece):
                yield dialect.piece(piece)
                piece = await anext(pieces)
            has_ended = True
            yield dialect.end(piece)
    except Exception as exc:
        yield answers.event(answers.error_answer(failure_of(request, exc)))
    finally:
        if not has_ended:
            await call.abandon()


ROUTES = (complete_chat, complete_text, list_models, read_model)
BODIES = (ChatRequest, CompletionRequest)
