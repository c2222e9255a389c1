"""An ASGI application in this process, spoken to as if it were a server.

Runs the application, lifespan included, on an event loop in a thread of its own, and
gives httpx two transports to it: one for threads, one for coroutines of any other loop.
Responses stream: a chunk is readable as soon as the application has sent it, which
httpx's own ASGI transport does not do. Knows ASGI; refuses to know what is said over it.

Kept true: all code of the application runs on its one loop; a response that is closed
early reaches the application as a disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
)
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeAlias, TypeVar

import httpx

T = TypeVar("T")
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

CLOSE_GRACE_S = 1.0
"""How long an application may take to notice a disconnect before its task is cancelled."""


class ClosedError(RuntimeError):
    """The application was closed, before or while somebody waited for it."""

    def __init__(self) -> None:
        super().__init__("the in-process application was closed")


class LocalApp:
    """The thread, the loop and the lifespan of one application."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._state = "new"
        # Reentrant: while somebody is let in, a stream may be collected, and wants to be closed.
        self._door = threading.RLock()
        self._is_open = False
        """Calls are let in. What was let in runs, or is cancelled at the end."""
        self._lifespan: _Lifespan | None = None

    def start(self) -> None:
        """Start the loop and run the application's startup; safe to call again.

        Raises:
            RuntimeError: if the application refused to start.
            ClosedError: if it was closed before.
        """
        with self._lock:
            if self._state == "running":
                return
            if self._state == "closed":
                raise ClosedError
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, name="conure-app", daemon=True)
            self._thread.start()
            self._is_open = True
            self._lifespan = _Lifespan(self._app)
            try:
                self.call(self._lifespan.startup())
            except BaseException:
                self._stop()
                raise
            self._state = "running"

    def close(self) -> None:
        """Run the application's shutdown and stop the loop; safe to call again."""
        with self._lock:
            if self._state == "running":
                assert self._lifespan is not None
                try:
                    self.call(self._lifespan.shutdown())
                finally:
                    self._stop()
            self._state = "closed"

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the application's loop, from any other thread.

        Raises:
            ClosedError: if the application is closed, or is before the coroutine has ended.
            RuntimeError: if this is the application's thread, which cannot wait for itself.
        """
        if self.is_own_thread:
            coroutine.close()
            raise RuntimeError("the application's own thread cannot wait for the application")
        try:
            return self._let_in(coroutine).result()
        except CancelledError:
            raise ClosedError from None

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread that the application runs in."""
        return threading.current_thread() is self._thread

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the application's loop, from another loop; raises as `call`."""
        future = asyncio.wrap_future(self._let_in(coroutine))
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is the caller who was cancelled
            raise ClosedError from None

    def _let_in(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._door:
            if self._is_open:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ClosedError

    def exchange(self, request: httpx.Request, body: bytes) -> Exchange:
        """One request, not started yet."""
        return Exchange(self._app, _scope(request), body, request.extensions.get("timeout", {}))

    @contextlib.contextmanager
    def left_unless_begun(self, exchange: Exchange) -> Iterator[None]:
        """Leave an exchange whose caller is interrupted, also where its response has just begun."""
        try:
            yield
        except BaseException:
            self.leave(exchange)
            raise

    def leave(self, exchange: Exchange) -> None:
        """Close an exchange and wait for nothing; from any thread."""
        with contextlib.suppress(ClosedError):  # then there is nothing left to close
            self._let_in(exchange.close())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop(self) -> None:
        with self._door:
            self._is_open = False
            # Behind all that was let in: so it finds their tasks.
            ending = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        assert self._thread is not None
        self._thread.join()
        self._loop.close()
        self._state = "closed"


class Head(NamedTuple):
    """Status and headers of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Exchange:
    """One request and its response; every coroutine here runs on the application's loop."""

    def __init__(
        self, app: Application, scope: Scope, body: bytes, timeout: Mapping[str, float | None]
    ) -> None:
        self._app = app
        self._scope = scope
        self._body: bytes | None = body
        self._timeout = timeout
        """Looked at for every message, as a network's transport does."""
        self._sent: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complete = False

    async def start(self) -> Head:
        """Send the request; return when the response has begun."""
        self._task = asyncio.create_task(self._serve())
        # A failure after the response is over concerns nobody here.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            message = await self._next()
        except BaseException:
            await self.close()
            raise
        if message is None:
            raise httpx.RemoteProtocolError("the application ended without a response")
        return Head(message["status"], list(message.get("headers", [])))

    async def chunk(self) -> bytes | None:
        """All bytes sent since the last call, waiting for the first; None at the end."""
        while not self._complete:
            message = await self._next()
            pieces = [self._take(message)]
            while not self._complete and not self._sent.empty():
                pieces.append(self._take(self._sent.get_nowait()))
            data = b"".join(pieces)
            if data:
                return data
        return None

    async def close(self) -> None:
        """Disconnect: the application may end by itself, else its task is cancelled."""
        self._gone.set()
        task = self._task
        if task is None:
            return
        await asyncio.wait([task], timeout=CLOSE_GRACE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if not self._gone.is_set():
            self._sent.put_nowait(message)

    async def _next(self) -> MutableMapping[str, Any] | None:
        try:
            message = await asyncio.wait_for(self._sent.get(), self._timeout.get("read"))
        except TimeoutError:
            raise httpx.ReadTimeout("the application sent nothing in time") from None
        if message is None and self._task is not None:
            await asyncio.wait([self._task])
            failure = None if self._task.cancelled() else self._task.exception()
            if failure is not None:
                raise httpx.ReadError(f"the application failed: {failure!r}") from failure
        return message

    def _take(self, message: MutableMapping[str, Any] | None) -> bytes:
        if message is None:
            self._complete = True
            return b""
        self._complete = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body


class SyncTransport(httpx.BaseTransport):
    """httpx, called from threads, to a local application."""

    def __init__(self, local: LocalApp) -> None:
        self._local = local

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Run one request; the response streams."""
        exchange = self._local.exchange(request, request.read())
        with self._local.left_unless_begun(exchange):
            head = self._local.call(exchange.start())
        stream = _SyncBody(self._local, exchange)
        return httpx.Response(head.status, headers=head.headers, stream=stream)


class AsyncTransport(httpx.AsyncBaseTransport):
    """httpx, called from coroutines of any loop, to a local application."""

    def __init__(self, local: LocalApp) -> None:
        self._local = local

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run one request; the response streams."""
        exchange = self._local.exchange(request, await request.aread())
        with self._local.left_unless_begun(exchange):
            head = await self._local.acall(exchange.start())
        stream = _AsyncBody(self._local, exchange)
        return httpx.Response(head.status, headers=head.headers, stream=stream)


class _SyncBody(httpx.SyncByteStream):
    def __init__(self, local: LocalApp, exchange: Exchange) -> None:
        self._local, self._exchange = local, exchange

    def __iter__(self) -> Iterator[bytes]:
        while (chunk := self._local.call(self._exchange.chunk())) is not None:
            yield chunk

    def close(self) -> None:
        if self._local.is_own_thread:  # a stream that was left is collected anywhere
            self._local.leave(self._exchange)
            return
        with contextlib.suppress(ClosedError):
            self._local.call(self._exchange.close())


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, local: LocalApp, exchange: Exchange) -> None:
        self._local, self._exchange = local, exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._local.acall(self._exchange.chunk())) is not None:
            yield chunk

    async def aclose(self) -> None:
        with contextlib.suppress(ClosedError):
            await self._local.acall(self._exchange.close())


class _Lifespan:
    """The lifespan conversation of one application."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._to_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._from_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def startup(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.create_task(self._serve(scope))
        await self._say("startup")

    async def shutdown(self) -> None:
        await self._say("shutdown")
        assert self._task is not None
        await asyncio.wait([self._task], timeout=CLOSE_GRACE_S)

    async def _serve(self, scope: Scope) -> None:
        failure = "the application ended its lifespan"
        try:
            await self._app(scope, self._to_app.get, self._from_app.put)
        except Exception as problem:  # told to whoever waits for the answer
            failure = repr(problem)
        self._from_app.put_nowait({"type": "lifespan.failed", "message": failure})

    async def _say(self, what: str) -> None:
        self._to_app.put_nowait({"type": f"lifespan.{what}"})
        answer = await self._from_app.get()
        if answer["type"] != f"lifespan.{what}.complete":
            raise RuntimeError(f"{what} failed: {answer.get('message', '')}")


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()


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
