"""Error responses: problem+json (RFC 9457) with a stable code and the request id.

Translates every exception that can leave a route: Conure's own, Litestar's, and unexpected ones.
The OpenAI routes define their own error shape. An unknown route has both shapes, because its client
is unknown as well.

Invariants: every error response has a code and a request id; the text of an unexpected exception
never leaves the process, and its traceback is always logged.
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
from .middleware import request_id
from .unknown_route import explain_unknown_route

logger = logging.getLogger(__name__)

PROBLEM_JSON = "application/problem+json"

_ROUTE_CODES = {
    404: "route.not_found",
    405: "route.method_not_allowed",
    413: "request.too_large",
    415: "request.media_type",
}
_MISSING_VALUE_STATUS = {"prompt": 400, "expr": 422, "queue": 503, "server": 503}
"""HTTP status of a failed variable by the first part of its error code; 424 for all others."""


class OpenAIErrorDetails(Struct, frozen=True, kw_only=True):
    """An error of a route as OpenAI's clients read it."""

    message: str
    type: str = "invalid_request_error"
    param: None = None
    code: str


class ProblemDetails(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The body of every error response."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    """Stable, dotted error code. Programs may depend on it."""
    path: str | None = None
    """The location in the submitted JSON, or the parameter."""
    request_id: str
    error: OpenAIErrorDetails | None = None
    """The same error for OpenAI's clients, on an unknown route."""
    variable: str | None = None
    """The requested variable, if the variable itself failed."""
    variable_status: str | None = None


class PublicError(NamedTuple):
    """An exception as clients may see it."""

    status: int
    code: str
    message: str
    path: str | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - a default that is never modified


class MissingValueError(RunError):
    """A requested variable ended without a value."""

    def __init__(self, variable: VariableStatus) -> None:
        error = variable.error or None  # UNSET is false
        code = error.code if error else f"run.{variable.status}"
        message = (error.message if error else "") or f"the variable is {variable.status}"
        status = _MISSING_VALUE_STATUS.get(code.partition(".")[0], RunError.status)
        super().__init__(code, message, status=status)
        self.variable = variable


def public_error_of(request: Request[Any, Any, Any], exc: Exception) -> PublicError:
    """Translate an exception. An unexpected one is logged and becomes `server.internal`."""
    if isinstance(exc, ConureError):
        headers = {}
        if exc.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after_s)))
        return PublicError(exc.status, exc.code, exc.message, exc.path, headers)
    if isinstance(exc, HTTPException) and exc.status_code < 500:
        return _litestar_error(request, exc)
    logger.error(
        "request failed method=%s path=%r request_id=%s",
        request.method,
        request.scope["path"],
        request_id(request.scope),
        exc_info=exc,
    )
    return PublicError(
        500, "server.internal", "internal server error; see the server log for the cause"
    )


def _litestar_error(request: Request[Any, Any, Any], exc: HTTPException) -> PublicError:
    code = _ROUTE_CODES.get(exc.status_code, "request.invalid")
    headers = dict(exc.headers or {})
    if exc.status_code == 404:
        routes = [route.path for route in request.app.routes]
        message = explain_unknown_route(request.scope["path"], routes)
        return PublicError(404, code, message, None, headers)
    if exc.status_code == 405:
        message = f"{request.method} {request.scope['path']} is not supported"
        if allowed := {name.lower(): value for name, value in headers.items()}.get("allow"):
            message += f"; use {allowed}"
        return PublicError(405, code, message, None, headers)
    if exc.status_code == 413:
        limit = request.route_handler.resolve_request_max_body_size()
        assert limit is not None, "a 413 requires a size limit"
        message = f"the body is larger than the {limit:,} bytes that this server accepts"
        return PublicError(413, code, message, None, headers)
    path = None
    detail = exc.detail
    if isinstance(exc, ValidationException) and isinstance(exc.extra, list) and exc.extra:
        first_error = exc.extra[0]
        source = first_error.get("source", "request")
        path = f"{getattr(source, 'value', source)}.{first_error.get('key', '')}"
        detail = str(first_error.get("message", detail))
    return PublicError(exc.status_code, code, detail, path, headers)


def status_phrase(status: int) -> str:
    """Return the phrase of a status code, including codes that HTTP does not define."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Client Closed Request" if status == 499 else "Error"


def problem_response(request: Request[Any, Any, Any], exc: Exception) -> Response[ProblemDetails]:
    """Convert an exception to a response (the exception handler of Conure's own routes)."""
    error = public_error_of(request, exc)
    variable = exc.variable if isinstance(exc, MissingValueError) else None
    # Litestar's own 404 and 405: no route has this path and method.
    is_unknown_route = isinstance(exc, HTTPException) and exc.status_code in (404, 405)
    details = ProblemDetails(
        error=OpenAIErrorDetails(message=error.message, code=error.code)
        if is_unknown_route
        else None,
        type=f"urn:conure:problem:{error.code}",
        title=status_phrase(error.status),
        status=error.status,
        detail=error.message,
        code=error.code,
        path=error.path,
        request_id=request_id(request.scope),
        variable=variable.name if variable else None,
        variable_status=variable.status if variable else None,
    )
    return Response(
        details,
        status_code=error.status,
        media_type=PROBLEM_JSON,
        headers=error.headers,
    )
