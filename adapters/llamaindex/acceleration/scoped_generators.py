"""Generators that keep the run of an accelerated app open while they are read.

LlamaIndex makes some calls of a stream when it is read, after the app's method has returned.

Invariant: a generator holds its run until it ends, is closed, or is garbage collected.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse

from .scope import ACTIVE_SCOPE, Scope


class ScopeHold:
    """One hold on a run, which is released once."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._is_released = False
        scope.hold()

    def release(self, *, has_failed: bool = False) -> None:
        """Release the hold; safe to call again."""
        if not self._is_released:
            self._is_released = True
            self.scope.release(has_failed=has_failed)


class ScopedGenerator(Generator[Any, Any, None]):
    """A generator whose steps belong to a run."""

    def __init__(self, stream: Generator[Any, Any, Any], scope: Scope) -> None:
        self._stream = stream
        self._hold = ScopeHold(scope)

    def send(self, value: Any) -> Any:
        """Return the next item."""
        return self._step(self._stream.send, value)

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Raise an exception inside the generator."""
        return self._step(self._stream.throw, kind if value is None else value)

    def close(self) -> None:
        """Close the generator and release its run."""
        try:
            self._stream.close()
        finally:
            self._hold.release()

    def __del__(self) -> None:
        self._hold.release()

    def _step(self, resume: Any, *args: Any) -> Any:
        try:
            with ACTIVE_SCOPE.activate(self._hold.scope):
                return resume(*args)
        except BaseException as end:
            self._hold.release(has_failed=not isinstance(end, StopIteration))
            raise


class HistoryThread(threading.Thread):
    """Stands for the thread in which LlamaIndex reads a chat stream and writes its answer down.

    LlamaIndex joins that thread when the app closes its generator. The garbage collector may do so
    on the I/O thread of the run. The reader would then wait for events that this thread cannot
    receive.
    """

    def __init__(self, thread: threading.Thread, scope: Scope) -> None:
        super().__init__(name=thread.name)
        self._reader = thread
        self._scope = scope

    def join(self, timeout: float | None = None) -> None:
        """Wait for the reader.

        If the garbage collector calls this while the run still needs other threads, return at once.
        """
        if not self._scope.is_in_collection:
            self._reader.join(timeout)

    def is_alive(self) -> bool:
        """Return whether the reader runs."""
        return self._reader.is_alive()


class AsyncScopedGenerator(AsyncGenerator[Any, Any]):
    """An asynchronous generator whose steps belong to a run."""

    def __init__(self, stream: AsyncGenerator[Any, Any], scope: Scope) -> None:
        self._stream = stream
        self._hold = ScopeHold(scope)

    async def asend(self, value: Any) -> Any:
        """Return the next item."""
        return await self._step(self._stream.asend, value)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Raise an exception inside the generator."""
        return await self._step(self._stream.athrow, kind if value is None else value)

    async def aclose(self) -> None:
        """Close the generator and release its run."""
        try:
            await self._stream.aclose()
        finally:
            self._hold.release()

    def __del__(self) -> None:
        self._hold.release()

    async def _step(self, resume: Any, *args: Any) -> Any:
        try:
            with ACTIVE_SCOPE.activate(self._hold.scope):
                return await resume(*args)
        except BaseException as end:
            self._hold.release(has_failed=not isinstance(end, StopAsyncIteration))
            raise


def scoped_result(result: Any, scope: Scope) -> Any:
    """Return the result of an app; a stream in it holds a run, once."""
    if isinstance(result, StreamingAgentChatResponse):
        scope_chat_stream(result, scope)
    elif isinstance(result, StreamingResponse | AsyncStreamingResponse):
        result.response_gen = _scoped_stream(result.response_gen, scope)
    else:
        result = _scoped_stream(result, scope)
    return result


def _scoped_stream(stream: Any, scope: Scope) -> Any:
    if isinstance(stream, ScopedGenerator | AsyncScopedGenerator):
        return stream
    if isinstance(stream, Generator):
        return ScopedGenerator(stream, scope)
    if isinstance(stream, AsyncGenerator):
        return AsyncScopedGenerator(stream, scope)
    return stream


def scope_chat_stream(response: StreamingAgentChatResponse, scope: Scope) -> None:
    """Let the stream of a chat response hold a run, once, and make its reader safe to join.

    A thread or task of LlamaIndex may read the stream before the method of the chat engine returns.
    So this runs at the start of that reader as well as at the end of the method.
    """
    with scope.lock:
        # Core 0.12 has no such attribute, and does not join the reader.
        reader = getattr(response, "write_response_to_history_thread", None)
        if reader is not None and not isinstance(reader, HistoryThread):
            response.write_response_to_history_thread = HistoryThread(reader, scope)
        if isinstance(response.chat_stream, Generator):
            response.chat_stream = _scoped_stream(response.chat_stream, scope)
        else:
            response.achat_stream = _scoped_stream(response.achat_stream, scope)
