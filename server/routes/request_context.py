"""Access to a request's body, tenant and service, and waiting that ends with the connection.

Invariants: a wait in `while_connected` ends when its client disconnects or the server drains. An
append and a PUT that wait for their program do not use it: if they were interrupted, the client
would not know whether they were applied. The generator of a stream is always closed by the task
that ran it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar, cast

from litestar import Request
from litestar.exceptions import HTTPException
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Send

from ..program.decoding.bodies import decode_json
from ..program.errors import ConureError, UnavailableError
from ..service import Service

T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]

EVENT_STREAM = "text/event-stream"

MAX_INLINE_BYTES = 65_536
"""Size of the largest body that is decoded on the event loop."""

TENANT = "local"
"""The tenant of all requests, as long as there are no API keys."""


class RequestError(ConureError):
    """The request itself is malformed."""

    status = 400


class DisconnectedError(ConureError):
    """The client has disconnected. This error is never sent."""

    status = 499


def service_of(request: AnyRequest) -> Service:
    """Return the application's service."""
    return cast(Service, request.app.state.service)


def draining_of(request: AnyRequest) -> asyncio.Event:
    """Return the event that is set when the server drains. All waits end then."""
    return cast(asyncio.Event, request.app.state.draining)


def session_idle_s_of(request: AnyRequest) -> float:
    """Return the seconds after which an unused session ends."""
    return cast(float, request.app.state.session_idle_s)


def tenant_of(request: AnyRequest) -> str:
    """Return the tenant whose programs this request may access."""
    return TENANT


async def read_json(request: AnyRequest) -> bytes:
    """Return the undecoded body.

    Raises:
        RequestError: if the content type is not application/json, or the body is compressed.
        DisconnectedError: if the body is incomplete.
    """
    if request.content_type[0].lower() != "application/json":
        raise RequestError(
            "request.media_type",
            "the body must have Content-Type: application/json",
            status=415,
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(
            "request.media_type",
            f"the body has Content-Encoding {encoding!r}; send it uncompressed",
            status=415,
        )
    try:
        return await request.body()
    except HTTPException as exc:
        if exc.status_code < 500:
            raise
        raise DisconnectedError(
            "request.incomplete", "the client disconnected before the end of the body"
        ) from exc


async def read_record(request: AnyRequest, record_type: type[T]) -> T:
    """Return the record in a request's body.

    Raises:
        RequestError, DisconnectedError: as `read_json`.
        ProgramError: as `decode_json`.
    """
    body = await read_json(request)
    return await decode_body(request, body, lambda body: decode_json(body, record_type))


async def decode_body(request: AnyRequest, body: bytes, decode: Callable[[bytes], T]) -> T:
    """Decode a body, in a thread if it is large.

    Raises:
        ProgramError: as `decode`.
    """
    if len(body) <= MAX_INLINE_BYTES:
        return decode(body)
    threads: ThreadPoolExecutor = request.app.state.decoding_threads
    return await asyncio.get_running_loop().run_in_executor(threads, decode, body)


def accepts_event_stream(request: AnyRequest) -> bool:
    """Return whether the client prefers an event stream to JSON.

    Raises:
        RequestError: if the Accept header has an infinite weight.
    """
    try:
        return request.accept.best_match(["application/json", EVENT_STREAM]) == EVENT_STREAM
    except OverflowError as exc:
        raise RequestError(
            "request.invalid", "a weight (q) in Accept must be between 0 and 1"
        ) from exc


async def while_connected(request: AnyRequest, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client disconnects or the server drains.

    Raises:
        DisconnectedError: if the client disconnected first.
        UnavailableError: if the server drains.
    """
    task = asyncio.ensure_future(work)
    endings = [
        asyncio.ensure_future(_disconnect(request.receive)),
        asyncio.ensure_future(draining_of(request).wait()),
    ]
    try:
        await asyncio.wait((task, *endings), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if endings[1].done():
            raise draining_error()
        raise DisconnectedError("request.disconnected", "the client has disconnected")
    finally:
        for waiter in (task, *endings):
            waiter.cancel()
        await asyncio.gather(task, *endings, return_exceptions=True)


def draining_error() -> UnavailableError:
    """Return the error of a wait that a drain has ended."""
    return UnavailableError("server.draining", "the server is shutting down", retry_after_s=5)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GeneratorResponse(ASGIStreamingResponse):
    """A stream of encoded bytes from a generator.

    When a client disconnects, Litestar leaves a suspended generator to the garbage collector. This
    class closes it at once, in the task that ran it and outside of any cancelled scope, so that the
    generator may await in its cleanup.
    """

    __slots__ = ("_generator",)

    def __init__(
        self,
        generator: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            iterator=generator,
            status_code=status,
            media_type=media_type,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )
        self._generator = generator

    async def send_body(self, send: Send, receive: Receive) -> None:
        """Send until the generator ends or the client disconnects, then close the generator."""
        stream = asyncio.ensure_future(self._send_all(send))
        disconnect = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((stream, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
        finally:
            stream.cancel()
            disconnect.cancel()
            await asyncio.gather(stream, disconnect, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._generator):
            await self._stream(send)


class EventStreamResponse(GeneratorResponse):
    """Server-sent events from a generator of encoded bytes."""

    __slots__ = ()

    def __init__(
        self,
        generator: AsyncGenerator[bytes, None],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(generator, media_type=EVENT_STREAM, status=status, headers=headers)
