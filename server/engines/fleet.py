"""The engines of one server: start, supervision and restart.

Out of scope: the work of the engines. The executor is informed by `on_arrived` and `on_lost`, and
moves the calls.
Invariants: every start of an engine has a higher epoch than all before it, across restarts of the
server, too (the first epoch is an argument). An engine that keeps failing is restarted with
exponential backoff, without a limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from .command_line import EngineCommandLine
from .connection import EngineConnection, EngineStartError

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Number of engines, their command line, and timeouts."""

    command: EngineCommandLine
    num_engines: int = 1
    start_s: float = 600.0
    """Loading weights may take minutes."""
    hang_s: float = 120.0
    """Longest step: a step of a large model on a CPU takes many seconds."""
    freeze_s: float = 3.5
    """The longest time that a process may neither send a heartbeat nor use processor time."""


class Fleet:
    """Starts engines and restarts them. `engines` contains the running ones by name."""

    def __init__(
        self,
        options: FleetOptions,
        *,
        first_epoch: int,
        on_arrived: Callable[[EngineConnection], None],
        on_lost: Callable[[EngineConnection], None],
    ) -> None:
        self.engines: dict[str, EngineConnection] = {}
        self._options = options
        self._next_epoch = first_epoch
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._restarts: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Start all engines and wait for them.

        Raises:
            EngineStartError: if one cannot start. The others are stopped.
        """
        names = [f"engine-{i}" for i in range(self._options.num_engines)]
        results = await asyncio.gather(*map(self._launch, names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.stop()
                raise result

    async def stop(self) -> None:
        """Stop all engines and cancel restarts. May be called twice."""
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
        engine = await EngineConnection.start(
            name,
            epoch,
            options.command,
            on_lost=self._engine_lost,
            start_s=options.start_s,
            hang_s=options.hang_s,
            freeze_s=options.freeze_s,
        )
        self.engines[name] = engine
        self._on_arrived(engine)

    def _engine_lost(self, engine: EngineConnection, reason: str) -> None:
        if self.engines.get(engine.name) is not engine:
            return
        del self.engines[engine.name]
        self._on_lost(engine)
        if not self._stopping:
            task = asyncio.create_task(self._restart(engine))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _restart(self, lost: EngineConnection) -> None:
        stopping = asyncio.create_task(lost.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping  # its process and its tasks must not outlive the fleet
            raise
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping:
            try:
                await self._launch(lost.name)
            except (EngineStartError, OSError) as error:
                logger.error("%s failed to restart: %s", lost.name, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                logger.warning("%s restarted", lost.name)
                return
