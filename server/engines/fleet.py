"""The engines of one server: started together, watched, restarted when they die.

Knows how many engines there should be and how to start one. Refuses to know what runs on
them: it says `arrived` and `lost`, and the executor moves the calls.

Kept true: every life of an engine has its own epoch, higher than any before it, also
across restarts of the server (the first epoch is given); an engine that keeps dying is
restarted ever more slowly, never given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from .command import Command
from .engine import Engine, EngineStartError

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How many engines, of which kind, and how patient to be with them."""

    command: Command
    num_engines: int = 1
    start_s: float = 600.0
    """Loading weights may take minutes."""
    hang_s: float = 15.0


class Fleet:
    """All engines; `engines` holds those that are alive."""

    def __init__(
        self,
        options: FleetOptions,
        *,
        first_epoch: int,
        arrived: Callable[[Engine], None],
        lost: Callable[[Engine], None],
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self._options = options
        self._next_epoch = first_epoch
        self._arrived = arrived
        self._lost = lost
        self._restarts: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Start every engine and wait for all.

        Raises:
            EngineStartError: if one cannot start; the others are stopped again.
        """
        names = [f"engine-{i}" for i in range(self._options.num_engines)]
        results = await asyncio.gather(*map(self._launch, names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.stop()
                raise result

    async def stop(self) -> None:
        """Stop all engines and all restarts; safe to call twice."""
        self._stopping = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        engines, self.engines = list(self.engines.values()), {}
        await asyncio.gather(*(engine.stop() for engine in engines))

    async def _launch(self, name: str) -> None:
        epoch = self._next_epoch
        self._next_epoch += 1
        options = self._options
        engine = await Engine.start(
            name,
            epoch,
            options.command,
            lost=self._on_lost,
            start_s=options.start_s,
            hang_s=options.hang_s,
        )
        self.engines[name] = engine
        self._arrived(engine)

    def _on_lost(self, engine: Engine, reason: str) -> None:
        if self.engines.get(engine.name) is not engine:
            return
        del self.engines[engine.name]
        self._lost(engine)
        if not self._stopping:
            task = asyncio.create_task(self._restart(engine))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _restart(self, dead: Engine) -> None:
        await dead.stop()
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping:
            try:
                await self._launch(dead.name)
            except (EngineStartError, OSError) as error:
                logger.error("%s does not start again: %s", dead.name, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                logger.warning("%s has been started again", dead.name)
                return
