"""An ASGI application in this process, reached through httpx transports.

`LocalApp` runs the application and its lifespan in a thread with an event loop (anyio's blocking
portal). Calls are only posted to that loop, so the loop of a caller never waits for a busy
application. `SyncTransport` and `AsyncTransport` connect httpx to it, from any thread and any loop.
Response bodies stream: a chunk is readable as soon as the application has sent it, whereas
`httpx.ASGITransport` buffers whole bodies.

Invariants: all code of the application runs on its one loop. Closing a response never blocks, so
that the garbage collector may close one in any thread; the application receives a disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..collection_watch import CollectionWatch

T = TypeVar("T")
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

DISCONNECT_TIMEOUT_S = 1.0
"""How long the application may handle a disconnect before its task is cancelled."""


class ClosedError(RuntimeError):
    """The application was closed before the call, or while the call waited for it."""

    def __init__(self) -> None:
        super().__init__("the in-process application was closed: create a new client for it")


class LocalApp:
    """Runs an ASGI application on a separate event loop."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._state: Literal["new", "running", "closed"] = "new"
        self._submission_lock = threading.Lock()
        self._is_open = False
        """Accepts calls. Changed under `_submission_lock`: a call is posted before the loop is
        stopped, which cancels the call, or is refused."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._cleanup = contextlib.ExitStack()
        self._collection = CollectionWatch()

    def start(self) -> None:
        """Start the loop and run the application's startup. Has no effect while it runs.

        Raises:
            RuntimeError: if the startup failed.
            ClosedError: if the application was closed before.
        """
        with self._lock:
            if self._state == "running":
                return
            if self._state == "closed":
                raise ClosedError
            self._state = "closed"  # unless the startup succeeds
            with contextlib.ExitStack() as stack:
                portal = stack.enter_context(start_blocking_portal("asyncio"))
                stack.callback(self._stop, portal)
                stack.enter_context(self._collection)
                self._loop = portal.call(asyncio.get_running_loop)
                self._thread = portal.call(threading.current_thread)
                lifespan = portal.wrap_async_context_manager(_lifespan(self._app))
                stack.enter_context(lifespan)
                self._cleanup = stack.pop_all()
            self._is_open = True
            self._state = "running"

    def close(self) -> None:
        """Run the application's shutdown and stop the loop. Has no effect when called again."""
        with self._lock:
            self._state = "closed"
            self._cleanup.close()

    def _stop(self, portal: BlockingPortal) -> None:
        with self._submission_lock:
            self._is_open = False
        portal.call(portal.stop, True)  # the end of its loop cancels what still runs

    @property
    def is_running(self) -> bool:
        """Whether the application was started and not closed."""
        return self._state == "running"

    @property
    def is_own_thread(self) -> bool:
        """Whether the current thread is the application's."""
        return threading.current_thread() is self._thread

    @property
    def may_wait(self) -> bool:
        """Whether the current thread may wait for the application.

        Not its own thread, and no thread on which the garbage collector runs: the thread may hold
        a lock that the application needs to answer, such as that of all thread pools.
        """
        return not (self.is_own_thread or self._collection.is_here)

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await a coroutine function on the application's loop, from any other thread.

        Raises:
            ClosedError: if the application is closed, or closes before the function returns.
            RuntimeError: if called from the application's own thread, or by the garbage collector.
                The collector's call runs, and its result is lost.
        """
        if self._collection.is_here and self._loop is not None:
            asyncio.run_coroutine_threadsafe(_awaited(function), self._loop)
            raise RuntimeError("the garbage collector cannot wait for the application")
        try:
            return self._submit(function).result()
        except CancelledError:
            raise ClosedError from None

    async def acall(self, function: Callable[[], Awaitable[T]]) -> T:
        """Do what `call` does, from any event loop."""
        if self.is_own_thread:
            return await function()
        future = asyncio.wrap_future(self._submit(function))
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller was cancelled
            raise ClosedError from None

    def _submit(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        if self.is_own_thread:
            raise RuntimeError("the application's own thread cannot wait for the application")
        with self._submission_lock:
            if not self._is_open or self._loop is None:
                raise ClosedError
            return asyncio.run_coroutine_threadsafe(_awaited(function), self._loop)

    def open_exchange(self, request: httpx.Request, body: bytes) -> Exchange:
        """Return the exchange of one request, not started yet."""
        if self._loop is None:
            raise ClosedError
        timeouts = request.extensions.get("timeout", {})
        return Exchange(self._app, self._loop, _scope(request), body, timeouts)


async def _awaited(function: Callable[[], Awaitable[T]]) -> T:
    return await function()


@contextlib.asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    from_app: asyncio.Queue[Message] = asyncio.Queue()

    async def serve() -> None:
        failure = "the application returned from its lifespan"
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        try:
            await app(scope, to_app.get, from_app.put)
        except Exception as problem:  # reported by `notify`
            failure = repr(problem)
        from_app.put_nowait({"type": "lifespan.failed", "message": failure})

    async def notify(phase: str) -> None:
        to_app.put_nowait({"type": f"lifespan.{phase}"})
        reply = await from_app.get()
        if reply["type"] != f"lifespan.{phase}.complete":
            raise RuntimeError(f"{phase} failed: {reply.get('message', '')}")

    task = asyncio.create_task(serve())
    await notify("startup")
    yield
    await notify("shutdown")
    await asyncio.wait([task], timeout=DISCONNECT_TIMEOUT_S)


class ResponseHead(NamedTuple):
    """Status and headers of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Exchange:
    """One request and its response. Everything but `disconnect` runs on the application's loop."""

    def __init__(
        self,
        app: Application,
        loop: asyncio.AbstractEventLoop,
        scope: Scope,
        body: bytes,
        timeouts: Mapping[str, float | None],
    ) -> None:
        self._app = app
        self._loop = loop
        self._scope = scope
        self._body: bytes | None = body
        self._timeouts = timeouts
        """httpx's timeouts. Read for each message, as they may change while a body streams."""
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._disconnected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_complete = False

    async def start(self) -> ResponseHead:
        """Send the request; return when the response has begun."""
        self._task = asyncio.create_task(self._serve())
        # Mark a failure as retrieved: after the end of the response no reader is left for it.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        message = await self._next()
        if message is None:
            raise httpx.RemoteProtocolError("the application returned without a response")
        return ResponseHead(message["status"], list(message.get("headers", [])))

    async def chunk(self) -> bytes | None:
        """Return all bytes sent since the last call, waiting for the first; None at the end."""
        while not self._is_complete:
            chunks = [self._body_of(await self._next())]
            while not self._is_complete and not self._messages.empty():
                chunks.append(self._body_of(self._messages.get_nowait()))
            data = b"".join(chunks)
            if data:
                return data
        return None

    def disconnect(self) -> None:
        """Report a disconnect to the application, from any thread, without waiting for it.

        The application's task is cancelled if it still runs after `DISCONNECT_TIMEOUT_S`.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the task with it
            self._loop.call_soon_threadsafe(self._on_disconnect)

    def _on_disconnect(self) -> None:
        self._disconnected.set()
        if self._task is not None and not self._task.done():
            self._loop.call_later(DISCONNECT_TIMEOUT_S, self._task.cancel)

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._messages.put_nowait(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._disconnected.is_set():
            self._messages.put_nowait(message)

    async def _next(self) -> Message | None:
        timeout_s = self._timeouts.get("read")
        try:
            message = await asyncio.wait_for(self._messages.get(), timeout_s)
        except TimeoutError:
            raise httpx.ReadTimeout(
                f"the application sent nothing within {timeout_s:g} s"
            ) from None
        if message is None and self._task is not None:
            await asyncio.wait([self._task])
            failure = None if self._task.cancelled() else self._task.exception()
            if failure is not None:
                raise httpx.ReadError(f"the application failed: {failure!r}") from failure
        return message

    def _body_of(self, message: Message | None) -> bytes:
        if message is None:
            self._is_complete = True
            return b""
        self._is_complete = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body


class SyncTransport(httpx.BaseTransport):
    """Connects httpx clients in threads to a local application."""

    def __init__(self, local: LocalApp) -> None:
        self._local = local

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Run one request; the response body streams."""
        exchange = self._local.open_exchange(request, request.read())
        try:
            head = self._local.call(exchange.start)
        except BaseException:
            exchange.disconnect()
            raise
        body = _SyncBody(self._local, exchange)
        return httpx.Response(head.status, headers=head.headers, stream=body)


class AsyncTransport(httpx.AsyncBaseTransport):
    """Connects httpx clients in coroutines of any loop to a local application."""

    def __init__(self, local: LocalApp) -> None:
        self._local = local

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run one request; the response body streams."""
        exchange = self._local.open_exchange(request, await request.aread())
        try:
            head = await self._local.acall(exchange.start)
        except BaseException:
            exchange.disconnect()
            raise
        body = _AsyncBody(self._local, exchange)
        return httpx.Response(head.status, headers=head.headers, stream=body)


class _SyncBody(httpx.SyncByteStream):
    def __init__(self, local: LocalApp, exchange: Exchange) -> None:
        self._local, self._exchange = local, exchange

    def __iter__(self) -> Iterator[bytes]:
        while (chunk := self._next()) is not None:
            yield chunk

    def _next(self) -> bytes | None:
        if not self._local.may_wait:
            # The garbage collector closes a generator that first reads its input to the end, as
            # those of LangChain do. End that generator, silently.
            raise GeneratorExit
        return self._local.call(self._exchange.chunk)

    def close(self) -> None:
        self._exchange.disconnect()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, local: LocalApp, exchange: Exchange) -> None:
        self._local, self._exchange = local, exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._local.acall(self._exchange.chunk)) is not None:
            yield chunk

    async def aclose(self) -> None:
        self._exchange.disconnect()


def _scope(request: httpx.Request) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port or 80),
        "client": ("127.0.0.1", 1),
        "state": {},
    }
