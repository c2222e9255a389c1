"""Garbage that the collector closes within any statement of a thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator

NUM_ALLOCATIONS = 40
TIMEOUT_S = 5.0


def blocks_when_collected(action: Callable[[], object], close: Callable[[], object]) -> bool:
    """Return whether an action blocks if a collection at one of its allocations calls `close`."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    try:
        return any(_blocks(action, close, number) for number in range(1, NUM_ALLOCATIONS))
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        gc.enable()


def _blocks(action: Callable[[], object], close: Callable[[], object], number: int) -> bool:
    def work() -> None:
        gc.disable()
        gc.collect()
        _leave_garbage(close)
        gc.set_threshold(gc.get_count()[0] + number)
        gc.enable()
        action()
        gc.disable()
        gc.collect()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return thread.is_alive()


def _leave_garbage(close: Callable[[], object]) -> None:
    """Leave an open generator in a reference cycle."""

    def stream() -> Generator[None, None, None]:
        try:
            yield
        finally:
            close()

    opened = stream()
    next(opened)
    cycle: list[object] = [opened]
    cycle.append(cycle)
