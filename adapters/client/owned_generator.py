"""Async generators that are used inside another one.

At its end, `asyncio.run` closes all async generators that its event loop knows, in any order and at
the same time. A generator that the one around it closes as well would be closed twice, and asyncio
prints a traceback. So the loop does not learn of owned generators.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class OwnedGenerator(AsyncIterator[T], Generic[T]):
    """Iterates over a generator in an `async with` block, which closes it at its end."""

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _without_hooks():
            closing = self._generator.aclose()
        await closing

    def __anext__(self) -> Awaitable[T]:
        # A generator calls the hooks of its loop in the first call of one of its methods.
        with _without_hooks():
            return self._generator.__anext__()


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
