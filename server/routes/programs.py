"""Programs and their variables: submit, append, look, cancel, get, put.

Knows paths, headers and status codes; everything else is `service`'s. A variable that is
asked for answers 200 with its value, 202 while it has none, and with its own error once it
never will have one. Who submits and accepts an event stream gets the program's events in
the same exchange: a short program is over before a second request would have come.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.params import FromPath, HeaderParameter, QueryParameter
from litestar.response.base import ASGIResponse

from ..program.decode import decode_append, decode_json, decode_submission
from ..program.ir import Append, Submission
from ..program.status import ENDED, Accepted, ProgramStatus, PutValue, VariableStatus
from .connection import (
    EventStream,
    read_json,
    service_of,
    tenant_of,
    wants_events,
    while_connected,
)
from .document import answers, problems, reads
from .events import Types, lines_of
from .problem import AbsentError

MAX_WAIT_S = 600.0

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="The same key and body again answer as the first time, and run nothing.",
    ),
]
WaitSeconds = Annotated[
    float,
    QueryParameter(
        name="wait_s",
        ge=0,
        le=MAX_WAIT_S,
        description="How long to wait for the value, in seconds.",
    ),
]


@post(
    "/v1/programs",
    status_code=202,
    operation_class=reads(Submission, streams=202),
    responses={202: answers(Accepted, "On disk; or its events, as they come"), **problems(409)},
    tags=["programs"],
)
async def submit_program(
    request: Request[Any, Any, Any],
    idempotency_key: IdempotencyKey = None,
    types: Types = None,
) -> ASGIResponse:
    """Accepts a whole program; it is on disk when this answers.

    Who accepts `text/event-stream` gets its events from the first one on; `types` are theirs.
    """
    is_followed = wants_events(request)  # a header that is wrong must be told before all else
    body = await read_json(request)
    accepted, is_replay = await service_of(request).submit(
        decode_submission(body),
        body=body,
        tenant=tenant_of(request),
        idempotency_key=idempotency_key,
    )
    headers = {"Location": accepted.url}
    if is_replay:
        headers["Idempotent-Replay"] = "true"
    if is_followed:
        lines = lines_of(request, accepted.id, after=0, types=types)
        return EventStream(lines, status=202, headers=headers)
    body = msgspec.json.encode(accepted)
    return ASGIResponse(body=body, status_code=202, media_type="application/json", headers=headers)


@get("/v1/programs/{program:str}", responses=problems(404), tags=["programs"])
async def read_program(request: Request[Any, Any, Any], program: FromPath[str]) -> ProgramStatus:
    """Status of a program, of its nodes and variables, and its receipt once it has ended."""
    return await service_of(request).status(program, tenant=tenant_of(request))


@delete("/v1/programs/{program:str}", status_code=200, responses=problems(404), tags=["programs"])
async def cancel_program(request: Request[Any, Any, Any], program: FromPath[str]) -> ProgramStatus:
    """Cancels a program; one that has ended stays as it is."""
    return await service_of(request).cancel(program, tenant=tenant_of(request))


@post(
    "/v1/programs/{program:str}/nodes",
    status_code=202,
    operation_class=reads(Append),
    responses=problems(404, 409),
    tags=["programs"],
)
async def append_nodes(request: Request[Any, Any, Any], program: FromPath[str]) -> ProgramStatus:
    """Adds nodes to an open program, or closes it, all or nothing; tells only what is new."""
    body = await read_json(request)
    return await service_of(request).append(
        program, decode_append(body), body=body, tenant=tenant_of(request)
    )


@get(
    "/v1/programs/{program:str}/variables/{name:str}",
    responses={
        202: answers(VariableStatus, "No value yet"),
        **problems(404, 422, 424),
    },
    tags=["programs"],
)
async def read_variable(
    request: Request[Any, Any, Any],
    program: FromPath[str],
    name: FromPath[str],
    wait_s: WaitSeconds = 0.0,
) -> Response[VariableStatus]:
    """Value of a variable, waiting for it up to `wait_s`; 202 while there is none."""
    work = service_of(request).get(program, name, tenant=tenant_of(request), wait_s=wait_s)
    # Without a wait there is nothing to cancel.
    variable = await (while_connected(request, work) if wait_s > 0 else work)
    if variable.status == "done":
        return Response(variable, status_code=200)
    if variable.status in ENDED:
        raise AbsentError(variable)
    return Response(variable, status_code=202)


@put(
    "/v1/programs/{program:str}/variables/{name:str}",
    operation_class=reads(PutValue),
    responses=problems(404, 409),
    tags=["programs"],
)
async def write_variable(
    request: Request[Any, Any, Any], program: FromPath[str], name: FromPath[str]
) -> VariableStatus:
    """Gives a variable its value, or the error of a client step."""
    value: PutValue = decode_json(await read_json(request), PutValue)
    return await service_of(request).put(program, name, value, tenant=tenant_of(request))


ROUTES = (
    submit_program,
    read_program,
    cancel_program,
    append_nodes,
    read_variable,
    write_variable,
)
BODIES = (Submission, Append, PutValue)
