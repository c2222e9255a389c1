"""An event loop in a separate thread, for requests that no caller waits for.

`IOThread` belongs to one `Client`. Runs of accelerated chains send their requests and read their
events in this thread, so that they do not depend on the threads or event loops of the application.
The application does not wait for the request that ends a run.

Invariants: the thread starts with the first task and does not keep the process alive. A process
that is forked starts its own thread. Starting a task takes no lock: the garbage collector may end a
run, and thereby start a task, within any statement of any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final

from ..collection_watch import CollectionWatch

EXIT_TIMEOUT_S: Final = 1.0
"""Time that pending requests have when the process ends or the client is closed."""


class IOThread:
    """Runs coroutines in a daemon thread."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        """Workers by process id. A forked process has its parent's worker, but not the thread."""
        self._is_closed = False

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the I/O thread."""
        worker = self._workers.get(os.getpid())
        return worker is not None and worker.thread is threading.current_thread()

    @property
    def is_in_collection(self) -> bool:
        """Whether the caller runs within a garbage collection; False if the thread does not run."""
        worker = self._workers.get(os.getpid())
        return worker is not None and worker.collection.is_here

    def start_task(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run a coroutine function as a task, from any thread.

        Raises:
            RuntimeError: if the client is closed.
        """
        if self._is_closed:
            raise RuntimeError("the client is closed")
        worker = self._workers.get(os.getpid()) or self._new_worker()
        worker.start_task(function, *args)

    def _new_worker(self) -> _Worker:
        """Return the worker of this process. If two threads create one, the first is used."""
        new = _Worker()
        worker = self._workers.setdefault(new.pid, new)
        if worker is new:
            worker.thread.start()
            weakref.finalize(self, worker.stop)
            if self._is_closed:  # closed meanwhile: `close` may have missed this worker
                self._workers.pop(worker.pid, None)
                worker.stop()
                raise RuntimeError("the client is closed")
        else:
            new.discard()
        return worker

    def wake(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, if the thread runs."""
        worker = self._workers.get(os.getpid())
        if worker is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                worker.call(function)

    def close(self, cleanup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for pending tasks, at most `EXIT_TIMEOUT_S`; then cancel them.

        Args:
            cleanup: coroutine function that runs last, in the thread.
        """
        self._is_closed = True
        worker = self._workers.pop(os.getpid(), None)
        if worker is not None:
            worker.stop(cleanup)


class _Worker:
    """The thread, its loop and its tasks."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self.collection = CollectionWatch()
        self.thread = threading.Thread(target=self._run, name="conure-io", daemon=True)

    def start_task(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        def start() -> None:
            task = self._loop.create_task(function(*args))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def discard(self) -> None:
        """Free a worker whose thread was not started."""
        self._loop.close()

    def stop(self, cleanup: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Finish the tasks, then end the thread. Has no effect when called again."""
        if self._is_stopping or self.pid != os.getpid():
            return
        self._is_stopping = True
        ending = asyncio.run_coroutine_threadsafe(self._finish(cleanup), self._loop)
        ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if self.thread.ident is not None and threading.current_thread() is not self.thread:
            self.thread.join(2 * EXIT_TIMEOUT_S)

    async def _finish(self, cleanup: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=EXIT_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if cleanup is not None:
            await cleanup()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with self.collection:
                self._loop.run_forever()
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
