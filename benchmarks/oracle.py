"""What a clairvoyant could have done with the KV memory of a recorded run.

Two oracles over one trace, which says of every step of an engine which blocks its rows read or
wrote. *Last use*: a block is held from the step that computes it to the last one that uses it.
*Next use* (Belady, 1966): of blocks that no row of the present step uses, the one goes
that is used again farthest in the future; what is used never again goes at once.

Knows names of blocks, which are equal where the tokens up to their ends are equal. Refuses to
know contexts, programs and how a schedule came about: it is taken as it was.
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
    """Blocks of the rows that ran, also those that were only read."""
    computed: frozenset[Block]
    """Of these, the ones of which tokens went through the model."""
    num_held: int
    """Blocks that contexts referred to when it had ended."""
    num_refilled: int = 0
    """Tokens of whole blocks that went through the model though they had done so before."""
    changes: Sequence[tuple[float, int]] = ()
    """Blocks that were held from some time on, before the next step: what is given up at the end
    of a stage is free long before the next one begins."""


def block_seconds(trace: Sequence[StepTrace]) -> float:
    """Blocks held, each for as long as it was, as recorded."""
    total = sum(step.num_held * (step.ended_s - step.began_s) for step in trace)
    for step, later in pairwise(trace):
        held, since_s = step.num_held, step.ended_s
        for at_s, num_held in (*step.changes, (later.began_s, 0)):
            total += held * (at_s - since_s)
            held, since_s = num_held, at_s
    return total


def last_use_block_seconds(trace: Sequence[StepTrace]) -> float:
    """The same if every block were given up with the last step that uses it.

    A block that was computed again counts from there on as another one: nobody held it between.
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


def next_use_num_refilled(trace: Sequence[StepTrace], capacity: int) -> int:
    """Blocks that have to be computed again if of so many those went first that are used last.

    Args:
        trace: the steps.
        capacity: blocks in all; every step fits.
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
    """For every step and block that it uses, the number of the next step that does so too."""
    found: list[dict[Block, float]] = [{} for _ in trace]
    upcoming: dict[Block, float] = {}
    for number in range(len(trace) - 1, -1, -1):
        for block in trace[number].uses:
            found[number][block] = upcoming.get(block, math.inf)
            upcoming[block] = number
    return found
