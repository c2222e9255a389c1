"""Handlers of `/v1/responses`: create, read, follow, cancel, delete.

A response is a program with one call, so it survives a restart of the server, and a conversation is
the chain of programs that `previous_response_id` names.

Invariant: a response with `background` does not end with its client; any other does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, post
from litestar.params import FromPath, QueryParameter
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Struct

from ...program.decoding.bodies import revalidate
from ...program.errors import NotFoundError, UnavailableError
from ...program.ir import Json
from ...program.status import ProgramStatus
from ..openapi import error_responses, json_body, success_response
from ..problem import MissingValueError, public_error_of
from ..request_context import (
    AnyRequest,
    EventStreamResponse,
    RequestError,
    draining_of,
    service_of,
    tenant_of,
    while_connected,
)
from .errors import ErrorAnswer
from .execution import CompletionDelta, RequestCall, RequestExecution, RequestResult, answer_of
from .request_fields import answer_variable, call_node, read_request, submission_of
from .response_answers import (
    ResponseBuilder,
    ResponseObject,
    created_at_of,
    output_items,
    program_of,
    response_id,
    status_of,
)
from .response_request import Item, ResponseRequest, lower_response, request_record
from .routes import check_model

logger = logging.getLogger(__name__)

MAX_CHAIN = 1_000
"""Earlier responses of one conversation."""
_ERRORS = error_responses(404, 409, 422, 424, content=ErrorAnswer)
_CALL = RequestCall(call_node(0), answer_variable(0))

Stream = Annotated[
    bool | None, QueryParameter(name="stream", description="Return the response's events.")
]
StartingAfter = Annotated[
    int,
    QueryParameter(
        name="starting_after",
        ge=-1,
        le=2**53,
        description="Return the events after this sequence number.",
    ),
]


PageLimit = Annotated[
    int, QueryParameter(name="limit", ge=1, le=100, description="Items per page.")
]
Order = Annotated[
    Literal["asc", "desc"],
    QueryParameter(name="order", description="`desc` begins with the last item."),
]
AfterItem = Annotated[
    str | None,
    QueryParameter(name="after", description="The last item of the page before."),
]


class ItemList(Struct, frozen=True, kw_only=True):
    """A page of the input of a response."""

    object: str = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class InputTokens(Struct, frozen=True, kw_only=True):
    """The number of tokens of a request."""

    object: str = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Struct, frozen=True, kw_only=True):
    """The answer to the deletion of a response."""

    id: str
    object: str = "response"
    deleted: bool = True


class _StoredResponse:
    """A response that was created earlier."""

    def __init__(self, status: ProgramStatus, record: dict[str, Json]) -> None:
        self.status = status
        self.record = record
        self.builder = ResponseBuilder(status.id, record, created_at_of(status))

    @property
    def message(self) -> Json | None:
        """The message that was generated; None if there is none."""
        variable = self.status.variables.get(_CALL.variable)
        if variable is None or variable.status != "done" or variable.value is UNSET:
            return None
        return variable.value


@post(
    "/v1/responses",
    status_code=200,
    operation_class=json_body(ResponseRequest),
    responses={
        200: success_response(ResponseObject, "The response, or a stream of its events"),
        **_ERRORS,
    },
    tags=["openai"],
)
async def create_response(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Create a response.

    With `stream: true` the response is a stream of server-sent events. With `background: true` the
    response is generated even if the client disconnects.
    """
    body: ResponseRequest = await read_request(request, ResponseRequest)
    check_model(request, body.model)
    record = request_record(body)
    node = lower_response(body, await _earlier_items(request, body.previous_response_id), record)
    service, tenant = service_of(request), tenant_of(request)
    in_background = bool(body.background)
    submission, encoded = revalidate(submission_of("response", body, [node], detach=in_background))
    accepted, _ = await service.submit(submission, body=encoded, tenant=tenant)
    execution = _execution(request, accepted.id, owns_program=not in_background)
    builder = ResponseBuilder(accepted.id, record, int(time.time()))
    try:
        if body.stream:
            deltas = execution.stream(draining_of(request))
            # Wait for the first delta before sending the status line: most errors precede it.
            first = None
            if not in_background:
                first = await while_connected(request, _next(deltas))
            return EventStreamResponse(_stream(request, execution, builder, deltas, first, -1))
        if in_background:
            return _json(builder.response("queued"))
        result = await while_connected(request, execution.result())
    except BaseException:
        await execution.cancel()
        raise
    return _json(builder.response("completed", result))


@post(
    "/v1/responses/input_tokens",
    status_code=200,
    operation_class=json_body(ResponseRequest),
    responses={200: success_response(InputTokens, "The number of tokens"), **_ERRORS},
    tags=["openai"],
)
async def count_input_tokens(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Count the tokens of the prompt that a request for a response would send to the model."""
    body: ResponseRequest = await read_request(request, ResponseRequest)
    check_model(request, body.model)
    node = lower_response(body, await _earlier_items(request, body.previous_response_id), {})
    assert isinstance(node.messages, list), "a response is a chat"
    prompt = await service_of(request).tokenize(
        body.model,
        node.messages,
        tools=[] if node.tools is UNSET else node.tools,
        template_options=node.template_options,
    )
    return _json(InputTokens(input_tokens=prompt.count))


@get(
    "/v1/responses/{response:str}",
    responses={
        200: success_response(ResponseObject, "The response, or a stream of its events"),
        **_ERRORS,
    },
    tags=["openai"],
)
async def read_response(
    request: Request[Any, Any, Any],
    response: FromPath[str],
    stream: Stream = None,
    starting_after: StartingAfter = -1,
) -> ASGIResponse:
    """Return a response, or with `stream` its events from the first or after a number."""
    stored = await _load(request, response)
    if stream:
        execution = _execution(request, stored.status.id, owns_program=False)
        deltas = execution.stream(draining_of(request))
        lines = _stream(request, execution, stored.builder, deltas, None, starting_after)
        return EventStreamResponse(lines)
    return _json(_response_of(request, stored))


@post(
    "/v1/responses/{response:str}/cancel",
    status_code=200,
    responses={200: success_response(ResponseObject, "The response"), **_ERRORS},
    tags=["openai"],
)
async def cancel_response(request: Request[Any, Any, Any], response: FromPath[str]) -> ASGIResponse:
    """Cancel a response that is generated in the background. A finished one does not change."""
    stored = await _load(request, response)
    if not stored.record.get("background"):
        raise RequestError(
            "response.not_in_background",
            "only a response with 'background': true can be cancelled; close the connection of any "
            "other",
        )
    await service_of(request).cancel(stored.status.id, tenant=tenant_of(request))
    return _json(_response_of(request, await _load(request, response)))


@delete(
    "/v1/responses/{response:str}",
    status_code=200,
    responses={200: success_response(DeletedResponse, "The response is deleted"), **_ERRORS},
    tags=["openai"],
)
async def delete_response(
    request: Request[Any, Any, Any], response: FromPath[str]
) -> DeletedResponse:
    """Delete a response with its input for good; cancel it if it is being generated.

    Later responses of the conversation stay readable. A new response cannot continue from them: a
    part of their input is gone.
    """
    stored = await _load(request, response)
    await service_of(request).erase(stored.status.id, tenant=tenant_of(request))
    return DeletedResponse(id=response)


@get("/v1/responses/{response:str}/input_items", responses=_ERRORS, tags=["openai"])
async def list_input_items(
    request: Request[Any, Any, Any],
    response: FromPath[str],
    limit: PageLimit = 20,
    order: Order = "desc",
    after: AfterItem = None,
) -> ItemList:
    """List the input of a response, the last item first unless `order` is `asc`."""
    stored = await _load(request, response)
    items = [
        {"id": f"{response_id(stored.status.id)}_in_{i}", **_listed(item)}
        for i, item in enumerate(stored.record["input"])
    ]
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise RequestError(
            "request.invalid", f"'after' names no item of the input: {after!r}", path="after"
        )
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(items),
    )


def _listed(item: Item) -> Item:
    """Return an item as lists have it: a text becomes a list of one part."""
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": content}]}
    return {"type": "message", "status": "completed", **item}


def _json(response: ResponseObject | InputTokens) -> ASGIResponse:
    content = msgspec.json.encode(response)
    return ASGIResponse(body=content, media_type="application/json", status_code=200)


def _execution(request: AnyRequest, program: str, *, owns_program: bool) -> RequestExecution:
    return RequestExecution(
        service_of(request),
        program,
        [_CALL],
        tenant=tenant_of(request),
        owns_program=owns_program,
    )


async def _load(request: AnyRequest, response: str) -> _StoredResponse:
    """Return an earlier response.

    Raises:
        NotFoundError: if there is none, or it was not stored.
    """
    missing = NotFoundError(
        "response_not_found", f"response {response!r} does not exist or was not stored"
    )
    program = program_of(response)
    if program is None:
        raise missing
    try:
        status = await service_of(request).status(program, tenant=tenant_of(request))
    except NotFoundError:
        raise missing from None
    node = status.nodes.get(_CALL.node)
    meta = node.meta if node is not None and isinstance(node.meta, dict) else {}
    record = meta.get("response")
    if not isinstance(record, dict) or record.get("store") is False:
        raise missing
    return _StoredResponse(status, record)


def _response_of(request: AnyRequest, stored: _StoredResponse) -> ResponseObject:
    """Return an earlier response in its current status."""
    message = stored.message
    if message is not None:
        execution = _execution(request, stored.status.id, owns_program=False)
        result = execution.result_of([message], stored.status)
        return stored.builder.response("completed", result)
    status = status_of(stored.status.status)
    variable = stored.status.variables.get(_CALL.variable)
    if status != "failed" or variable is None:
        return stored.builder.response(status)
    error = public_error_of(request, MissingValueError(variable))
    return stored.builder.response(status, error=error)


async def _earlier_items(request: AnyRequest, response: str | None) -> list[Item]:
    """Return the inputs and answers of a chain of responses, the first one first.

    Raises:
        RequestError: if one of them is not stored or has no answer, or the chain is too long.
    """
    turns: list[list[Item]] = []
    while response is not None:
        try:
            stored = await _load(request, response)
        except NotFoundError as error:
            raise RequestError(
                "previous_response_not_found", error.message, path="previous_response_id"
            ) from None
        message = stored.message
        if message is None:
            raise RequestError(
                "response.not_finished",
                f"response {response!r} has no answer: wait for it, or leave it out",
                path="previous_response_id",
            )
        turns.append([*stored.record["input"], *output_items(answer_of(message))])
        response = stored.record.get("previous_response_id")
        if len(turns) > MAX_CHAIN:
            raise RequestError(
                "response.chain_too_long",
                f"more than {MAX_CHAIN} responses precede this one: start a new conversation",
                path="previous_response_id",
            )
    return [item for turn in reversed(turns) for item in turn]


async def _next(
    deltas: AsyncGenerator[CompletionDelta | RequestResult, None],
) -> CompletionDelta | RequestResult:
    return await anext(deltas)


async def _stream(
    request: AnyRequest,
    execution: RequestExecution,
    builder: ResponseBuilder,
    deltas: AsyncGenerator[CompletionDelta | RequestResult, None],
    first: CompletionDelta | RequestResult | None,
    after: int,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response after a number; -1 for all.

    A stream that the server interrupts, for example because it stops, has no final event if its
    response goes on. Its client resumes after the last number.
    """
    has_ended = False
    try:
        async with aclosing(deltas):
            yield builder.start(after=after)
            delta = await anext(deltas) if first is None else first
            while isinstance(delta, CompletionDelta):
                yield builder.delta(delta, after=after)
                delta = await anext(deltas)
            has_ended = True
            yield builder.end(delta, after=after)
    except Exception as exc:
        if isinstance(exc, MissingValueError) and exc.variable.status == "cancelled":
            yield builder.cancel(after=after)
        elif execution.owns_program or not isinstance(exc, UnavailableError):
            yield builder.fail(public_error_of(request, exc), after=after)
        else:  # the response goes on: a final event would hide the text after its number
            logger.info("stream of response=%s interrupted code=%s", builder.id, exc.code)
    finally:
        if not has_ended:
            await execution.cancel()


ROUTES = (
    count_input_tokens,
    create_response,
    read_response,
    cancel_response,
    delete_response,
    list_input_items,
)
BODIES = (ResponseRequest,)
