"""The endpoints of the Parrot paper (OSDI'24, section 4.1): submit a prompt, set and get a
variable.

    POST /v1/submit   {prompt, placeholders, session_id}       -> ids of the placeholders
    POST /v1/set      {semantic_var_id, content, session_id}   -> the id
    POST /v1/get      {semantic_var_id, criteria, session_id}  -> the content, once it exists

A session of the paper is an open program. A request appends one `generate` node to it, transforms
become `expr` nodes, and the id of a variable is `<program>.<variable>`. All endpoints of
`/v1/programs` therefore work for sessions as well; `{"close": true}` or DELETE ends one. A client
may also choose the ids of sessions and variables: the first submit or set with an id creates it.

Invariant: a session is completely described by its program, so these routes keep no state.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from litestar import Request, post
from msgspec import UNSET, Meta, Struct

from ...program.decoding.bodies import revalidate
from ...program.errors import NotFoundError
from ...program.expressions.values import text_of
from ...program.ir import Append, Options, Program, Submission, Variable
from ...program.status import PutValue
from ..openapi import error_responses, json_body
from ..request_context import RequestError, read_record, session_idle_s_of
from .placeholders import Placeholder, lower_request
from .sessions import CRITERIA, Sessions, split_id

VariableId = Annotated[str, Meta(min_length=1, max_length=512)]
SessionId = Annotated[str, Meta(min_length=1, max_length=256)]


class SubmitRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/submit`."""

    prompt: Annotated[str, Meta(min_length=1, max_length=4_194_304)]
    """Text with `{{name}}` for each placeholder."""
    placeholders: Annotated[list[Placeholder], Meta(max_length=1_000)]
    session_id: SessionId | None = None
    """An id that the server returned, or any id of the client's choice; null creates a new
    session."""
    model: str = "default"


class BoundPlaceholder(Struct, frozen=True, kw_only=True):
    """A placeholder and its variable."""

    name: str
    in_out: bool
    semantic_var_id: str


class SubmitAnswer(Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/submit`: the request is accepted and may not have run yet."""

    session_id: str
    request_id: str
    placeholders: list[BoundPlaceholder]


class SetRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/set`."""

    semantic_var_id: VariableId
    content: str
    session_id: SessionId | None = None
    """Required with a `semantic_var_id` that the client chose."""


class SetAnswer(Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/set`: the content is durable."""

    semantic_var_id: str


class GetRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/get`."""

    semantic_var_id: VariableId
    criteria: str = "latency"
    """`latency`, `throughput`, `ttft` or `tpot`, in upper or lower case."""
    session_id: SessionId | None = None
    """Required with a `semantic_var_id` that the client chose."""


class GetAnswer(Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/get`."""

    semantic_var_id: str
    content: str


@post(
    "/v1/submit",
    status_code=200,
    operation_class=json_body(SubmitRequest),
    responses=error_responses(404, 409),
    tags=["paper"],
)
async def submit_prompt(request: Request[Any, Any, Any]) -> SubmitAnswer:
    """Submit a prompt to a session, or to a new session."""
    parsed: SubmitRequest = await read_record(request, SubmitRequest)
    sessions = Sessions.of(request)
    suffix = secrets.token_hex(6)
    # The prompt is checked before a session is created for it.
    known = None if parsed.session_id is None else await sessions.find(parsed.session_id)
    lowered = lower_request(
        parsed.prompt, parsed.placeholders, suffix=suffix, session=known, model=parsed.model
    )
    if parsed.session_id is None:
        program = Program(name="session", variables=lowered.variables, nodes=lowered.nodes)
        options = Options(idle_timeout_s=session_idle_s_of(request))
        submission, body = revalidate(Submission(program=program, open=True, options=options))
        accepted, _ = await sessions.service.submit(submission, body=body, tenant=sessions.tenant)
        session = accepted.id
    else:
        append, body = revalidate(Append(variables=lowered.variables, nodes=lowered.nodes))
        session = known or await sessions.open(name=parsed.session_id)
        await sessions.service.append(session, append, body=body, tenant=sessions.tenant)
    bound = [
        BoundPlaceholder(
            name=placeholder.name,
            in_out=placeholder.in_out,
            semantic_var_id=placeholder.semantic_var_id
            or f"{session}.{lowered.bindings[placeholder.name]}",
        )
        for placeholder in parsed.placeholders
    ]
    return SubmitAnswer(
        session_id=parsed.session_id or session, request_id=lowered.request_id, placeholders=bound
    )


@post(
    "/v1/set",
    status_code=200,
    operation_class=json_body(SetRequest),
    responses=error_responses(404, 409),
    tags=["paper"],
)
async def set_variable(request: Request[Any, Any, Any]) -> SetAnswer:
    """Set the content of a variable.

    A session and a variable that the client named are created if they do not exist.
    """
    parsed: SetRequest = await read_record(request, SetRequest)
    sessions = Sessions.of(request)
    program, variable = split_id(parsed.semantic_var_id)
    is_chosen = program is None
    if is_chosen and parsed.session_id is not None:
        program = await sessions.open(name=parsed.session_id)
    program = await _program_of(sessions, parsed, program)
    value = PutValue(value=parsed.content)
    service, tenant = sessions.service, sessions.tenant
    try:
        await service.put(program, variable, value, tenant=tenant)
    except NotFoundError:
        if not is_chosen:
            raise
        declared = Append(variables={variable: Variable()}, inputs={variable: parsed.content})
        append, body = revalidate(declared)
        await service.append(program, append, body=body, tenant=tenant)
    return SetAnswer(semantic_var_id=parsed.semantic_var_id)


@post(
    "/v1/get",
    status_code=200,
    operation_class=json_body(GetRequest),
    responses=error_responses(404, 422, 424),
    tags=["paper"],
)
async def get_variable(request: Request[Any, Any, Any]) -> GetAnswer:
    """Wait for the content of a variable. The wait ends when the client disconnects."""
    parsed: GetRequest = await read_record(request, GetRequest)
    sessions = Sessions.of(request)
    objective = CRITERIA.get(parsed.criteria.lower())
    if objective is None:
        raise RequestError(
            "get.unknown_criteria",
            f"unknown criterion {parsed.criteria!r}; use one of {', '.join(CRITERIA)}",
            path="criteria",
        )
    named, variable = split_id(parsed.semantic_var_id)
    program = await _program_of(sessions, parsed, named)
    status = await sessions.wait(request, program, variable, objective)
    return GetAnswer(
        semantic_var_id=parsed.semantic_var_id,
        content=text_of(None if status.value is UNSET else status.value),
    )


async def _program_of(
    sessions: Sessions, request: SetRequest | GetRequest, program: str | None
) -> str:
    """Return the program of a request's variable.

    Args:
        sessions: the sessions of the tenant.
        request: names a variable, and perhaps a session.
        program: the program in the variable's id; None if the client chose the id.

    Raises:
        RequestError: if no session is known, or the variable belongs to another session.
    """
    if program is None and request.session_id is None:
        raise RequestError(
            "variable.malformed_id",
            f"{request.semantic_var_id!r} names no session: add session_id, or use an id that "
            "/v1/submit returned",
            path="semantic_var_id",
        )
    if request.session_id is None:
        assert program is not None
        return program
    session = await sessions.resolve(request.session_id)
    if program not in (None, session):
        raise RequestError(
            "variable.other_session",
            f"{request.semantic_var_id!r} is not a variable of session {request.session_id!r}",
            path="session_id",
        )
    return session


ROUTES = (submit_prompt, set_variable, get_variable)
BODIES = (SubmitRequest, SetRequest, GetRequest)
