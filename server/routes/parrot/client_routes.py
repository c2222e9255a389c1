"""The endpoints that Microsoft's Parrot client uses, with the bodies and answers that it expects.

    POST, DELETE, GET  /v1/session[/{session_id}]
    POST               /v1/semantic_call, /v1/py_native_call
    POST, GET          /v1/semantic_var[/{var_id}]

The client sends JSON bodies with GET and DELETE as well, and accepts no success but status 200.

Invariants: these routes keep no state: a session's number is a name in the journal, and a
variable's id is its name in the program. Byte code from a client is never decoded.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from litestar import Request, delete, get, post
from litestar.params import FromPath
from msgspec import UNSET, Struct

from ...program.decoding.bodies import revalidate
from ...program.errors import ConflictError, NotFoundError, ProgramError
from ...program.expressions.values import text_of
from ...program.ir import NAME_PATTERN, Append, Variable
from ...program.status import PutValue
from ..openapi import error_responses, json_body
from ..request_context import read_record
from .client_calls import (
    BoundParameter,
    LoweredCall,
    NativeCall,
    SemanticCall,
    SessionNumber,
    fresh_name,
    lower_native_call,
    lower_semantic_call,
    read_criteria,
)
from .client_errors import ClientError
from .sessions import CRITERIA, Sessions

_ERRORS = error_responses(404, 409, 422, 424, content=ClientError)
_NAME = re.compile(NAME_PATTERN)
_NUM_SESSION_BITS = 52
"""Random bits of a session's number, which stays exact in every JSON library."""
_NUM_SUFFIX_BYTES = 6
"""Random bytes in the names of a request; its number consists of them."""
SESSION_AUTH = "1"
"""Returned because the client requires one. Not checked: the tenant protects a session."""


class OpenSession(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/session`. All fields are ignored."""


class SessionAnswer(Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/session`."""

    session_id: int
    session_auth: str


class SessionInfo(Struct, frozen=True, kw_only=True):
    """The response of `GET /v1/session/{session_id}`."""

    session_id: int
    program: str
    """Id of the session's program for `/v1/programs`."""


class Empty(Struct, frozen=True):
    """An empty response."""


class VariableRequest(Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/semantic_var`."""

    session_id: SessionNumber


class NewVariable(VariableRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/semantic_var`."""

    var_name: str


class VariableContent(VariableRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/semantic_var/{var_id}`."""

    content: str


class ContentRequest(VariableRequest, frozen=True, kw_only=True):
    """The body of `GET /v1/semantic_var/{var_id}`."""

    criteria: str = "latency"
    """`latency`, `throughput`, `ttft` or `tpot`, in upper or lower case."""


class CallAnswer(Struct, frozen=True, kw_only=True):
    """The response of a call: it is accepted, and starts when an output is requested."""

    request_id: int
    param_info: list[BoundParameter]


class NewVariableAnswer(Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/semantic_var`."""

    var_id: str


class ContentAnswer(Struct, frozen=True, kw_only=True):
    """The response of `GET /v1/semantic_var/{var_id}`."""

    content: str


class ListedVariable(Struct, frozen=True, kw_only=True):
    """A variable of a session."""

    var_id: str
    status: str


class VariableList(Struct, frozen=True, kw_only=True):
    """The response of `GET /v1/semantic_var`."""

    variables: list[ListedVariable]


@post(
    "/v1/session",
    status_code=200,
    operation_class=json_body(OpenSession),
    responses=_ERRORS,
    tags=["parrot"],
)
async def open_session(request: Request[Any, Any, Any]) -> SessionAnswer:
    """Start a session."""
    await read_record(request, OpenSession)
    number = 1 + secrets.randbits(_NUM_SESSION_BITS)
    await Sessions.of(request).open(name=str(number), on_demand=True)
    return SessionAnswer(session_id=number, session_auth=SESSION_AUTH)


@get("/v1/session/{session_id:str}", responses=_ERRORS, tags=["parrot"])
async def read_session(request: Request[Any, Any, Any], session_id: FromPath[str]) -> SessionInfo:
    """Return the program of a session that has not ended."""
    number = _read_number(session_id)
    program = await _find(Sessions.of(request), number)
    return SessionInfo(session_id=number, program=program)


@delete("/v1/session/{session_id:str}", status_code=200, responses=_ERRORS, tags=["parrot"])
async def end_session(request: Request[Any, Any, Any], session_id: FromPath[str]) -> Empty:
    """End a session. Its running calls are cancelled."""
    sessions = Sessions.of(request)
    program = await _find(sessions, _read_number(session_id))
    await sessions.service.cancel(program, tenant=sessions.tenant)
    return Empty()


@post(
    "/v1/semantic_call",
    status_code=200,
    operation_class=json_body(SemanticCall),
    responses=_ERRORS,
    tags=["parrot"],
)
async def submit_semantic_call(request: Request[Any, Any, Any]) -> CallAnswer:
    """Submit a prompt with placeholders."""
    call: SemanticCall = await read_record(request, SemanticCall)
    sessions = Sessions.of(request)
    program = await _find(sessions, call.session_id)
    lowered = lower_semantic_call(call, secrets.token_hex(_NUM_SUFFIX_BYTES))
    return await _submit(sessions, program, lowered, call.output_criteria)


@post(
    "/v1/py_native_call",
    status_code=200,
    operation_class=json_body(NativeCall),
    responses=_ERRORS,
    tags=["parrot"],
)
async def submit_native_call(request: Request[Any, Any, Any]) -> CallAnswer:
    """Submit a call of a function that the operator registered on the server."""
    call: NativeCall = await read_record(request, NativeCall)
    sessions = Sessions.of(request)
    program = await _find(sessions, call.session_id)
    lowered = lower_native_call(call, secrets.token_hex(_NUM_SUFFIX_BYTES))
    try:
        return await _submit(sessions, program, lowered, call.output_criteria)
    except ProgramError as error:
        if error.code != "call.unknown_function":
            raise
        raise ProgramError(
            error.code,
            f"this server executes no code from clients, and function {call.func_name!r} is not "
            "registered: define it in a module and start the server with --functions MODULE",
            path="func_name",
        ) from error


@post(
    "/v1/semantic_var",
    status_code=200,
    operation_class=json_body(NewVariable),
    responses=_ERRORS,
    tags=["parrot"],
)
async def create_variable(request: Request[Any, Any, Any]) -> NewVariableAnswer:
    """Declare a variable without a value."""
    new: NewVariable = await read_record(request, NewVariable)
    sessions = Sessions.of(request)
    program = await _find(sessions, new.session_id)
    name = fresh_name(new.var_name, secrets.token_hex(_NUM_SUFFIX_BYTES))
    append, body = revalidate(Append(variables={name: Variable()}))
    await sessions.service.append(program, append, body=body, tenant=sessions.tenant)
    return NewVariableAnswer(var_id=name)


@get(
    "/v1/semantic_var",
    operation_class=json_body(VariableRequest),
    responses=_ERRORS,
    tags=["parrot"],
)
async def list_variables(request: Request[Any, Any, Any]) -> VariableList:
    """List the variables of a session."""
    body: VariableRequest = await read_record(request, VariableRequest)
    sessions = Sessions.of(request)
    program = await _find(sessions, body.session_id)
    status = await sessions.service.status(program, tenant=sessions.tenant)
    return VariableList(
        variables=[
            ListedVariable(var_id=name, status=each.status)
            for name, each in status.variables.items()
        ]
    )


@post(
    "/v1/semantic_var/{var_id:str}",
    status_code=200,
    operation_class=json_body(VariableContent),
    responses=_ERRORS,
    tags=["parrot"],
)
async def write_content(request: Request[Any, Any, Any], var_id: FromPath[str]) -> Empty:
    """Set the content of a variable, once."""
    given: VariableContent = await read_record(request, VariableContent)
    sessions = Sessions.of(request)
    program = await _find(sessions, given.session_id)
    value = PutValue(value=given.content)
    try:
        await sessions.service.put(program, var_id, value, tenant=sessions.tenant)
    except NotFoundError as error:
        raise _unknown_variable(var_id) from error
    return Empty()


@get(
    "/v1/semantic_var/{var_id:str}",
    operation_class=json_body(ContentRequest),
    responses=_ERRORS,
    tags=["parrot"],
)
async def read_content(request: Request[Any, Any, Any], var_id: FromPath[str]) -> ContentAnswer:
    """Start the producers of a variable, and wait for its content without a time limit."""
    body: ContentRequest = await read_record(request, ContentRequest)
    sessions = Sessions.of(request)
    program = await _find(sessions, body.session_id)
    objective = CRITERIA.get(body.criteria.lower())
    if objective is None:
        await _check_has_value(sessions, program, var_id, body.criteria)
    try:
        status = await sessions.wait(request, program, var_id, objective)
    except NotFoundError as error:
        raise _unknown_variable(var_id) from error
    return ContentAnswer(content=text_of(None if status.value is UNSET else status.value))


def _read_number(session_id: str) -> int:
    if not (session_id.isascii() and session_id.isdigit()):
        raise _no_session(session_id)
    return int(session_id[:20])


async def _find(sessions: Sessions, number: int) -> str:
    """Return the program of a session that has not ended.

    Raises:
        NotFoundError: `session.not_found`.
    """
    program = await sessions.find(str(number))
    try:
        if program is not None:
            await sessions.check_live(program)
            return program
    except (NotFoundError, ConflictError) as error:
        raise _no_session(number) from error
    raise _no_session(number)


def _no_session(number: int | str) -> NotFoundError:
    return NotFoundError(
        "session.not_found",
        f"Session (session_id={number}) not found: it was never started, has ended, or was unused "
        "for too long",
        path="session_id",
    )


async def _check_has_value(sessions: Sessions, program: str, var_id: str, criteria: str) -> None:
    """Check that a variable has a value, without starting a call.

    As in Parrot, the criterion of a value that exists is not read.

    Raises:
        NotFoundError: `variable.not_found`.
        ProgramError: `get.unknown_criteria` if the variable has no value yet.
    """
    status = await sessions.service.status(program, tenant=sessions.tenant)
    variable = status.variables.get(var_id)
    if variable is None:
        raise _unknown_variable(var_id)
    if variable.status != "done":
        read_criteria(criteria)


def _unknown_variable(var_id: str) -> NotFoundError:
    return NotFoundError(
        "variable.not_found", f"Unknown semantic variable id: {var_id!r}", path="var_id"
    )


async def _submit(
    sessions: Sessions, program: str, lowered: LoweredCall, criteria: str | None
) -> CallAnswer:
    objective = None if criteria is None else read_criteria(criteria)
    for each in lowered.bound:
        if not _NAME.match(each.var_id):
            raise _unknown_variable(each.var_id)
    append, body = revalidate(lowered.append)
    service, tenant = sessions.service, sessions.tenant
    try:
        await service.append(program, append, body=body, tenant=tenant)
    except ProgramError as error:
        if error.code != "program.unknown_variable":
            raise
        given = sorted({each.var_id for each in lowered.bound} - lowered.new_variables)
        raise _unknown_variable(", ".join(given)) from error
    if objective is not None and lowered.last_output is not None:
        await service.get(
            program, lowered.last_output, tenant=tenant, wait_s=0, objective=objective
        )
    return CallAnswer(request_id=lowered.request_id, param_info=lowered.bound)


ROUTES = (
    open_session,
    read_session,
    end_session,
    submit_semantic_call,
    submit_native_call,
    create_variable,
    list_variables,
    write_content,
    read_content,
)
BODIES = (
    OpenSession,
    SemanticCall,
    NativeCall,
    VariableRequest,
    NewVariable,
    VariableContent,
    ContentRequest,
)
