"""The endpoints of stored procedures: store, read, move aliases, and run."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
from litestar import Request, delete, get, post, put
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Struct

from ...program.nodes.control.procedure import REFERENCE_PATTERN
from ...program.procedures import (
    PutAlias,
    PutPin,
    PutProcedure,
    RunProcedure,
    StoredProcedure,
)
from ...program.status import Accepted
from ..openapi import error_responses, json_body, success_response
from ..request_context import RequestError, read_record, service_of, tenant_of
from .programs import IdempotencyKey


class ProcedureList(Struct, frozen=True):
    """All versions of all procedures."""

    procedures: list[StoredProcedure]


class _Form(NamedTuple):
    """The format of a path parameter, and its description for error messages."""

    pattern: re.Pattern[str]
    description: str


_NAME = _Form(
    re.compile(r"[A-Za-z_][\w.-]{0,127}"),
    "a name: use up to 128 letters, digits, `_`, `.` and `-`; the first is an ASCII letter or `_`",
)
_ALIAS = _Form(
    re.compile(r"[A-Za-z_][\w.-]{0,63}"),
    "an alias: use up to 64 letters, digits, `_`, `.` and `-`; the first is an ASCII letter or `_`",
)
_REFERENCE = _Form(
    re.compile(REFERENCE_PATTERN),
    "a reference to a procedure: write `name`, `name:alias` or `name@version`",
)
_VERSION = _Form(
    re.compile(r"[A-Za-z_][\w.-]{0,127}@[0-9a-f]{32}"),
    "a version: write `name@version` with 32 hexadecimal digits; GET /v1/procedures lists them",
)


@put(
    "/v1/procedures/{name:str}",
    operation_class=json_body(PutProcedure),
    responses=error_responses(404, 409),
    tags=["procedures"],
)
async def put_procedure(request: Request[Any, Any, Any], name: FromPath[str]) -> StoredProcedure:
    """Store a version of a procedure, and let an alias name it.

    The program is checked like a submission. The version is a hash of the program, so storing an
    equal program again has no effect.
    """
    _check(_NAME, name)
    body: PutProcedure = await read_record(request, PutProcedure)
    return await service_of(request).procedures.put(name, body, tenant=tenant_of(request))


@put(
    "/v1/procedures/{name:str}/aliases/{alias:str}",
    operation_class=json_body(PutAlias),
    responses=error_responses(404, 409),
    tags=["procedures"],
)
async def put_alias(
    request: Request[Any, Any, Any], name: FromPath[str], alias: FromPath[str]
) -> StoredProcedure:
    """Let an alias name another version, which must have the same parameters and results as the
    current one.
    """
    _check(_NAME, name)
    _check(_ALIAS, alias)
    body: PutAlias = await read_record(request, PutAlias)
    return await service_of(request).procedures.put_alias(
        name, alias, body.version, tenant=tenant_of(request)
    )


@put(
    "/v1/procedures/{reference:str}/pin",
    operation_class=json_body(PutPin),
    responses=error_responses(404, 409),
    tags=["procedures"],
)
async def put_pin(request: Request[Any, Any, Any], reference: FromPath[str]) -> StoredProcedure:
    """Keep the constant beginnings of a version's prompts in the engines' KV for a time."""
    _check(_REFERENCE, reference)
    body: PutPin = await read_record(request, PutPin)
    procedures = service_of(request).procedures
    return await procedures.pin(reference, body.pin_s, tenant=tenant_of(request))


@delete(
    "/v1/procedures/{reference:str}/pin",
    status_code=200,
    responses=error_responses(404),
    tags=["procedures"],
)
async def delete_pin(request: Request[Any, Any, Any], reference: FromPath[str]) -> StoredProcedure:
    """Remove the pin of a version; safe to repeat."""
    _check(_REFERENCE, reference)
    return await service_of(request).procedures.pin(reference, None, tenant=tenant_of(request))


@delete(
    "/v1/procedures/{reference:str}",
    responses=error_responses(404, 409),
    tags=["procedures"],
)
async def delete_procedure(request: Request[Any, Any, Any], reference: FromPath[str]) -> None:
    """Remove one version, by `name@version`, and its pin.

    Programs that run the version, and procedures that call it, have a copy and are not affected. A
    version that an alias names is refused with `procedure.in_use`. Versions are kept until they are
    removed.
    """
    _check(_VERSION, reference)
    await service_of(request).procedures.remove(reference, tenant=tenant_of(request))


@delete(
    "/v1/procedures/{name:str}/aliases/{alias:str}",
    responses=error_responses(404),
    tags=["procedures"],
)
async def delete_alias(
    request: Request[Any, Any, Any], name: FromPath[str], alias: FromPath[str]
) -> None:
    """Remove an alias, not the version that it names."""
    _check(_NAME, name)
    _check(_ALIAS, alias)
    await service_of(request).procedures.remove_alias(name, alias, tenant=tenant_of(request))


@get("/v1/procedures", responses=error_responses(), tags=["procedures"])
async def list_procedures(request: Request[Any, Any, Any]) -> ProcedureList:
    """List all versions of all procedures with their aliases."""
    return ProcedureList(await service_of(request).procedures.list_all(tenant=tenant_of(request)))


@get(
    "/v1/procedures/{reference:str}",
    responses=error_responses(404),
    tags=["procedures"],
)
async def read_procedure(
    request: Request[Any, Any, Any], reference: FromPath[str]
) -> StoredProcedure:
    """Return a version of a procedure, by `name@version`, `name:alias` or `name`."""
    _check(_REFERENCE, reference)
    return await service_of(request).procedures.find(reference, tenant=tenant_of(request))


@post(
    "/v1/procedures/{reference:str}/run",
    status_code=202,
    operation_class=json_body(RunProcedure),
    responses={
        202: success_response(Accepted, "Accepted and durable"),
        **error_responses(404, 409),
    },
    tags=["procedures"],
)
async def run_procedure(
    request: Request[Any, Any, Any],
    reference: FromPath[str],
    idempotency_key: IdempotencyKey = None,
) -> ASGIResponse:
    """Submit a procedure as a program."""
    _check(_REFERENCE, reference)
    body: RunProcedure = await read_record(request, RunProcedure)
    accepted, is_replay = await service_of(request).procedures.run(
        reference, body, tenant=tenant_of(request), idempotency_key=idempotency_key
    )
    headers = {"Location": accepted.url}
    if is_replay:
        headers["Idempotent-Replay"] = "true"
    return ASGIResponse(
        body=msgspec.json.encode(accepted),
        status_code=202,
        media_type="application/json",
        headers=headers,
    )


def _check(form: _Form, text: str) -> None:
    if form.pattern.fullmatch(text) is None:
        raise RequestError("procedure.name", f"{text[:140]!r} is not {form.description}")


ROUTES = (
    put_procedure,
    put_alias,
    put_pin,
    delete_pin,
    delete_procedure,
    delete_alias,
    list_procedures,
    read_procedure,
    run_procedure,
)
BODIES = (PutProcedure, PutAlias, PutPin, RunProcedure)
