"""Generators that keep the run of an accelerated app open while they are read.

LlamaIndex makes some calls of a stream when it is read, after the app's method has returned.

Invariant: the run ends when the stream ends, is closed, or is garbage collected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse

from .scope import ACTIVE_SCOPE, Scope


class ScopedGenerator(Generator[Any, Any, None]):
    """A generator whose steps belong to a run."""

    def __init__(self, stream: Generator[Any, Any, Any], scope: Scope) -> None:
        self._stream = stream
        self._scope = scope

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
        """Close the generator and end the run."""
        self._stream.close()
        self._scope.finish()

    def __del__(self) -> None:
        self._scope.finish()

    def _step(self, resume: Any, *args: Any) -> Any:
        try:
            with ACTIVE_SCOPE.activate(self._scope):
                return resume(*args)
        except BaseException as end:
            self._scope.finish(is_failed=not isinstance(end, StopIteration))
            raise


class AsyncScopedGenerator(AsyncGenerator[Any, Any]):
    """An asynchronous generator whose steps belong to a run."""

    def __init__(self, stream: AsyncGenerator[Any, Any], scope: Scope) -> None:
        self._stream = stream
        self._scope = scope

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
        """Close the generator and end the run."""
        await self._stream.aclose()
        self._scope.finish()

    def __del__(self) -> None:
        self._scope.finish()

    async def _step(self, resume: Any, *args: Any) -> Any:
        try:
            with ACTIVE_SCOPE.activate(self._scope):
                return await resume(*args)
        except BaseException as end:
            self._scope.finish(is_failed=not isinstance(end, StopAsyncIteration))
            raise


def scoped_result(result: Any, scope: Scope) -> tuple[Any, bool]:
    """Return the result of an app with its stream scoped, and whether it has a stream."""
    if isinstance(result, Generator):
        return ScopedGenerator(result, scope), True
    if isinstance(result, AsyncGenerator):
        return AsyncScopedGenerator(result, scope), True
    if isinstance(result, StreamingResponse) and result.response_gen is not None:
        result.response_gen = ScopedGenerator(result.response_gen, scope)
        return result, True
    if isinstance(result, AsyncStreamingResponse):
        result.response_gen = AsyncScopedGenerator(result.response_gen, scope)
        return result, True
    return result, False
