"""The order in which contexts lose KV once no block is free or cached.

1. Idle contexts, the one with the latest next use first.
2. Contexts with work, the one with the lowest priority first. They are preempted, and only
   for a context with a higher priority.

A context loses as many blocks as are needed, from its end: a preempted prompt that lost all blocks
would be computed again from its start, often within the same step. A context that is scheduled in
the current step loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..core.context import Context


class VictimQueue:
    """The contexts that may lose KV while one step is scheduled."""

    def __init__(self, refs: list[int]) -> None:
        """Start empty; `refs` are the reference counts of all blocks."""
        self._refs = refs
        self._victims: list[Context] | None = None
        self._shared: list[Context] = []

    def reset(self) -> None:
        """Forget the order. The next call of `next_victim` sorts again."""
        self._victims = None
        self._shared.clear()

    def next_victim(
        self, requester: Context, holders: Iterable[Context], step: int
    ) -> Context | None:
        """Return the next context to take blocks from, or None.

        Args:
            requester: The context that needs a block.
            holders: All contexts with blocks, sorted once until `reset`.
            step: The step that is being scheduled.
        """
        if self._victims is None:
            self._victims = sorted(holders, key=_eviction_key)
        while self._victims:
            victim = self._victims[-1]
            if not _can_lose_blocks(victim, requester, step):
                self._victims.pop()
            elif victim.has_work:
                if victim.is_before(requester):
                    break  # The victim has a higher priority, and so have all others.
                return victim
            elif self._refs[victim.blocks[-1]] == 1:
                return victim  # Stays in the queue while it has blocks that no other context uses.
            else:
                self._shared.append(self._victims.pop())
        return self._next_shared(requester, step)

    def _next_shared(self, requester: Context, step: int) -> Context | None:
        """Return an idle victim that was skipped because other contexts shared its last block.

        Those contexts may have lost their blocks since.
        """
        while self._shared:
            victim = self._shared[-1]
            if _can_lose_blocks(victim, requester, step):
                return victim
            self._shared.pop()
        return None


def _can_lose_blocks(victim: Context, requester: Context, step: int) -> bool:
    return bool(victim.blocks) and victim is not requester and victim.step != step


def _eviction_key(context: Context) -> tuple[int, float, int, int]:
    """Sort key: the context with the largest key loses KV first."""
    if context.has_work:
        return (0, context.rank, context.arrival, 0)
    next_use = math.inf if context.next_use is None else context.next_use
    return (1, next_use, -context.step, context.arrival)
