"""A harness around a scheduler that records which calls start, where and why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from conure.server.scheduling.request import PromptPrefix, ResourceRequest
from conure.server.scheduling.scheduler import Placement, QueuedCall, Scheduler


async def run_loop() -> None:
    """Let the loop run what `call_soon` queued."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def resource_request(
    program: str = "p", need: int = 10, num_output: int = 0, **fields: Any
) -> ResourceRequest:
    """Return a request for `need` tokens, including its output."""
    return ResourceRequest(
        program=program, num_prompt=need - num_output, num_output=num_output, **fields
    )


def prefixes(*lengths: int, of: str = "x", stays: bool = False) -> tuple[PromptPrefix, ...]:
    """Return prefixes of one text, by their lengths."""
    return tuple(PromptPrefix(f"{of}{length}".encode(), length, stays) for length in lengths)


class SchedulerHarness:
    """Records which calls were started, in order, and why."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.placements: list[tuple[str, str]] = []
        self.why: dict[str, str] = {}

    def add_engine(
        self,
        name: str = "e",
        capacity: int = 100,
        max_sequences: int = 4,
        steps: Callable[[], int] | None = None,
    ) -> None:
        self.scheduler.add_engine(name, capacity=capacity, max_sequences=max_sequences, steps=steps)

    def submit(self, name: str, *, rank: float = 0.0, need: int = 10, **fields: Any) -> QueuedCall:
        """Submit a call of the program named before the dot."""

        def start(placement: Placement) -> None:
            self.placements.append((name, placement.engine))
            self.why[name] = placement.why

        def wait(why: str) -> None:
            self.why[name] = why

        call = QueuedCall(resource_request(name.split(".")[0], need, **fields), rank, start, wait)
        self.scheduler.submit(call)
        return call

    @property
    def started_names(self) -> list[str]:
        return [name for name, _ in self.placements]

    def engines_of(self, *names: str) -> set[str]:
        """Return the engines that these calls were started on."""
        return {engine for name, engine in self.placements if name in names}
