"""Endpoints of programs and their variables: submit, append, read, cancel, get and put.

Reading a variable returns 200 with its value, 202 while it has no value, and its error once it can
no longer get a value. A client that submits a program and accepts an event stream receives the
program's events in the same response, so a short program needs no second request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from litestar import MediaType, Request, Response, delete, get, post, put
from litestar.params import FromPath, HeaderParameter, QueryParameter
from litestar.response.base import ASGIResponse

from ...program.decoding.bodies import decode_append
from ...program.ir import Append, SourceSubmission, Submission
from ...program.status import ENDED, Accepted, ProgramPage, ProgramStatus, PutValue, VariableStatus
from ..openapi import error_responses, json_body, success_response
from ..problem import MissingValueError
from ..request_context import (
    EventStreamResponse,
    GeneratorResponse,
    accepts_event_stream,
    decode_body,
    read_json,
    read_record,
    service_of,
    tenant_of,
    while_connected,
)
from .events import Types, sse_stream
from .submissions import read_submission

MAX_WAIT_S = 600.0
MAX_ARRIVAL_S = 10.0

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="A repeated request with the same key and body returns the first response and "
        "runs nothing.",
    ),
]
WaitSeconds = Annotated[
    float,
    QueryParameter(
        name="wait_s",
        ge=0,
        le=MAX_WAIT_S,
        description="Maximum time to wait for the value, in seconds.",
    ),
]
StatusFilter = Annotated[
    Literal["running", "done", "failed", "cancelled", "deadline_exceeded"] | None,
    QueryParameter(
        name="status",
        description="Only programs with this status; `running` selects all that have not ended.",
    ),
]
Cursor = Annotated[
    int | None,
    QueryParameter(
        name="cursor",
        ge=0,
        le=2**63 - 1,
        description="The field `next` of the previous page.",
        schema_extra={"minimum": 0},  # Litestar omits a minimum of 0 if null is allowed.
    ),
]
Search = Annotated[
    str,
    QueryParameter(
        name="search",
        max_length=256,
        description="Only programs whose name or id contains this text, in any case.",
    ),
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=200, description="Programs per page.")]
ArrivalSeconds = Annotated[
    float,
    QueryParameter(
        name="wait_s",
        ge=0,
        le=MAX_ARRIVAL_S,
        description="How long to wait for the submission of the program, in seconds.",
    ),
]


@post(
    "/v1/programs",
    status_code=202,
    operation_class=json_body(Submission, SourceSubmission, streams=202),
    responses={
        202: success_response(Accepted, "Accepted and durable; or the stream of its events"),
        **error_responses(404, 409),
    },
    tags=["programs"],
)
async def submit_program(
    request: Request[Any, Any, Any],
    idempotency_key: IdempotencyKey = None,
    types: Types = None,
) -> ASGIResponse:
    """Submit a program: a graph (`program`), or a text (`source`).

    The program is durable when the server responds. With `Accept: text/event-stream` the response
    is the stream of the program's events from the first one; `types` selects the event types.
    """
    # An invalid Accept header is reported before the body is read.
    wants_events = accepts_event_stream(request)
    received = await read_submission(request)
    with received.source_positions():
        accepted, is_replay = await service_of(request).submit(
            received.submission,
            body=received.body,
            tenant=tenant_of(request),
            idempotency_key=idempotency_key,
        )
    headers = {"Location": accepted.url}
    if is_replay:
        headers["Idempotent-Replay"] = "true"
    if wants_events:
        lines = sse_stream(request, accepted.id, after=0, types=types)
        return EventStreamResponse(lines, status=202, headers=headers)
    body = msgspec.json.encode(accepted)
    return ASGIResponse(body=body, status_code=202, media_type="application/json", headers=headers)


@get("/v1/programs", responses=error_responses(), tags=["programs"])
async def list_programs(
    request: Request[Any, Any, Any],
    status: StatusFilter = None,
    cursor: Cursor = None,
    limit: Limit = 50,
    search: Search = "",
) -> ProgramPage:
    """List programs, newest first."""
    return await service_of(request).list_programs(
        tenant=tenant_of(request), status=status, cursor=cursor, limit=limit, search=search
    )


_STATUS = {
    200: success_response(ProgramStatus, "The status, its nodes and its variables"),
    **error_responses(404),
}


@get("/v1/programs/{program:str}", responses=_STATUS, tags=["programs"])
async def read_program(request: Request[Any, Any, Any], program: FromPath[str]) -> ASGIResponse:
    """Return the status of a program, its nodes and its variables, and the receipt of an ended
    program.
    """
    return await _status_response(request, program)


@delete("/v1/programs/{program:str}", status_code=200, responses=_STATUS, tags=["programs"])
async def cancel_program(request: Request[Any, Any, Any], program: FromPath[str]) -> ASGIResponse:
    """Cancel a program. An ended program does not change."""
    await service_of(request).cancel(program, tenant=tenant_of(request))
    return await _status_response(request, program)


async def _status_response(request: Request[Any, Any, Any], program: str) -> ASGIResponse:
    """Return the status of a program. A large status is streamed: each part is encoded when it is
    sent.
    """
    parts = await service_of(request).status_parts(program, tenant=tenant_of(request))
    first, second = next(parts), next(parts, None)
    if second is None:
        return ASGIResponse(body=first, media_type=MediaType.JSON)
    return GeneratorResponse(_in_turns(chain([first, second], parts)), media_type=MediaType.JSON)


async def _in_turns(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield parts; after each, the event loop can serve other requests."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


@delete(
    "/v1/programs/{program:str}/content",
    status_code=204,
    responses=error_responses(404),
    tags=["programs"],
)
async def erase_program(request: Request[Any, Any, Any], program: FromPath[str]) -> None:
    """Delete a program with its prompts, values and events for good; cancel it if it runs.

    The program does not exist afterwards. Its cost stays in the usage report.
    """
    await service_of(request).erase(program, tenant=tenant_of(request))


@post(
    "/v1/programs/{program:str}/nodes",
    status_code=202,
    operation_class=json_body(Append),
    responses=error_responses(404, 409),
    tags=["programs"],
)
async def append_nodes(
    request: Request[Any, Any, Any], program: FromPath[str], wait_s: ArrivalSeconds = 0.0
) -> ProgramStatus:
    """Append nodes to an open program, or close it.

    Either all changes are applied or none. The response contains only the new nodes and variables.
    A client that chose the id of its program may append before the submission is answered; with
    `wait_s`, the two requests may arrive in any order.
    """
    body = await read_json(request)
    append = await decode_body(request, body, decode_append)
    work = service_of(request).append(
        program, append, body=body, tenant=tenant_of(request), wait_s=wait_s
    )
    return await work


@get(
    "/v1/programs/{program:str}/variables/{name:str}",
    responses={
        202: success_response(VariableStatus, "No value yet"),
        **error_responses(404, 422, 424),
    },
    tags=["programs"],
)
async def read_variable(
    request: Request[Any, Any, Any],
    program: FromPath[str],
    name: FromPath[str],
    wait_s: WaitSeconds = 0.0,
) -> Response[VariableStatus]:
    """Return a variable, waiting up to `wait_s` seconds for its value.

    The status is 202 as long as the variable has no value.
    """
    work = service_of(request).get(program, name, tenant=tenant_of(request), wait_s=wait_s)
    # Without waiting there is no task to cancel.
    variable = await (while_connected(request, work) if wait_s > 0 else work)
    if variable.status == "done":
        return Response(variable, status_code=200)
    if variable.status in ENDED:
        raise MissingValueError(variable)
    return Response(variable, status_code=202)


@put(
    "/v1/programs/{program:str}/variables/{name:str}",
    operation_class=json_body(PutValue),
    responses=error_responses(404, 409),
    tags=["programs"],
)
async def write_variable(
    request: Request[Any, Any, Any], program: FromPath[str], name: FromPath[str]
) -> VariableStatus:
    """Set the value of a variable, or report the error of a client step."""
    value: PutValue = await read_record(request, PutValue)
    return await service_of(request).put(program, name, value, tenant=tenant_of(request))


ROUTES = (
    submit_program,
    list_programs,
    read_program,
    cancel_program,
    erase_program,
    append_nodes,
    read_variable,
    write_variable,
)
BODIES = (Submission, SourceSubmission, Append, PutValue)
