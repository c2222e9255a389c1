"""Errors as HTTP answers: problem+json (RFC 9457) with a stable code and the request's id.

Knows every kind of exception that can leave a route: our own, Litestar's, and bugs.
Refuses to know any other error shape; the OpenAI routes bring their own.

Kept true: every error answer has a code and a request id; the text of an exception that
is not meant for users never leaves the process, and its traceback is always logged.
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any, NamedTuple

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from msgspec import Struct

from ..program.errors import ConureError, RunError
from ..program.status import VariableStatus
from .gate import request_id

logger = logging.getLogger(__name__)

PROBLEM_JSON = "application/problem+json"

_ROUTE_CODES = {
    404: "route.not_found",
    405: "route.method_not_allowed",
    413: "request.too_large",
    415: "request.media_type",
}
_ABSENCE_STATUS = {"prompt": 400, "expr": 422, "queue": 503, "server": 503}
"""HTTP status of a variable that failed, by the first word of its code; else 424."""


class ProblemDetails(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The body of every error answer."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    """Stable and dotted; what a program may branch on."""
    path: str | None = None
    """Where in the submitted JSON, or which parameter."""
    request_id: str
    variable: str | None = None
    """The variable that was asked for, when it is the variable that failed."""
    variable_status: str | None = None


class Failure(NamedTuple):
    """An exception as users may see it."""

    status: int
    code: str
    message: str
    path: str | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - a tuple's default; nobody writes into it


class AbsentError(RunError):
    """A variable was asked for that ended without a value."""

    def __init__(self, variable: VariableStatus) -> None:
        error = variable.error or None
        code = error.code if error else f"run.{variable.status}"
        message = (error.message if error else "") or f"the variable is {variable.status}"
        status = _ABSENCE_STATUS.get(code.partition(".")[0], RunError.status)
        super().__init__(code, message, status=status)
        self.variable = variable


def failure_of(request: Request[Any, Any, Any], exc: Exception) -> Failure:
    """Translates any exception; one that is a bug is logged and told as `server.internal`."""
    if isinstance(exc, ConureError):
        headers = {}
        if exc.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after_s)))
        return Failure(exc.http_status, exc.code, exc.message, exc.path, headers)
    if isinstance(exc, HTTPException) and exc.status_code < 500:
        return _route_failure(request, exc)
    logger.error(
        "request failed method=%s path=%r request_id=%s",
        request.method,
        request.scope["path"],
        request_id(request.scope),
        exc_info=exc,
    )
    return Failure(500, "server.internal", "the server failed; its log has the cause")


def _route_failure(request: Request[Any, Any, Any], exc: HTTPException) -> Failure:
    code = _ROUTE_CODES.get(exc.status_code, "request.invalid")
    headers = dict(exc.headers or {})
    if exc.status_code == 404:
        return Failure(404, code, f"there is no route {request.scope['path']}", None, headers)
    if exc.status_code == 413:
        most = request.route_handler.resolve_request_max_body_size()
        assert most is not None, "without a limit nothing is too large"
        message = f"the body is larger than the {most:,} bytes that this server takes"
        return Failure(413, code, message, None, headers)
    path = None
    detail = exc.detail
    if isinstance(exc, ValidationException) and isinstance(exc.extra, list) and exc.extra:
        first = exc.extra[0]
        source = first.get("source", "request")
        path = f"{getattr(source, 'value', source)}.{first.get('key', '')}"
        detail = str(first.get("message", detail))
    return Failure(exc.status_code, code, detail, path, headers)


def title_of(status: int) -> str:
    """The phrase of a status code, also of those that HTTP does not define."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Client Closed Request" if status == 499 else "Error"


def answer_problem(request: Request[Any, Any, Any], exc: Exception) -> Response[ProblemDetails]:
    """The exception handler of every route that speaks our own dialect."""
    failure = failure_of(request, exc)
    variable = exc.variable if isinstance(exc, AbsentError) else None
    details = ProblemDetails(
        type=f"urn:conure:problem:{failure.code}",
        title=title_of(failure.status),
        status=failure.status,
        detail=failure.message,
        code=failure.code,
        path=failure.path,
        request_id=request_id(request.scope),
        variable=variable.name if variable else None,
        variable_status=variable.status if variable else None,
    )
    return Response(
        details,
        status_code=failure.status,
        media_type=PROBLEM_JSON,
        headers=failure.headers,
    )
