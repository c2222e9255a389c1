"""The paper's calls: submit a prompt with placeholders, set a variable, get a variable.

    POST /v1/submit   {prompt, placeholders, session_id}       -> ids of the placeholders
    POST /v1/set      {semantic_var_id, content, session_id}   -> the id
    POST /v1/get      {semantic_var_id, criteria, session_id}  -> the content, when it is there

(OSDI'24, section 4.1.) A paper's session is an open program here and nothing else: a
request becomes one `generate` node appended to it, transforms become `expr` nodes, and
`<program>.<variable>` is a variable's id. So everything that `/v1/programs` shows and does
holds for sessions as well; `{"close": true}` or DELETE there ends one.

Kept true: the session is wholly described by its program, so these routes remember nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any

import msgspec
from litestar import Request, post
from msgspec import UNSET, Meta, Struct

from ..program.decode import decode_json
from ..program.errors import RunError
from ..program.ir import Append, Json, Objective, Program, Submission
from ..program.status import ENDED, PutValue, VariableStatus
from ..service import Service
from .connection import RequestError, read_json, service_of, tenant_of, while_connected
from .document import problems, reads
from .placeholders import Placeholder, lower_request
from .problem import AbsentError
from .programs import MAX_WAIT_S

VariableId = Annotated[str, Meta(min_length=3, max_length=512)]
CRITERIA: dict[str, Objective] = {
    "latency": "latency",
    "throughput": "throughput",
    "ttft": "ttft",
    "tpot": "tpot",
}


class SubmitRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/submit`."""

    prompt: Annotated[str, Meta(min_length=1, max_length=4_194_304)]
    """Text with `{{name}}` where placeholders stand."""
    placeholders: Annotated[list[Placeholder], Meta(max_length=1_000)]
    session_id: str | None = None
    """None makes a new session."""
    model: str = "default"


class BoundPlaceholder(Struct, frozen=True, kw_only=True):
    """A placeholder and the variable it stands for."""

    name: str
    in_out: bool
    semantic_var_id: str


class SubmitAnswer(Struct, frozen=True, kw_only=True):
    """The answer of `POST /v1/submit`: everything is accepted, nothing needs to have run."""

    session_id: str
    request_id: str
    placeholders: list[BoundPlaceholder]


class SetRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/set`."""

    semantic_var_id: VariableId
    content: str
    session_id: str | None = None


class SetAnswer(Struct, frozen=True, kw_only=True):
    """The answer of `POST /v1/set`: the content is on disk."""

    semantic_var_id: str


class GetRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/get`."""

    semantic_var_id: VariableId
    criteria: str = "latency"
    """latency, throughput, ttft or tpot, in any case."""
    session_id: str | None = None


class GetAnswer(Struct, frozen=True, kw_only=True):
    """The answer of `POST /v1/get`."""

    semantic_var_id: str
    content: str


@post(
    "/v1/submit",
    status_code=200,
    operation_class=reads(SubmitRequest),
    responses=problems(404, 409),
    tags=["paper"],
)
async def submit_prompt(request: Request[Any, Any, Any]) -> SubmitAnswer:
    """Submits one prompt to a session, or to a new one."""
    wanted: SubmitRequest = decode_json(await read_json(request), SubmitRequest)
    service, tenant = service_of(request), tenant_of(request)
    suffix = secrets.token_hex(4)
    lowered = lower_request(
        wanted.prompt,
        wanted.placeholders,
        suffix=suffix,
        session=wanted.session_id,
        model=wanted.model,
    )
    if wanted.session_id is None:
        program = Program(name="session", variables=lowered.variables, nodes=lowered.nodes)
        submission = Submission(program=program, open=True)
        body = msgspec.json.encode(submission)
        accepted, _ = await service.submit(submission, body=body, tenant=tenant)
        session = accepted.id
    else:
        session = wanted.session_id
        append = Append(variables=lowered.variables, nodes=lowered.nodes)
        body = msgspec.json.encode(append)
        await service.append(session, append, body=body, tenant=tenant)
    bound = [
        BoundPlaceholder(
            name=placeholder.name,
            in_out=placeholder.in_out,
            semantic_var_id=f"{session}.{lowered.bindings[placeholder.name]}",
        )
        for placeholder in wanted.placeholders
    ]
    return SubmitAnswer(session_id=session, request_id=lowered.request_id, placeholders=bound)


@post(
    "/v1/set",
    status_code=200,
    operation_class=reads(SetRequest),
    responses=problems(404, 409),
    tags=["paper"],
)
async def set_variable(request: Request[Any, Any, Any]) -> SetAnswer:
    """Gives a variable its content."""
    wanted: SetRequest = decode_json(await read_json(request), SetRequest)
    program, variable = split_id(wanted.semantic_var_id, wanted.session_id)
    value = PutValue(value=wanted.content)
    await service_of(request).put(program, variable, value, tenant=tenant_of(request))
    return SetAnswer(semantic_var_id=wanted.semantic_var_id)


@post(
    "/v1/get",
    status_code=200,
    operation_class=reads(GetRequest),
    responses=problems(404, 422, 424),
    tags=["paper"],
)
async def get_variable(request: Request[Any, Any, Any]) -> GetAnswer:
    """Waits for a variable's content; the wait ends with the connection."""
    wanted: GetRequest = decode_json(await read_json(request), GetRequest)
    program, variable = split_id(wanted.semantic_var_id, wanted.session_id)
    objective = CRITERIA.get(wanted.criteria.lower())
    if objective is None:
        raise RequestError(
            "get.unknown_criteria",
            f"there is no criterion {wanted.criteria!r}; choose one of {', '.join(CRITERIA)}",
            path="criteria",
        )
    work = wait_for(
        service_of(request), program, variable, tenant=tenant_of(request), objective=objective
    )
    status = await while_connected(request, work)
    return GetAnswer(
        semantic_var_id=wanted.semantic_var_id,
        content=text_of(None if status.value is UNSET else status.value),
    )


async def wait_for(
    service: Service,
    program: str,
    variable: str,
    *,
    tenant: str,
    objective: Objective | None = None,
) -> VariableStatus:
    """Waits as long as it takes.

    Raises:
        AbsentError: if the variable ended without a value.
        RunError: if its program ended before it got one.
    """
    loop = asyncio.get_running_loop()
    while True:
        asked_at = loop.time()
        status = await service.get(
            program, variable, tenant=tenant, wait_s=MAX_WAIT_S, objective=objective
        )
        if status.status == "done":
            return status
        if status.status in ENDED:
            raise AbsentError(status)
        if loop.time() - asked_at < MAX_WAIT_S / 2:
            # The service saw no point in waiting longer: asking again would spin.
            raise RunError("variable.no_value", f"the program ended without a {variable!r}")


def split_id(semantic_var_id: str, session: str | None) -> tuple[str, str]:
    """Reads `<program>.<variable>`.

    Raises:
        RequestError: if it is no such id, or names another session than `session`.
    """
    program, dot, variable = semantic_var_id.partition(".")
    if not (program and dot and variable):
        raise RequestError(
            "variable.malformed_id",
            f"{semantic_var_id!r} is no semantic variable's id; take it from /v1/submit",
            path="semantic_var_id",
        )
    if session is not None and session != program:
        raise RequestError(
            "variable.other_session",
            f"{semantic_var_id!r} is not a variable of session {session!r}",
            path="session_id",
        )
    return program, variable


def text_of(value: Json) -> str:
    """A value as text: a string as it stands, anything else as compact JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


ROUTES = (submit_prompt, set_variable, get_variable)
BODIES = (SubmitRequest, SetRequest, GetRequest)
