"""The batch scheduler: chooses which tokens of which contexts go through the model in a step.

Contexts are served by rank, then by arrival; rows, tokens and blocks follow that order. Prompts
are chunked to fill the token budget of a step. A decode row costs only one token of budget, so a
prompt leaves budget for the decode rows with a lower priority, up to half of the step. Outputs
therefore do not stall while a long prompt with a better rank is filled, and the prompt progresses.

Out of scope: where blocks are allocated from, and how rows are run. Only the contexts' `row`
is written.

Invariants: rows never exceed the limits on tokens and sequences. If a context has work that no
constraint blocks, and all blocks together can hold it, the batch is not empty, except while
contexts with a higher priority hold the blocks and wait for their constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..protocol import EngineLimits
from .context import Context


class KVAllocator(Protocol):
    """The part of the KV manager that the batch scheduler needs."""

    def match_prefix(self, context: Context) -> bool:
        """Share existing KV with a context. Return False to skip the context in this step."""
        ...

    def allocate(self, context: Context, begin: int, end: int) -> int:
        """Allocate blocks for positions `begin` to `end`. Return where they end."""
        ...


class ScheduledBatch(NamedTuple):
    """The contexts of one step."""

    scheduled: list[Context]
    """Contexts with tokens to run, in order. Each context's `row` holds these tokens."""
    complete: list[Context]
    """Contexts whose Fills need no row: all their KV was shared, some from this very step."""


def schedule_step(
    active: Sequence[Context], kv: KVAllocator, limits: EngineLimits
) -> ScheduledBatch:
    """Choose the rows of one step from the contexts with work, highest priority first."""
    scheduled: list[Context] = []
    complete: list[Context] = []
    budget = limits.step_tokens
    max_decode_reserve = budget // 2
    num_decoding = sum(_is_decoding(context) for context in active)
    for context in active:
        if budget == 0 or len(scheduled) == limits.max_sequences:
            break
        if context.is_released:
            # Freed by the server, and released in this step by the last fork that waited for it.
            continue
        is_decoding = _is_decoding(context)
        if is_decoding:
            num_decoding -= 1
            max_new = 1
        else:
            max_new = budget - min(num_decoding, max_decode_reserve)
            if max_new <= 0 or not kv.match_prefix(context):
                continue
        is_blocked = not is_decoding and context.is_blocked
        length = context.num_runnable if is_blocked else len(context.ids)
        begin = context.num_computed
        if begin >= length:
            if context.is_filling:
                complete.append(context)
                continue
            if is_blocked:
                continue
            begin -= 1  # Run the last token again for its logits.
        end = kv.allocate(context, begin, min(length, begin + max_new))
        if end <= begin:
            # Preempting every context of lower priority did not free a block.
            break
        _set_row(context, begin, end, can_sample=end == length and not is_blocked)
        scheduled.append(context)
        budget -= end - begin
    return ScheduledBatch(scheduled, complete)


def _set_row(context: Context, begin: int, end: int, *, can_sample: bool) -> None:
    """Set the tokens that a context runs, and whether its next token is sampled."""
    row, generation = context.row, context.generation
    row.start = begin
    row.num_new = end - begin
    row.sampling = None
    if can_sample and generation is not None and generation.finish_reason is None:
        row.sampling = generation.sampling


def _is_decoding(context: Context) -> bool:
    """Return whether the context needs exactly one token, which no other context computes."""
    generation = context.generation
    return (
        generation is not None
        and len(context.ids) - context.num_computed <= 1
        and context.parent is None
        and not generation.is_blocked
    )
