"""Which tokens of which contexts go through the model in the next step.

Strictly by rank, then by arrival: the order of `work` is the order of rows, of tokens and of
blocks. Prompts are cut into chunks to fill what a step has room for. A decode row needs one
token and is worth a whole one of output, so a prompt leaves room for the decode rows behind
it, up to half of the step: short outputs do not stall behind a long prompt of a better rank,
and the prompt still moves.

A pure decision over its arguments: reads contexts, asks `memory` for room, writes nothing
but the rows it returns. Refuses to know where blocks come from and what rows are run by.
Kept true: rows never hold more tokens or sequences than the limits; if any context has work
that is not held up by its constraint and the pool can hold it, something is chosen or
already complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .api import Limits
from .context import Context


class Memory(Protocol):
    """What the decision needs to know about KV memory."""

    def attach(self, context: Context) -> bool:
        """Take up KV that exists; False where the context should sit this step out."""
        ...

    def reserve(self, context: Context, begin: int, end: int) -> int:
        """Make room for positions `begin` to `end`; return where the room ends."""
        ...


class Batch(NamedTuple):
    """The outcome: whose rows to run, and who turned out to need none."""

    chosen: list[Context]
    """In order; each one's `row` says what to run."""
    complete: list[Context]
    """Filled by what others computed, some of it in this very step."""


def plan(work: Sequence[Context], memory: Memory, limits: Limits) -> Batch:
    """Choose the rows of one step from contexts with work, best first."""
    chosen: list[Context] = []
    complete: list[Context] = []
    budget = limits.step_tokens
    most_kept = budget // 2
    num_decoding = sum(_is_decoding(context) for context in work)
    for context in work:
        if budget == 0 or len(chosen) == limits.max_sequences:
            break
        if context.is_released:
            # Its last reader, just before it in this step, needed less than it was to make.
            continue
        generation = context.generation
        constraint = None if generation is None else generation.constraint
        is_held = constraint is not None and constraint.is_held
        # The last token is run when it can be said what may follow it.
        length = len(context.ids) - is_held
        if _is_decoding(context):
            num_decoding -= 1
            room = 1
        else:
            room = budget - min(num_decoding, most_kept)
            if room <= 0 or not memory.attach(context):
                continue
        begin = context.num_computed
        if begin >= length:
            if generation is None:
                complete.append(context)
                continue
            if is_held:
                continue
            begin -= 1
        end = memory.reserve(context, begin, min(length, begin + room))
        if end <= begin:
            # Everybody behind has given up what it had for this one, and it was not enough.
            break
        row = context.row
        row.start = begin
        row.num_new = end - begin
        row.sampling = None
        if generation is not None and end == length and not is_held and generation.ending is None:
            row.sampling = generation.sampling
        chosen.append(context)
        budget -= end - begin
    return Batch(chosen, complete)


def _is_decoding(context: Context) -> bool:
    """Whether one token is all that it needs, and nobody could spare it that one."""
    generation = context.generation
    return (
        generation is not None
        and len(context.ids) - context.num_computed <= 1
        and context.parent is None
        and (generation.constraint is None or not generation.constraint.is_held)
    )
