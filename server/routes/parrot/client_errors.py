"""Errors in the shape of Microsoft's Parrot client."""

from __future__ import annotations

from litestar import Response
from msgspec import Struct

from ..problem import public_error_of
from ..request_context import AnyRequest


class ClientError(Struct, frozen=True, kw_only=True):
    """The body of an error. The client requires `error` and `traceback`, and prints both."""

    error: str
    traceback: str = ""
    """Always empty: the traceback of an unexpected error is in the server's log."""
    code: str


def error_response(request: AnyRequest, exc: Exception) -> Response[ClientError]:
    """Convert an exception to an error response (the exception handler of these routes)."""
    error = public_error_of(request, exc)
    return Response(
        ClientError(error=error.message, code=error.code),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )
