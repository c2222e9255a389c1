"""Embeddings of texts, computed by the engines.

An embedding is a function of its text: nothing is journaled, and a text whose engine is lost is
sent again. A text has the rank of a call that arrives at the same time, and shares the engine's
steps with calls.

Invariants: at most `MAX_AT_ONCE` texts are on the engines, which limits the KV memory that
embeddings take from calls. Requests take turns: none waits for all texts of another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from conure.engine import protocol

from ..program.errors import ConureError, PromptError, UnavailableError
from .protocol import Engine

MAX_AT_ONCE: Final = 8
MAX_ATTEMPTS: Final = 3
"""How often a text is sent, if its engine is lost each time."""
CAPABILITY: Final = "embeddings"


class EmbeddingError(ConureError):
    """An engine cannot embed a text."""

    status = 502


class Embedder:
    """Sends texts to the engines that compute embeddings."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        """Create an embedder; `engines` returns the running engines."""
        self._engines = engines
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    @property
    def is_supported(self) -> bool:
        """Whether an engine computes embeddings."""
        return any(CAPABILITY in engine.hello.capabilities for engine in self._engines())

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the mean of the last hidden states [H] over the tokens of each text.

        Args:
            texts: token ids, at least one per text.

        Raises:
            PromptError: `prompt.too_long`.
            EmbeddingError: the engine's error.
            UnavailableError: `engine.none` if no engine that computes embeddings is alive, or each
                attempt lost its engine.
        """
        rank = time.monotonic()
        tasks: list[asyncio.Task[list[float]]] = []
        failed: list[asyncio.Task[list[float]]] = []

        def on_done(task: asyncio.Task[list[float]]) -> None:
            self._places.release()
            if not task.cancelled() and task.exception() is not None:
                failed.append(task)

        try:
            for text in texts:
                # A request waits for one place at a time, and waiters are served in order.
                await self._places.acquire()
                if failed:
                    self._places.release()
                    break
                tasks.append(asyncio.create_task(self._embed(list(text), rank)))
                tasks[-1].add_done_callback(on_done)
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _embed(self, text: list[int], rank: float) -> list[float]:
        for _ in range(MAX_ATTEMPTS):
            engine = self._least_loaded()
            if engine is None:
                break
            try:
                reply = await engine.embed(text, rank)
            except ConnectionError:
                continue
            if isinstance(reply, protocol.Embedded):
                return reply.values
            kind = PromptError if reply.code == "prompt.too_long" else EmbeddingError
            raise kind(reply.code, reply.message)
        raise UnavailableError("engine.none", "no engine answers; retry", retry_after_s=2)

    def _least_loaded(self) -> Engine | None:
        """Return the engine with the fewest contexts among those that compute embeddings."""
        capable = [
            engine
            for engine in self._engines()
            if engine.is_alive and CAPABILITY in engine.hello.capabilities
        ]
        return min(capable, key=lambda engine: engine.num_contexts_by_owner.total(), default=None)
