"""Short words for calls, engines and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from conure.server.scheduling.demand import Demand, Prefix
from conure.server.scheduling.scheduler import Placement, Scheduler, Ticket


async def turn() -> None:
    """Let the loop take what `call_soon` queued."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def demand(program: str = "p", need: int = 10, num_output: int = 0, **fields: Any) -> Demand:
    """A call that needs so many tokens, its output among them."""
    return Demand(program=program, num_prompt=need - num_output, num_output=num_output, **fields)


def prefixes(*lengths: int, of: str = "x", stays: bool = False) -> tuple[Prefix, ...]:
    """Prefixes of one text, by their lengths."""
    return tuple(Prefix(f"{of}{length}".encode(), length, stays) for length in lengths)


class Desk:
    """Remembers which calls were started, in order, and why."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.started: list[tuple[str, str]] = []
        self.why: dict[str, str] = {}

    def engine(
        self,
        name: str = "e",
        capacity: int = 100,
        max_sequences: int = 4,
        steps: Callable[[], int] | None = None,
    ) -> None:
        self.scheduler.engine_arrived(
            name, capacity=capacity, max_sequences=max_sequences, steps=steps
        )

    def ticket(self, name: str, *, rank: float = 0.0, need: int = 10, **fields: Any) -> Ticket:
        """A call of the program before the dot."""

        def start(placement: Placement) -> None:
            self.started.append((name, placement.engine))
            self.why[name] = placement.why

        def wait(why: str) -> None:
            self.why[name] = why

        ticket = Ticket(demand(name.split(".")[0], need, **fields), rank, start, wait)
        self.scheduler.submit(ticket)
        return ticket

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.started]

    def where(self, *names: str) -> set[str]:
        """The engines that these calls were started on."""
        return {engine for name, engine in self.started if name in names}
