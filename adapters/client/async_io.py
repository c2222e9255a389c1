"""The parts of `AsyncClient` that use the event loop: connections, and tasks for client steps.

`sync_io` has the same interface for `Client`, with threads.

Invariants: a connection belongs to the event loop that opened it. A client that is used from
several loops, in turn or at once, has separate connections for each.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import httpx

from .client_steps import StepRequest, call_step_function
from .connection import LIMITS, ClientSettings
from .exchange.retry import Retry
from .local_app import Application, AsyncTransport

T = TypeVar("T")

sleep = asyncio.sleep


class AsyncBaseClient:
    """Connections to one server, per event loop."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        app: Application | None = None,
        timeout_s: float = 30.0,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """Configure the client. It connects at the first request.

        Args:
            base_url: URL of the server. Default: the environment variable CONURE_URL, or
                http://127.0.0.1:8400.
            app: an ASGI application to run in this process instead of connecting to a server.
            timeout_s: how long to wait for a reply, in addition to the time of a long poll.
            retry: when to repeat requests that are refused or get no answer.
            headers: sent with every request.
            settings: settings of another client. This client uses the other client's application,
                but does not close it.
        """
        self._settings = settings or ClientSettings(
            base_url, app=app, timeout_s=timeout_s, retry=retry, headers=headers
        )
        self._owns_app = settings is None
        self._per_loop: dict[asyncio.AbstractEventLoop, _LoopConnections] = {}
        self._shielded: set[asyncio.Task[Any]] = set()
        """Requests that are sent even if their caller is cancelled."""
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of this event loop, and the application if the client owns it."""
        loop = asyncio.get_running_loop()
        if shielded := [task for task in self._shielded if task.get_loop() is loop]:
            await asyncio.wait(shielded)
        connections = self._per_loop.pop(loop, None)
        if connections is not None:
            await connections.lifetime.aclose()
        if self._owns_app and self._settings.local_app is not None:
            await asyncio.to_thread(self._settings.local_app.close)

    @property
    def server(self) -> object:
        """Identifies the server: equal for clients of the same server."""
        return self._settings.server

    @property
    def identity(self) -> object:
        """Identifies server and sender: equal for clients whose requests have equal headers."""
        return self._settings.identity

    @property
    def _retry(self) -> Retry:
        return self._settings.retry

    async def _http(self) -> httpx.AsyncClient:
        if self._settings.is_closed:
            raise RuntimeError("the client is closed")
        if self._pid != os.getpid():  # forked: the connections belong to the parent process
            self._per_loop, self._pid = {}, os.getpid()
        loop = asyncio.get_running_loop()
        connections = self._per_loop.get(loop)
        if connections is not None:
            return connections.http
        local_app = self._settings.local_app
        if local_app is not None and not local_app.is_running:
            await asyncio.to_thread(local_app.start)
            if loop in self._per_loop:  # another coroutine connected meanwhile
                return self._per_loop[loop].http
        for other in list(self._per_loop):  # other threads change it
            if other.is_closed():  # without running `_lifetime` to its end
                self._per_loop.pop(other, None)
        http = httpx.AsyncClient(
            base_url=self._settings.base_url,
            headers=self._settings.headers,
            transport=None if local_app is None else AsyncTransport(local_app),
            limits=LIMITS,
        )
        lifetime = self._lifetime(loop, http)
        self._per_loop[loop] = _LoopConnections(http, lifetime)
        await anext(lifetime)
        return http

    async def _shield(self, operation: Coroutine[Any, Any, T]) -> T:
        """Perform an operation to its end, even if the caller is cancelled once or several times.

        A cancel scope of anyio cancels its task again at each `await`.
        """
        task = asyncio.create_task(operation)
        self._shielded.add(task)
        task.add_done_callback(self._shielded.discard)
        return await asyncio.shield(task)

    async def _lifetime(
        self, loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient
    ) -> AsyncGenerator[None, None]:
        """Close the connections of a loop when `asyncio.run` closes its asynchronous generators."""
        try:
            yield
        finally:
            self._per_loop.pop(loop, None)
            await http.aclose()


class _LoopConnections(NamedTuple):
    """The connections of one event loop."""

    http: httpx.AsyncClient
    lifetime: AsyncGenerator[None, None]
    """Closing this generator closes the connections."""


class AsyncStepRunner:
    """Runs client steps as tasks. On exit, cancels those that still run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run a coroutine function as a task."""
        task = asyncio.create_task(function(*args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def call_function(step: StepRequest) -> Any:
    """Call the function of a step: a coroutine function in this loop, others in a thread.

    An awaitable result is awaited in this loop.
    """
    if inspect.iscoroutinefunction(step.function):
        return await step.function(**step.args)
    value = await asyncio.to_thread(call_step_function, step)
    return await value if inspect.isawaitable(value) else value


def is_interruption(problem: BaseException) -> bool:
    """Return whether an exception of a step ends the step's task, or the event loop.

    A CancelledError does not if the function cancelled and awaited a task of its own.
    """
    if isinstance(problem, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(problem, KeyboardInterrupt | SystemExit)
