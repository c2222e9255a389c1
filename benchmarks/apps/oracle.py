"""Optimal use of KV memory for a recorded run, with knowledge of the future.

Two oracles read one trace, which lists the blocks that the rows of each engine step read or
wrote. *Last use*: a block is held from the step that computes it to the last step that uses it.
*Next use* (Belady, 1966): of the blocks that the current step does not use, the one with the
latest next use is evicted; blocks without a next use are evicted immediately.

Two full blocks have the same name if the tokens up to their ends are equal. A partial block has the
name of the full block that it becomes, or else it is named by its context and index. The schedule
is the recorded one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

Block = Hashable


class StepTrace(NamedTuple):
    """One step of an engine."""

    began_s: float
    ended_s: float
    uses: frozenset[Block]
    """Blocks of the rows that ran, including blocks that were only read."""
    computed: frozenset[Block]
    """The subset of `uses` that was computed from the first token of the block in this step."""
    num_held: int
    """Blocks that contexts referred to at the end of the step."""
    num_refilled: int = 0
    """Tokens of whole blocks that were computed although they had been computed before."""
    changes: Sequence[tuple[float, int]] = ()
    """Pairs of a time and the number of held blocks from that time on, between this step and the
    next. Blocks released at the end of a stage are free long before the next step starts.
    """


def block_seconds(trace: Sequence[StepTrace]) -> float:
    """Return the recorded sum over blocks of the time that each block was held."""
    total = sum(step.num_held * (step.ended_s - step.began_s) for step in trace)
    for step, later in pairwise(trace):
        held, since_s = step.num_held, step.ended_s
        for at_s, num_held in (*step.changes, (later.began_s, 0)):
            total += held * (at_s - since_s)
            held, since_s = num_held, at_s
    return total


def last_use_block_seconds(trace: Sequence[StepTrace]) -> float:
    """Return the sum of `block_seconds` if every block were released after its last use.

    A block that is computed again counts as a new block, because it was not held in between.
    """
    total = 0.0
    began: dict[Block, float] = {}
    ended: dict[Block, float] = {}
    last: dict[Block, int] = {}
    for number, step in enumerate(trace):
        for block in step.uses:
            is_new = block in step.computed and last.get(block, -2) != number - 1
            if block not in began or is_new:
                total += ended.get(block, 0.0) - began.get(block, 0.0)
                began[block] = step.began_s
            ended[block] = step.ended_s
            last[block] = number
    return total + sum(ended[block] - began[block] for block in began)


def next_use_num_recomputed(trace: Sequence[StepTrace], capacity: int) -> int:
    """Return the number of blocks that Belady's policy computes again.

    Args:
        trace: The steps.
        capacity: Total number of blocks; every step fits.
    """
    following = _following(trace)
    resident: dict[Block, float] = {}
    seen: set[Block] = set()
    farthest: list[tuple[float, int, Block]] = []
    count = 0
    for number, step in enumerate(trace):
        assert len(step.uses) <= capacity, "a step that does not fit"
        for block in step.uses:
            count += block in seen and block not in resident
            seen.add(block)
            use = following[number][block]
            resident[block] = use
            heapq.heappush(farthest, (-use, id(block), block))
        kept: list[tuple[float, int, Block]] = []
        while len(resident) > capacity:
            entry = heapq.heappop(farthest)
            block = entry[2]
            if resident.get(block) == -entry[0]:
                if block in step.uses:
                    kept.append(entry)
                else:
                    del resident[block]
        for entry in kept:
            heapq.heappush(farthest, entry)
        for block in [block for block in step.uses if resident[block] == math.inf]:
            del resident[block]
    return count


def _following(trace: Sequence[StepTrace]) -> list[dict[Block, float]]:
    """Return, for every step and each block it uses, the number of the next step that uses it."""
    found: list[dict[Block, float]] = [{} for _ in trace]
    upcoming: dict[Block, float] = {}
    for number in range(len(trace) - 1, -1, -1):
        for block in trace[number].uses:
            found[number][block] = upcoming.get(block, math.inf)
            upcoming[block] = number
    return found
