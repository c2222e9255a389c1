"""Generators hold a run until they end, are closed, or fail to close."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from llama_index.core.base.response.schema import StreamingResponse

from conure.adapters.llamaindex.acceleration.scope import Scope
from conure.adapters.llamaindex.acceleration.scoped_generators import (
    AsyncScopedGenerator,
    ScopedGenerator,
    scoped_result,
)


class CountingScope(Scope):
    """A scope that counts its holds and makes no run."""

    def __init__(self) -> None:
        super().__init__()
        self.num_holds = 0

    def hold(self) -> None:
        """Count a hold."""
        self.num_holds += 1

    def release(self, *, has_failed: bool = False) -> None:
        """Forget a hold."""
        self.num_holds -= 1


def test_stream_of_a_response_holds_its_run_once() -> None:
    scope = CountingScope()
    response = StreamingResponse(response_gen=(text for text in "ab"))
    for _ in range(2):
        assert scoped_result(response, scope) is response
    assert scope.num_holds == 1
    assert str(response) == "ab"
    assert scope.num_holds == 0


def test_stream_that_is_no_generator_is_left_alone() -> None:
    scope = CountingScope()
    texts: Any = iter(["a", "b"])
    assert str(scoped_result(StreamingResponse(response_gen=texts), scope)) == "ab"
    assert scope.num_holds == 0


def test_generator_whose_close_raises_releases_its_run() -> None:
    def stream() -> Generator[Any, Any, None]:
        try:
            yield 1
        finally:
            raise OSError("no close")

    scope = CountingScope()
    generator = ScopedGenerator(stream(), scope)
    next(generator)
    assert scope.num_holds == 1
    with pytest.raises(OSError, match="no close"):
        generator.close()
    assert scope.num_holds == 0


async def test_async_generator_whose_close_raises_releases_its_run() -> None:
    async def stream() -> AsyncGenerator[Any, Any]:
        try:
            yield 1
        finally:
            raise OSError("no close")

    scope = CountingScope()
    generator = AsyncScopedGenerator(stream(), scope)
    await anext(generator)
    assert scope.num_holds == 1
    with pytest.raises(OSError, match="no close"):
        await generator.aclose()
    assert scope.num_holds == 0
