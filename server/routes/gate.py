"""What every request passes first: its id, and the proof that it comes from this machine.

A web page that the user happens to visit can make a browser send requests to loopback, by
name (DNS rebinding) or across origins. So without keys the Host header must name this
machine, and an Origin, which browsers add and others do not, must do so too.

Refuses to know routes. Kept true: every answer carries X-Request-ID, errors included.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from ..program.errors import ConureError

_KEY = "conure.request_id"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
_LOCAL = re.compile(rb"(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)
_LOCAL_ORIGIN = re.compile(rb"https?://" + _LOCAL.pattern, re.IGNORECASE)


class ForbiddenError(ConureError):
    """The request may not come from where it comes from."""

    status = 403


def request_id(scope: Any) -> str:
    """The id of a request: the client's X-Request-ID if it is tame, else one of our own."""
    known = scope.get(_KEY)
    if known is None:
        given = next((v for k, v in scope.get("headers", ()) if k == b"x-request-id"), b"")
        tame = _REQUEST_ID.fullmatch(given) is not None
        known = given.decode("ascii") if tame else f"req_{secrets.token_hex(12)}"
        scope[_KEY] = known
    return str(known)


async def add_request_id(message: Message, scope: Scope) -> None:
    """Puts the request's id on the start of its answer (a Litestar `before_send` hook)."""
    if message["type"] == "http.response.start":
        headers = list(message.get("headers", ()))
        headers.append((b"x-request-id", request_id(scope).encode("ascii")))
        message["headers"] = headers


class LocalOnly(ASGIMiddleware):
    """Refuses requests whose Host or Origin is not this machine."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Passes the request on, or raises ForbiddenError."""
        hosts = [v for k, v in scope["headers"] if k == b"host"]
        if not hosts or not all(map(_LOCAL.fullmatch, hosts)):
            raise ForbiddenError(
                "host.forbidden",
                "the Host header must name this machine: localhost, 127.0.0.1 or [::1]",
            )
        for name, value in scope["headers"]:
            if name == b"origin" and not _LOCAL_ORIGIN.fullmatch(value):
                raise ForbiddenError("origin.forbidden", "requests of other origins are refused")
        await next_app(scope, receive, send)
