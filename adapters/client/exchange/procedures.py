"""Operations on stored procedures."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import quote

import msgspec

from conure.server.program.errors import ProgramError
from conure.server.program.procedures import RunProcedure, StoredProcedure
from conure.server.program.status import Accepted

from ..json_encoding import encode_json
from .problems import error_of
from .programs import Submittable, submission_body
from .records import Flow, Request
from .retry import Retry
from .transfer import fetch, send


def put(
    name: str,
    program: Submittable,
    retry: Retry,
    *,
    alias: str | None,
    pin_s: float | None = None,
) -> Flow[StoredProcedure]:
    """Store a version of a procedure."""
    given = submission_body(program)
    extra = [key for key in ("inputs", "objectives", "options", "open") if given.get(key)]
    if extra:
        message = f"a procedure is stored without `{extra[0]}`: pass it to `run_procedure`"
        raise ProgramError("procedure.argument", message, path=extra[0])
    body: dict[str, Any] = {
        key: given[key] for key in ("program", "source", "language") if key in given
    }
    fields: dict[str, Any] = {**body, "alias": alias}
    if pin_s is not None:
        fields["pin_s"] = pin_s
    request = Request("PUT", _procedure_path(name), encode_json(fields))
    return (yield from fetch(request, retry, StoredProcedure))


def put_alias(name: str, alias: str, version: str, retry: Retry) -> Flow[StoredProcedure]:
    """Let an alias name another version."""
    request = Request("PUT", _alias_path(name, alias), msgspec.json.encode({"version": version}))
    return (yield from fetch(request, retry, StoredProcedure))


def delete(reference: str, retry: Retry) -> Flow[None]:
    """Remove one version of a procedure."""
    yield from _delete(_procedure_path(reference), retry)


def delete_alias(name: str, alias: str, retry: Retry) -> Flow[None]:
    """Remove an alias of a procedure."""
    yield from _delete(_alias_path(name, alias), retry)


def _delete(path: str, retry: Retry) -> Flow[None]:
    # Not repeatable: if only the answer was lost, a second request would report `not found`.
    reply = yield from send(Request("DELETE", path, repeatable=False), retry)
    if reply.status >= 400:
        raise error_of(reply)


def get(reference: str, retry: Retry) -> Flow[StoredProcedure]:
    """Read one version of a procedure."""
    return (yield from fetch(Request("GET", _procedure_path(reference)), retry, StoredProcedure))


class _ProcedurePage(msgspec.Struct, frozen=True):
    procedures: list[StoredProcedure]


def list_all(retry: Retry) -> Flow[list[StoredProcedure]]:
    """Read the list of all versions of all procedures."""
    return (yield from fetch(Request("GET", "/v1/procedures"), retry, _ProcedurePage)).procedures


def run(reference: str, body: RunProcedure, retry: Retry, *, key: str | None) -> Flow[Accepted]:
    """Submit a procedure as a program."""
    request = Request(
        "POST",
        f"{_procedure_path(reference)}/run",
        encode_json(body),
        headers={"Idempotency-Key": key or uuid.uuid4().hex},
    )
    return (yield from fetch(request, retry, Accepted))


def _procedure_path(reference: str) -> str:
    return f"/v1/procedures/{quote(reference, safe='')}"


def _alias_path(name: str, alias: str) -> str:
    return f"{_procedure_path(name)}/aliases/{quote(alias, safe='')}"
