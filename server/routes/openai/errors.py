"""Errors in OpenAI's shape."""

from __future__ import annotations

import re

from litestar import Response
from msgspec import Struct

from ..problem import PublicError, public_error_of
from ..request_context import AnyRequest

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {"prompt.too_long": "context_length_exceeded"}
"""Error codes that have another name in the OpenAI API."""
_NODE = re.compile(r"^node call(_\d+)?: ")


class ErrorBody(Struct, frozen=True, kw_only=True):
    """An error; `param` names the field that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """OpenAI's error response."""

    error: ErrorBody


def error_body(failure: PublicError) -> ErrorBody:
    """Convert an error to OpenAI's shape."""
    default_type = "server_error" if failure.status >= 500 else "invalid_request_error"
    # A client did not write the program that its request was translated to: hide paths into it.
    path = failure.path or ""
    if re.match(r"(program\.)?nodes\[", path):
        if path.endswith(".constraint"):
            path = "response_format"
        elif found := re.search(r"\.((tools|tool_choice|logit_bias)\b.*)", path):
            path = found[1]
        elif path.endswith(".prompt_ids"):
            path = "prompt"
        else:
            path = ""
    return ErrorBody(
        message=_NODE.sub("", failure.message),
        type=_TYPES.get(failure.status, default_type),
        param=path or None,
        code=_CODES.get(failure.code, failure.code),
    )


def error_answer(failure: PublicError) -> ErrorAnswer:
    """Return the body of an error response."""
    return ErrorAnswer(error=error_body(failure))


def error_response(request: AnyRequest, exc: Exception) -> Response[ErrorAnswer]:
    """Convert an exception to an error response (the exception handler of these routes)."""
    error = public_error_of(request, exc)
    return Response(
        error_answer(error),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )
