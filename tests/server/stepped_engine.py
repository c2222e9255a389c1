"""An engine in the server's process whose steps are turns of the event loop.

The rest is as in an engine process: the same core, the same runner, the same commands and reports.
A report reaches the server while the next step runs, as from a process that does not wait for the
server. So what happens in which step depends neither on the machine nor on its load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from conure.engine import protocol
from conure.engine.__main__ import _create_constraint_compiler, _create_runner
from conure.engine.config import EngineConfig
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import Handle, Runner, ScheduledSequence
from conure.server.engines.connection import EngineConnection


class Row(NamedTuple):
    """What one step computes of one context."""

    context: int
    num_new: int


class LateHandle:
    """A step of an asynchronous device: its ids are ready when they are read."""

    is_ready = False

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def sample(self) -> None:
        self._handle.sample()

    def read(self) -> list[int]:
        return self._handle.read()


class SteppedEngine(EngineConnection):
    """The connection to an engine that runs here."""

    is_late = False
    core: EngineCore
    steps: list[list[Row]]
    before_step: Callable[[], None]
    pending: protocol.StepReport | None
    """What the server has not received yet."""
    is_stepping: bool

    @classmethod
    async def start(cls, name: str, epoch: int, command: Any, **options: Any) -> SteppedEngine:
        engine = cls(name, epoch, options["on_lost"], options["hang_s"], options["freeze_s"])
        config = EngineConfig.from_json(command.argv(0, 0, epoch)[-1])
        runner = _create_runner(config)
        engine.steps = []
        engine.before_step = lambda: None
        engine._record(runner)
        constraints = _create_constraint_compiler(runner)
        engine.core = EngineCore(runner, epoch, constraints=constraints)
        engine.pending = None
        engine.is_stepping = False
        engine._alive = True
        engine._handle_hello(msgspec.msgpack.encode(engine.core.hello()))
        return engine

    def _record(self, runner: Runner) -> None:
        start = runner.start

        def recorded(
            rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]
        ) -> Handle:
            self.steps.append([Row(row.context, row.num_new) for row in rows])
            handle = start(rows, copies)
            return LateHandle(handle) if self.is_late else handle

        setattr(runner, "start", recorded)  # noqa: B010 - mypy forbids the plain one

    def _flush(self) -> None:
        commands, self._outgoing = self._outgoing, []
        for command in commands:
            self.core.apply(command)
        if not self.is_stepping:
            self.is_stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self.before_step()
        report = self.core.step()
        before, self.pending = self.pending, report
        if before is not None:
            self._handle_steps([before])
        if self.pending is None and self.core.is_idle and not self._outgoing:
            self.is_stepping = False
            return
        asyncio.get_running_loop().call_soon(self._step)

    async def stop(self) -> None:
        self._alive = False


def install(monkeypatch: pytest.MonkeyPatch, *, is_late: bool = False) -> None:
    """Let servers that start from here on have engines of this kind.

    Args:
        monkeypatch: undoes it.
        is_late: the engines start a step before they read the one before it.
    """
    monkeypatch.setattr(SteppedEngine, "is_late", is_late)
    monkeypatch.setattr("conure.server.engines.fleet.EngineConnection", SteppedEngine)
