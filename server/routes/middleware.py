"""Middleware: request ids, limits of memory, the check of Host and Origin, and times of requests.

A web page in the user's browser can send requests to the loopback address, by DNS rebinding or
across origins. Without API keys, the Host header must therefore name this machine. Browsers also
send Origin, which must then name this machine, too.

Invariant: every response has an X-Request-ID, including errors.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, cast

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from ..config import is_loopback
from ..program.errors import ConureError, UnavailableError
from ..runtime.reporting.request_times import RequestTimer
from ..service import Service

SMALL_BODY_BYTES = 1024 * 1024
"""Bodies that need no reservation."""
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Bytes of larger bodies that may wait for a response at once."""

LARGE_RESPONSE_BYTES = 32 * 1024
"""A larger response is written in parts of this size, and needs a reservation."""
MAX_RESPONSE_BYTES_TOTAL = 24 * 1024 * 1024
"""Bytes of large responses that may wait for their clients at once. A single one may be larger."""

_KEY = "conure.request_id"
_TIMER_KEY = "conure-request-timer"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
_HOST = re.compile(r"(?:\[([0-9a-f]*:[0-9a-f:.]*)\]|([a-z0-9.-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
_SCHEME = re.compile(rb"https?://", re.IGNORECASE)


class ForbiddenError(ConureError):
    """The Host or Origin of the request is not allowed."""

    status = 403


def request_id(scope: Any) -> str:
    """Return the id of a request: the client's X-Request-ID if it is well-formed, else a new
    one.
    """
    existing = scope.get(_KEY)
    if existing is None:
        client_id = next((v for k, v in scope.get("headers", ()) if k == b"x-request-id"), b"")
        is_valid = _REQUEST_ID.fullmatch(client_id) is not None
        existing = client_id.decode("ascii") if is_valid else f"req_{secrets.token_hex(12)}"
        scope[_KEY] = existing
    return str(existing)


async def add_request_id(message: Message, scope: Scope) -> None:
    """Add the request id to the response headers (a Litestar `before_send` hook)."""
    if message["type"] == "http.response.start":
        headers = list(message.get("headers", ()))
        headers.append((b"x-request-id", request_id(scope).encode("ascii")))
        message["headers"] = headers


class BodyMemoryMiddleware(ASGIMiddleware):
    """Bounds the memory of large bodies of requests that have no response yet.

    A body of unknown length counts as the largest allowed one until it has arrived.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._num_bytes = 0

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass the request on, or raise UnavailableError."""
        size = self._body_size(scope)
        if size <= SMALL_BODY_BYTES:
            await next_app(scope, receive, send)
            return
        self._check_room(size)
        reserved = num_received = 0

        def reserve(num_bytes: int) -> None:
            nonlocal reserved
            self._num_bytes += num_bytes - reserved
            reserved = num_bytes

        async def receive_and_count() -> Any:
            nonlocal num_received
            message = await receive()
            if message["type"] == "http.request":
                num_received += len(message.get("body", b""))
                if not message.get("more_body", False):
                    needed = num_received if num_received > SMALL_BODY_BYTES else 0
                    reserve(min(reserved, needed))
            return message

        async def send_and_release(message: Message) -> None:
            if message["type"] == "http.response.start":
                reserve(0)  # a stream of events may last for hours
            await send(message)

        reserve(size)
        try:
            await next_app(scope, receive_and_count, send_and_release)
        finally:
            reserve(0)

    def _check_room(self, size: int) -> None:
        if self._num_bytes + size > MAX_WAITING_BYTES:
            raise UnavailableError(
                "server.busy",
                f"requests with {self._num_bytes:,} bytes wait for their responses; retry later",
                retry_after_s=1,
            )

    def _body_size(self, scope: Scope) -> int:
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers:
            return self._max_body
        length = headers.get(b"content-length", b"0")
        # A length beyond the limit is refused before the body is read.
        size = int(length) if length.isdigit() and len(length) < 20 else 0
        return size if size <= self._max_body else 0


class ResponseMemoryMiddleware(ASGIMiddleware):
    """Bounds the memory of large responses that their clients have not read.

    A client that does not read is disconnected after `connection.STALL_S`.
    """

    def __init__(self) -> None:
        self._num_bytes = 0

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass the request on; raise UnavailableError instead of a response that does not fit."""
        reserved = 0

        async def send_in_parts(message: Message) -> None:
            nonlocal reserved
            if message["type"] == "http.response.start":
                reserved = self._reserve(_content_length(message))
            body = message["body"] if message["type"] == "http.response.body" else b""
            if len(body) <= LARGE_RESPONSE_BYTES:
                await send(message)
                return
            view = memoryview(body)
            for start in range(0, len(view), LARGE_RESPONSE_BYTES):
                end = start + LARGE_RESPONSE_BYTES
                more: Any = end < len(view) or message.get("more_body", False)
                part: Any = {**message, "body": view[start:end], "more_body": more}
                await send(part)

        try:
            await next_app(scope, receive, send_in_parts)
        finally:
            self._num_bytes -= reserved

    def _reserve(self, size: int) -> int:
        """Reserve memory for a response, and return how much."""
        if size <= LARGE_RESPONSE_BYTES:
            return 0
        if self._num_bytes and self._num_bytes + size > MAX_RESPONSE_BYTES_TOTAL:
            raise UnavailableError(
                "server.responses",
                f"{self._num_bytes:,} bytes of responses wait for their clients, and this one has "
                f"{size:,}; retry later",
                retry_after_s=1,
            )
        self._num_bytes += size
        return size


def _content_length(message: Any) -> int:
    """Return the length of a response; 0 for a stream."""
    for name, value in message.get("headers", ()):
        if name.lower() == b"content-length":
            return int(value)
    return 0


class RequestTimeMiddleware(ASGIMiddleware):
    """Measures what a request with one call takes outside the engines.

    The time begins when the body has arrived. The handler sets `engine_s` of `timer_of`.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass the request on."""
        service: Service = scope["litestar_app"].state.service
        with service.request_times.measure() as timer:

            async def receive_body() -> Any:
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body", False):
                    timer.begin()
                return message

            cast(dict[str, Any], scope)[_TIMER_KEY] = timer
            await next_app(scope, receive_body, send)


def timer_of(request: Any) -> RequestTimer:
    """Return the timer of a request whose route has `RequestTimeMiddleware`."""
    return cast(RequestTimer, request.scope[_TIMER_KEY])


class LoopbackOnlyMiddleware(ASGIMiddleware):
    """Rejects requests whose Host or Origin is not this machine."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass the request on, or raise ForbiddenError."""
        hosts = [v for k, v in scope["headers"] if k == b"host"]
        if not hosts or not all(map(_is_local, hosts)):
            raise ForbiddenError(
                "host.forbidden",
                "the Host header must name this machine: localhost, 127.0.0.1 or [::1]",
            )
        for name, value in scope["headers"]:
            if name == b"origin" and not _is_local_origin(value):
                raise ForbiddenError(
                    "origin.forbidden", "requests from other origins are not allowed"
                )
        await next_app(scope, receive, send)


def _is_local(host: bytes) -> bool:
    """Return whether a Host header names this machine, by the loopback names and addresses only."""
    found = _HOST.fullmatch(host.decode("latin-1"))
    return found is not None and is_loopback(found[1] or found[2])


def _is_local_origin(origin: bytes) -> bool:
    scheme = _SCHEME.match(origin)
    return scheme is not None and _is_local(origin[scheme.end() :])
