"""The parts of `Client` that threads do differently from an event loop.

`async_io` has the same interface for `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import httpx

from .async_client import AsyncClient
from .client_steps import StepRequest, call_step_function
from .connection import LIMITS, ClientSettings
from .exchange.retry import Retry
from .io_thread import IOThread
from .local_app import Application, SyncTransport

T = TypeVar("T")

logger = logging.getLogger(__name__)

NUM_STEP_THREADS = 16

sleep = time.sleep


class BaseClient:
    """Connections to one server, shared by any number of threads."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        app: Application | None = None,
        timeout_s: float = 30.0,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Configure the client, and start `app` if given. It connects at the first request.

        Args:
            base_url: URL of the server. Default: the environment variable CONURE_URL, or
                http://127.0.0.1:8400.
            app: an ASGI application to run in this process instead of connecting to a server.
            timeout_s: how long to wait for a reply, in addition to the time of a long poll.
            retry: when to repeat requests that are refused or get no answer.
            headers: sent with every request.
        """
        self._settings = ClientSettings(
            base_url, app=app, timeout_s=timeout_s, retry=retry, headers=headers
        )
        if self._settings.local_app is not None:
            self._settings.local_app.start()
        self._connections = self._connect()
        self._pid = os.getpid()
        self.io_thread = IOThread()
        """Runs the requests of accelerated runs."""
        self.twin = AsyncClient(settings=self._settings)
        """An asynchronous client of the same server. It refuses requests once this client is
        closed. Its connections on an event loop close when that loop ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and the application if it runs in this process."""
        self.io_thread.close(self.twin.close)
        self._settings.is_closed = True
        self._connections.close()
        if self._settings.local_app is not None:
            self._settings.local_app.close()

    def close_with_last_use(self) -> None:
        """Close the connections when nothing refers to the client, and at the process's exit."""
        weakref.finalize(self, self._connections.close)

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed; it then refuses requests."""
        return self._connections.is_closed

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Copies of a model that holds a client share the client.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client holds connections of this process and cannot be pickled; pickle its base_url "
            "and create a Client where it is used"
        )

    def asynchronous(self) -> AsyncClient:
        """Return an `AsyncClient` of the same server. Close it before this client."""
        return AsyncClient(settings=self._settings)

    @property
    def server(self) -> object:
        """Identifies the server: equal for clients of the same server."""
        return self._settings.server

    @property
    def identity(self) -> object:
        """Identifies server and sender: equal for clients whose requests have equal headers."""
        return self._settings.identity

    @property
    def first_contact_timeout_s(self) -> float:
        """How long a server that has never answered is waited for; see `Retry`."""
        return self._retry.first_contact_timeout_s

    @property
    def may_wait(self) -> bool:
        """Whether the current thread may wait for answers.

        The threads that run the client's requests or its in-process application may not: each
        would wait for itself. An application's code can run there when the garbage collector
        closes one of its generators. See also `LocalApp.may_wait`.
        """
        local_app = self._settings.local_app
        may_wait = local_app is None or local_app.may_wait
        return may_wait and not self.io_thread.is_own_thread

    @property
    def _retry(self) -> Retry:
        return self._settings.retry

    def _http(self) -> httpx.Client:
        if self._pid != os.getpid():  # forked: the connections belong to the parent process
            self._connections, self._pid = self._connect(), os.getpid()
        return self._connections

    @staticmethod
    def _shield(result: T) -> T:
        """Return the result: a call in a thread cannot be cancelled."""
        return result

    def _connect(self) -> httpx.Client:
        local_app = self._settings.local_app
        return httpx.Client(
            base_url=self._settings.base_url,
            headers=self._settings.headers,
            transport=None if local_app is None else SyncTransport(local_app),
            limits=LIMITS,
        )


class StepRunner:
    """Runs client steps in threads. On exit, drops those that have not begun."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_STEP_THREADS, thread_name_prefix="conure-step")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function in a thread, with this thread's context. The log gets its exception."""
        self._pool.submit(copy_context().run, function, *args).add_done_callback(_log_failure)


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (failure := future.exception()) is not None:
        logger.error("a thread of client steps failed", exc_info=failure)


def call_function(step: StepRequest) -> Any:
    """Call the function of a step. An awaitable result is awaited."""
    value = call_step_function(step)
    return asyncio.run(_await(value)) if inspect.isawaitable(value) else value


def is_interruption(problem: BaseException) -> bool:
    """Return False: an exception ends the function in its thread, and nothing else."""
    return False


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable
