"""Time limits of functions, and threads for synchronous ones.

A thread cannot be stopped. When a function exceeds its time, its caller fails at once and the
thread is abandoned: it ends with the function, and another one takes its place. Too many abandoned
threads refuse further calls, so that functions that hang cannot take the memory of the server.

Threads are daemons: a function that hangs does not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..program.errors import RunError

NUM_THREADS = 32
MAX_ABANDONED = 64


class FunctionTimeoutError(Exception):
    """A function took longer than its limit."""


@contextlib.asynccontextmanager
async def time_limit(timeout_s: float) -> AsyncIterator[None]:
    """Limit the time of a function.

    A `TimeoutError` that the function itself raises, for example one of its HTTP client, is passed
    on.

    Raises:
        FunctionTimeoutError: if the function takes longer.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise FunctionTimeoutError from None
        raise


class FunctionThreads:
    """Runs functions in threads, at most `num_threads` at once."""

    def __init__(
        self, num_threads: int = NUM_THREADS, *, max_abandoned: int = MAX_ABANDONED
    ) -> None:
        self._free = asyncio.Semaphore(num_threads)
        self._max_abandoned = max_abandoned
        self._num_abandoned = 0

    @property
    def num_abandoned(self) -> int:
        """Threads whose function still runs although its caller has failed."""
        return self._num_abandoned

    async def run(self, call: Callable[[], Any], *, timeout_s: float) -> Any:
        """Run a function in a thread and return its result.

        The time starts when a thread is free. A cancelled caller abandons the thread as well.

        Raises:
            FunctionTimeoutError: if the function takes longer.
            RunError: `call.overloaded` if too many functions hang.
            BaseException: what the function raises.
        """
        async with self._free:
            if self._num_abandoned >= self._max_abandoned:
                raise RunError(
                    "call.overloaded",
                    f"{self._num_abandoned} functions still run after their timeout: try again "
                    "when they have ended",
                )
            running = _Running(asyncio.get_running_loop(), call)
            try:
                async with time_limit(timeout_s):
                    return await running.done
            finally:
                if not running.has_ended:
                    self._num_abandoned += 1
                    running.on_end = self._abandoned_ended

    def _abandoned_ended(self) -> None:
        self._num_abandoned -= 1


class _Running:
    """A function that runs in its own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> None:
        self.done: asyncio.Future[Any] = loop.create_future()
        self.has_ended = False
        """Whether the function has returned and the event loop has its result."""
        self.on_end: Callable[[], None] = lambda: None
        self._loop = loop
        self._call = call
        threading.Thread(target=self._run, name="function", daemon=True).start()

    def _run(self) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._call()
        except StopIteration:
            # A future cannot have this exception.
            error = RuntimeError("the function raised StopIteration")
        except BaseException as raised:
            error = raised
        # The event loop may be closed: the server has stopped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, result, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.has_ended = True
        if not self.done.done():
            if error is not None:
                self.done.set_exception(error)
            else:
                self.done.set_result(result)
        self.on_end()
