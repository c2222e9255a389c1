"""What the routes share: a request's body, its tenant, its service, and its end.

Knows ASGI: a client that leaves is noticed by `receive`, a stream that nobody reads any
more must be closed by hand, and a server that drains must end what waits.

Kept true: nothing that waits outlives its connection, and nothing that waits outlives a
drain; a generator behind a stream is always closed, in the task that ran it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar, cast

from litestar import Request
from litestar.exceptions import HTTPException
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Send

from ..program.errors import ConureError, UnavailableError
from ..service import Service

T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]

EVENT_STREAM = "text/event-stream"

TENANT = "local"
"""Everybody, as long as there are no keys."""


class RequestError(ConureError):
    """The request itself cannot be read, whatever it asks for."""

    status = 400


class DisconnectedError(ConureError):
    """The client has left; nobody reads this error."""

    status = 499


def service_of(request: AnyRequest) -> Service:
    """The service behind the application that got this request."""
    return cast(Service, request.app.state.service)


def draining_of(request: AnyRequest) -> asyncio.Event:
    """Set once the server drains: whatever waits then ends."""
    return cast(asyncio.Event, request.app.state.draining)


def tenant_of(request: AnyRequest) -> str:
    """Whose programs this request may see."""
    return TENANT


async def read_json(request: AnyRequest) -> bytes:
    """Returns the body, not decoded.

    Raises:
        RequestError: if it does not come as application/json, or only in part.
    """
    if request.content_type[0].lower() != "application/json":
        raise RequestError(
            "request.media_type",
            "the body must come as Content-Type: application/json",
            status=415,
        )
    try:
        return await request.body()
    except HTTPException as exc:
        if exc.status_code < 500:
            raise
        raise DisconnectedError("request.incomplete", "the body ended early") from exc


def wants_events(request: AnyRequest) -> bool:
    """Whether the answer is to be a stream of events rather than JSON.

    Raises:
        RequestError: if the Accept header has a weight without bounds.
    """
    try:
        return request.accept.best_match(["application/json", EVENT_STREAM]) == EVENT_STREAM
    except OverflowError as exc:
        raise RequestError("request.invalid", "a q in Accept must be from 0 to 1") from exc


async def while_connected(request: AnyRequest, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it when the client leaves or the server drains.

    Raises:
        DisconnectedError: if the client left first.
        UnavailableError: if the server drains.
    """
    task = asyncio.ensure_future(work)
    ends = [
        asyncio.ensure_future(_disconnect(request.receive)),
        asyncio.ensure_future(draining_of(request).wait()),
    ]
    try:
        await asyncio.wait((task, *ends), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if ends[1].done():
            raise draining_error()
        raise DisconnectedError("request.disconnected", "the client has left")
    finally:
        for waiter in (task, *ends):
            waiter.cancel()
        await asyncio.gather(task, *ends, return_exceptions=True)


def draining_error() -> UnavailableError:
    """What a waiter gets from a server that is about to stop."""
    return UnavailableError("server.draining", "the server is about to stop", retry_after_s=5)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(ASGIStreamingResponse):
    """Server-sent events from a generator of ready bytes.

    Litestar leaves a generator that stands at a `yield` when its client leaves to the
    garbage collector; here it is closed at once, by the task that ran it, outside of any
    cancelled scope, so that its own clean-up may wait.
    """

    __slots__ = ("_generator",)

    def __init__(
        self,
        generator: AsyncGenerator[bytes, None],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            iterator=generator,
            status_code=status,
            media_type=EVENT_STREAM,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )
        self._generator = generator

    async def send_body(self, send: Send, receive: Receive) -> None:
        """Sends until the generator ends or the client leaves, then closes the generator."""
        stream = asyncio.ensure_future(self._send_all(send))
        leave = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((stream, leave), return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
        finally:
            stream.cancel()
            leave.cancel()
            await asyncio.gather(stream, leave, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._generator):
            await self._stream(send)
