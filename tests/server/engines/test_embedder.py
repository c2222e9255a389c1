"""Texts are embedded by a running engine; a lost engine costs a second attempt."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from conure.engine import protocol
from conure.server.engines.embedder import MAX_AT_ONCE, Embedder, EmbeddingError
from conure.server.program.errors import PromptError, UnavailableError


class ScriptedEngine:
    """An engine that embeds a text as its length."""

    def __init__(self, *, num_contexts: int = 0, capabilities: Any = ("embeddings",)) -> None:
        self.hello = SimpleNamespace(capabilities=[*capabilities])
        self.is_alive = True
        self.num_contexts_by_owner = Counter({"p_1": num_contexts})
        self.failure: protocol.Failed | None = None
        self.num_asked = self.num_running = self.most_running = 0
        self.gate: asyncio.Event | None = None

    async def embed(self, tokens: list[int], rank: float) -> Any:
        self.num_asked += 1
        if not self.is_alive:
            raise ConnectionError("lost")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.gate is not None:
                await self.gate.wait()
            return self.failure or protocol.Embedded(1, [float(len(tokens))])
        finally:
            self.num_running -= 1


def embedder(*engines: ScriptedEngine) -> Embedder:
    found: list[Any] = [*engines]
    return Embedder(lambda: found)


async def test_order_is_that_of_the_texts() -> None:
    engine = ScriptedEngine()
    assert await embedder(engine).embed([[1] * n for n in (3, 1, 2)]) == [[3.0], [1.0], [2.0]]


async def test_text_is_sent_to_the_least_loaded_capable_engine() -> None:
    busy, idle = ScriptedEngine(num_contexts=5), ScriptedEngine(num_contexts=2)
    other = ScriptedEngine(capabilities=())
    assert await embedder(busy, idle, other).embed([[1]]) == [[1.0]]
    assert (busy.num_asked, idle.num_asked, other.num_asked) == (0, 1, 0)
    assert not embedder(other).is_supported


async def test_lost_engine_is_replaced_by_another() -> None:
    losing, other = ScriptedEngine(), ScriptedEngine(num_contexts=9)

    async def embed(tokens: list[int], rank: float) -> Any:
        losing.is_alive = False
        raise ConnectionError("lost")

    losing.embed = embed  # type: ignore[method-assign]  # it dies of the first text
    assert await embedder(losing, other).embed([[1, 2]]) == [[2.0]]


async def test_without_an_engine_the_error_advises_a_retry() -> None:
    engine = ScriptedEngine()
    engine.is_alive = False
    with pytest.raises(UnavailableError, match="retry"):
        await embedder(engine).embed([[1]])


@pytest.mark.parametrize(
    ("code", "kind"), [("prompt.too_long", PromptError), ("engine.step", EmbeddingError)]
)
async def test_failure_of_the_engine_is_raised(code: str, kind: type[Exception]) -> None:
    engine = ScriptedEngine()
    engine.failure = protocol.Failed(1, code, "it failed")
    with pytest.raises(kind, match="it failed"):
        await embedder(engine).embed([[1], [2]])


async def test_texts_at_the_engines_are_bounded_and_end_with_their_request() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    task = asyncio.create_task(embedder(engine).embed([[1]] * (3 * MAX_AT_ONCE)))
    for _ in range(10):  # every task runs until it waits
        await asyncio.sleep(0)
    assert engine.num_running == engine.most_running == MAX_AT_ONCE
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_running == 0


async def test_requests_take_turns() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    order: list[int] = []
    embed = engine.embed

    async def noting(tokens: list[int], rank: float) -> Any:
        order.append(len(tokens))
        return await embed(tokens, rank)

    engine.embed = noting  # type: ignore[method-assign]
    both = embedder(engine)
    large = asyncio.create_task(both.embed([[1]] * (10 * MAX_AT_ONCE)))
    await asyncio.sleep(0)
    small = asyncio.create_task(both.embed([[1, 2]]))
    await asyncio.sleep(0)
    engine.gate.set()
    assert await small == [[2.0]]
    assert len(await large) == 10 * MAX_AT_ONCE
    assert order.index(2) <= 2 * MAX_AT_ONCE


async def test_no_text_is_sent_after_a_failure() -> None:
    engine = ScriptedEngine()
    engine.failure = protocol.Failed(1, "engine.step", "broken")
    with pytest.raises(EmbeddingError, match="broken"):
        await embedder(engine).embed([[1]] * (10 * MAX_AT_ONCE))
    assert engine.num_asked <= 2 * MAX_AT_ONCE
