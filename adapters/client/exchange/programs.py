"""Operations on programs: submit, explain, read, write, cancel."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

import msgspec

from conure.server.program.decoding.typed_json import convert_record, decode_record
from conure.server.program.errors import (
    ConflictError,
    ConureError,
    NotFoundError,
    UnavailableError,
)
from conure.server.program.explanation.records import ProgramExplanation
from conure.server.program.ir import (
    Append,
    Json,
    Options,
    Program,
    SourceSubmission,
    Submission,
)
from conure.server.program.status import (
    ENDED,
    Accepted,
    Problem,
    ProgramPage,
    ProgramStatus,
    PutValue,
    VariableStatus,
)

from ..json_encoding import encode_json
from .problems import NotReadyError, error_of, failure_of, missing_value_error
from .records import EVENT_HEADERS, Flow, Request
from .retry import Retry
from .transfer import decode_reply, fetch, send

POLL_S = 20.0
"""Duration of one long poll; a longer wait is split into several."""

Submittable: TypeAlias = Program | Submission | SourceSubmission | Mapping[str, Json] | str
"""A program or a complete submission, as a record or as JSON, or a text in the decoder language."""


def submission_body(
    program: Submittable,
    *,
    inputs: Mapping[str, Json] | None = None,
    objectives: Mapping[str, Json] | None = None,
    options: Options | Mapping[str, Json] | None = None,
    is_open: bool = False,
    requires_inputs: bool = False,
) -> dict[str, Any]:
    """Return the JSON of a submission.

    If `program` is a complete submission, the other arguments are added to its fields.

    `requires_inputs`: refuse the program unless all of its inputs have values, as the caller does
    not set any later.

    Raises:
        TypeError: if the program is a function that was not called, or text that is JSON.
    """
    if callable(program):
        name = getattr(program, "__name__", "program")
        raise TypeError(f"{name} is a function: call it with its inputs, as in run({name}(...))")
    if isinstance(program, Submission | SourceSubmission):
        body: dict[str, Any] = dict(msgspec.to_builtins(program))
    elif isinstance(program, str):
        if _is_json(program):
            raise TypeError("the text is JSON: pass the object that it contains")
        body = {"source": program}
    elif isinstance(program, Mapping) and ("program" in program or "source" in program):
        body = dict(program)
    else:
        body = {"program": program}
    if inputs:
        body["inputs"] = {**body.get("inputs", {}), **inputs}
    if objectives:
        body["objectives"] = {**body.get("objectives", {}), **objectives}
    if options is not None:
        given = msgspec.to_builtins(options) if isinstance(options, Options) else options
        body["options"] = {**(body.get("options") or {}), **given}
    if is_open:
        body["open"] = True
    if requires_inputs and not body.get("open"):
        body["options"] = {"require_inputs": True, **(body.get("options") or {})}
    return body


def _is_json(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def is_id(text: str) -> bool:
    """Return whether a string may be the id of a program; a text of a program is none."""
    return re.fullmatch(r"[\w.-]+", text) is not None


def new_id() -> str:
    """Return an id for a program."""
    return f"p_{secrets.token_hex(12)}"


def submit(body: Mapping[str, Any], retry: Retry, *, key: str | None) -> Flow[Accepted]:
    """Submit a program. Without a key a random one is used, which makes retries safe."""
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    request = Request("POST", "/v1/programs", encode_json(body), headers=headers)
    return (yield from fetch(request, retry, Accepted))


def explain(body: Mapping[str, Any], retry: Retry) -> Flow[ProgramExplanation]:
    """Explain a program without running it."""
    request = Request("POST", "/v1/programs/explain", encode_json(body))
    return (yield from fetch(request, retry, ProgramExplanation))


def explain_run(program: str, retry: Retry) -> Flow[ProgramExplanation]:
    """Explain a submitted program with its figures."""
    request = Request("GET", f"{program_path(program)}/explain")
    return (yield from fetch(request, retry, ProgramExplanation))


def trace(program: str, retry: Retry, *, token_ids: bool) -> Flow[list[dict[str, Json]]]:
    """Read the spans of a program's trace.

    Raises:
        ConureError: also if the trace ends with an error.
    """
    query = {"token_ids": "true"} if token_ids else {}
    reply = yield from send(Request("GET", f"{program_path(program)}/trace", query=query), retry)
    if reply.status >= 400:
        raise error_of(reply)
    spans = [decode_record(line, dict[str, Any]) for line in reply.body.splitlines()]
    if spans and "error" in spans[-1]:
        raise failure_of(convert_record(spans[-1]["error"], Problem))
    return spans


def submit_attached(
    body: Mapping[str, Any], retry: Retry, *, key: str | None, query: Mapping[str, Any]
) -> Flow[tuple[Accepted, Any]]:
    """Submit a program, and request its events as the reply.

    Returns:
        The program, and the open response with its events; None if the server only accepted it.
    """
    headers = {"Idempotency-Key": key or uuid.uuid4().hex, **EVENT_HEADERS}
    request = Request(
        "POST",
        "/v1/programs",
        encode_json(body),
        query=dict(query),
        headers=headers,
        accepts_stream=True,
    )
    reply = yield from send(request, retry)
    if reply.stream is None:
        return decode_reply(reply, Accepted), None
    url = reply.headers["location"]
    outputs = msgspec.to_builtins(body["program"]).get("outputs", [])
    id_ = unquote(url.rpartition("/")[2])
    return Accepted(id=id_, status="accepted", outputs=outputs, url=url), reply.stream


def get(
    program: str, variable: str, retry: Retry, *, wait_s: float | None, clock: Callable[[], float]
) -> Flow[Json]:
    """Wait for the value of a variable, without limit if `wait_s` is None."""
    path = _variable_path(program, variable)
    end_s = None if wait_s is None else clock() + wait_s
    while True:
        poll_s = POLL_S if end_s is None else max(0.0, min(POLL_S, end_s - clock()))
        request = Request("GET", path, query={"wait_s": f"{poll_s:.3f}"}, wait_s=poll_s)
        poll_retry = retry if end_s is None else retry.within(end_s - clock())
        status = yield from fetch(request, poll_retry, VariableStatus)
        if status.value is not msgspec.UNSET:
            return status.value
        if status.status in ENDED:
            raise missing_value_error(variable, status)
        if end_s is not None and clock() >= end_s:
            raise NotReadyError(
                "client.not_ready",
                f"variable {variable!r} is {status.status} after {wait_s:g} s and may still get "
                "a value; call get() again, or with a longer wait_s",
            )


def status(program: str, retry: Retry) -> Flow[ProgramStatus]:
    """Return the status of a program."""
    return (yield from fetch(Request("GET", program_path(program)), retry, ProgramStatus))


def accepted_of(status: ProgramStatus) -> Accepted:
    """Rebuild the reply to a program's submission from its status."""
    url = program_path(status.id)
    return Accepted(id=status.id, status=status.status, outputs=status.outputs, url=url)


def list_all(
    retry: Retry, *, status: str | None, search: str | None, cursor: str | None, limit: int
) -> Flow[ProgramPage]:
    """Read a page of the list of programs."""
    query = {"status": status, "search": search, "cursor": cursor, "limit": str(limit)}
    given = {key: value for key, value in query.items() if value is not None}
    return (yield from fetch(Request("GET", "/v1/programs", query=given), retry, ProgramPage))


def cancel(program: str, retry: Retry) -> Flow[ProgramStatus]:
    """Cancel a program."""
    return (yield from fetch(Request("DELETE", program_path(program)), retry, ProgramStatus))


def put(program: str, variable: str, value: PutValue, retry: Retry) -> Flow[VariableStatus]:
    """Write a variable's value, or the reason why it gets none."""
    request = Request("PUT", _variable_path(program, variable), encode_json(value))
    return (yield from fetch(request, retry, VariableStatus))


def answer(
    program: str,
    variable: str,
    value: PutValue,
    retry: Retry,
    *,
    refused: Callable[[ConureError], PutValue],
) -> Flow[VariableStatus]:
    """Answer a client step. If the server rejects the value, send what `refused` returns."""
    try:
        return (yield from put(program, variable, value, retry))
    except (ConflictError, NotFoundError, UnavailableError):
        raise  # the step was answered before, the program has ended, or the server is down
    except ConureError as problem:
        failure = refused(problem)
    return (yield from put(program, variable, failure, retry))


def append(
    program: str, more: Append | Mapping[str, Json], retry: Retry, *, wait_s: float = 0.0
) -> Flow[ProgramStatus]:
    """Add nodes to an open program, or close it.

    The request has an id, by which the server recognises a repetition.
    """
    path = f"{program_path(program)}/nodes"
    query = {"wait_s": f"{wait_s:g}"} if wait_s else {}
    body = encode_json(_with_request_id(more))
    request = Request("POST", path, body, query=query, wait_s=wait_s)
    return (yield from fetch(request, retry, ProgramStatus))


def _with_request_id(more: Append | Mapping[str, Json]) -> Append | Mapping[str, Json]:
    """Return an append that has a request id."""
    request_id = uuid.uuid4().hex
    if not isinstance(more, Append):
        return {"request_id": request_id, **more}
    return more if more.request_id else msgspec.structs.replace(more, request_id=request_id)


def program_path(program: str) -> str:
    """Return the URL path of a program."""
    return f"/v1/programs/{quote(program, safe='')}"


def _variable_path(program: str, variable: str) -> str:
    return f"{program_path(program)}/variables/{quote(variable, safe='')}"
