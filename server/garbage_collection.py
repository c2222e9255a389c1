"""Garbage collection in short pieces.

Python's full collections scan every object of the server and stop all threads meanwhile: 0.7 s per
collection with a program of 90,000 nodes. Here, objects that survived two collections of young
objects are scanned once more and then frozen, so that the next collection does not scan them again.
Ended programs need no collection: they have no reference cycles (`ProgramRun.break_cycles`).

Frozen objects are scanned again only if there are far more of them than live programs need: most
are garbage then.

Invariant: what a collection scans does not grow with the live programs.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Final

YOUNG, MIDDLE = 3_000, 8
"""New objects before a collection of new ones, and such collections before one of middle age."""
NEVER: Final = 1_000_000_000
CHECK_S: Final = 0.1
MIN_COLLECTIONS: Final = 2
"""Collections of middle age before their survivors are scanned: about 50,000 objects, or 10 ms."""
OBJECTS_PER_NODE: Final = 40
"""Containers that a node of a live program needs at most; most need about 15."""
MAX_UNEXPLAINED: Final = 250_000
"""Frozen objects beyond those of live programs, before all objects are scanned."""
COUNT_S: Final = 60.0
"""How often the frozen objects are counted, which takes 30 ms for a million."""


class GarbageCollection:
    """The garbage collection of a server process."""

    def __init__(self, num_nodes: Callable[[], int]) -> None:
        """Args: `num_nodes` returns how many nodes the programs in memory have together."""
        self._num_nodes = num_nodes
        self._num_base = 0
        """Frozen objects that do not belong to programs."""
        self._counted_at = 0.0

    async def run(self) -> None:
        """Collect garbage until cancelled."""
        self.begin()
        while True:
            await asyncio.sleep(CHECK_S)
            self.collect()

    def begin(self) -> None:
        """Replace Python's full collections. The code and the routes of the server are frozen."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, NEVER)
        self._num_base = gc.get_freeze_count()
        self._counted_at = time.monotonic()

    def collect(self) -> None:
        """Collect garbage among the objects that are not frozen, if there may be much of it."""
        if gc.get_count()[2] < MIN_COLLECTIONS:
            return
        gc.collect()
        gc.freeze()
        if time.monotonic() - self._counted_at >= COUNT_S:
            self.collect_frozen()
            self._counted_at = time.monotonic()

    def collect_frozen(self) -> None:
        """Scan all objects if most of the frozen ones must be garbage."""
        num_explained = OBJECTS_PER_NODE * self._num_nodes()
        if gc.get_freeze_count() - self._num_base - num_explained > MAX_UNEXPLAINED:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self._num_base = max(0, gc.get_freeze_count() - num_explained)
