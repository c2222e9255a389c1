"""Streams of an accelerated app, which keep its run open while somebody reads them.

LlamaIndex makes some of a stream's calls only when it is read, after the app's method has
returned. Knows generators and the run they belong to.

Kept true: the run ends when the stream ends, is closed, or is forgotten without being read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse

from .scope import Scope, running


class Kept(Generator[Any, Any, None]):
    """A generator whose steps belong to a run."""

    def __init__(self, stream: Generator[Any, Any, Any], scope: Scope) -> None:
        self._stream = stream
        self._scope = scope

    def send(self, value: Any) -> Any:
        """The next item."""
        return self._step(self._stream.send, value)

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Raise where the generator stands."""
        return self._step(self._stream.throw, kind if value is None else value)

    def close(self) -> None:
        """Leave the stream."""
        self._stream.close()
        self._scope.finish()

    def __del__(self) -> None:
        self._scope.finish()

    def _step(self, go_on: Any, *args: Any) -> Any:
        try:
            with running(self._scope):
                return go_on(*args)
        except BaseException as end:
            self._scope.finish(is_failed=not isinstance(end, StopIteration))
            raise


class AsyncKept(AsyncGenerator[Any, Any]):
    """The same with await."""

    def __init__(self, stream: AsyncGenerator[Any, Any], scope: Scope) -> None:
        self._stream = stream
        self._scope = scope

    async def asend(self, value: Any) -> Any:
        """The next item."""
        return await self._step(self._stream.asend, value)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Raise where the generator stands."""
        return await self._step(self._stream.athrow, kind if value is None else value)

    async def aclose(self) -> None:
        """Leave the stream."""
        await self._stream.aclose()
        self._scope.finish()

    def __del__(self) -> None:
        self._scope.finish()

    async def _step(self, go_on: Any, *args: Any) -> Any:
        try:
            with running(self._scope):
                return await go_on(*args)
        except BaseException as end:
            self._scope.finish(is_failed=not isinstance(end, StopAsyncIteration))
            raise


def keep(made: Any, scope: Scope) -> tuple[Any, bool]:
    """What an app returned, its stream kept, and whether it has one."""
    if isinstance(made, Generator):
        return Kept(made, scope), True
    if isinstance(made, AsyncGenerator):
        return AsyncKept(made, scope), True
    if isinstance(made, StreamingResponse) and made.response_gen is not None:
        made.response_gen = Kept(made.response_gen, scope)
        return made, True
    if isinstance(made, AsyncStreamingResponse):
        made.response_gen = AsyncKept(made.response_gen, scope)
        return made, True
    return made, False
