"""Lookahead: the step that starts before the previous step is read.

On a device that computes asynchronously, step n + 1 may start while step n runs: the ids that step
n samples reach it on the device. Rows decode, prompts continue and new prompts join.

A row whose next token depends on the text so far (a grammar, a penalty) runs its forward pass like
any other, and is sampled when step n was read: its mask is computed while the forward pass runs.
All rows of such a step are sampled then, since step n + 2 needs all of their ids.

A row of step n + 1 may turn out to be useless once step n is read, if the output has ended or its
grammar forces the next tokens. Its id is discarded.

Out of scope: reports and the processing of ids.

Invariants: no context loses KV to a lookahead step, and no row runs the same token as the step in
flight. Rows of the step in flight are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from ..protocol import EngineLimits
from ..runner.base import Handle, ScheduledSequence
from ..sampling.token_counts import has_penalty
from .batch_scheduler import KVAllocator
from .context import Context
from .generation import GenerationState

MAX_LOOKAHEAD_TOKENS: Final = 256
"""Tokens of a step in flight above which the next one waits until it is read. A longer step
takes the device so long that reading it costs little, and new prompts join the next step sooner."""


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that was started and not read yet."""

    number: int
    contexts: list[Context]
    rows: list[ScheduledSequence]
    """One per context, unchanged since the step was started."""
    generations: list[GenerationState | None]
    """The generation of each context when the step was started."""
    complete: list[Context]
    """Contexts that need no row: other rows compute their missing tokens."""
    handle: Handle
    is_cut: bool = False
    """Whether a context had to wait, so that the step must be read next."""
    written_blocks: set[int] = field(default_factory=set)
    discarded: set[Context] = field(default_factory=set)
    """Contexts whose sampled id is not used."""

    def samples(self, context: Context) -> bool:
        """Return whether the step samples an id that a context will use."""
        return context not in self.discarded and any(
            each is context and row.sampling is not None
            for each, row in zip(self.contexts, self.rows, strict=True)
        )

    def sample_deferred(self) -> None:
        """Sample a step with deferred rows, now that the previous step was read."""
        if not any(row.is_deferred for row in self.rows):
            return
        for context, row, generation in zip(
            self.contexts, self.rows, self.generations, strict=True
        ):
            is_used = (
                not context.is_released
                and generation is not None
                and context.generation is generation
                and generation.finish_reason is None
                and not generation.is_blocked
                and len(context.ids) == row.length
            )
            if row.sampling is not None and not is_used:
                self.discarded.add(context)
            row.mask = context.row.mask if is_used else None
        try:
            self.handle.sample()
        except Exception as error:
            self.handle = FailedLaunch(error)


class LookaheadKV(KVAllocator, Protocol):
    """The part of the KV manager that lookahead needs."""

    def fits(self, context: Context, end: int) -> bool:
        """Return whether a context can grow to `end` without taking blocks from another."""
        ...


class LookaheadBatch(NamedTuple):
    """The rows of a lookahead step."""

    contexts: list[Context]
    rows: list[ScheduledSequence]
    """One per context."""
    complete: list[Context]
    """Contexts whose Fills need no row."""
    is_cut: bool
    """Whether a context has to wait for blocks of another, or for a sum of hidden states."""


class _InFlightRow(NamedTuple):
    """What a step in flight does to a context."""

    end: int
    """Tokens of the context that have KV after the step."""
    id_index: int | None
    """Index of the context's last token among the sampled ids, if it samples."""
    generation: GenerationState | None


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """Handle of a step that could not be started."""

    error: Exception

    @property
    def is_ready(self) -> bool:
        """Return True: the error is known."""
        return True

    def sample(self) -> None:
        """Do nothing."""

    def read(self) -> list[int]:
        """Raise the error of the launch."""
        raise self.error


def schedule_lookahead(
    in_flight: InFlightStep, active: Sequence[Context], kv: LookaheadKV, limits: EngineLimits
) -> LookaheadBatch:
    """Choose the rows of the step that starts before `in_flight` is read.

    The rows are those that `schedule_step` would choose if no output ended, except that a context
    waits which needs blocks of another one or the logits of a token that the step in flight runs.

    Args:
        in_flight: The last step that was started.
        active: All contexts with work, highest priority first.
        kv: Allocates blocks.
        limits: Limits of the engine.
    """
    batch = LookaheadBatch([], [], [], is_cut=False)
    if sum(row.num_new for row in in_flight.rows) > max(MAX_LOOKAHEAD_TOKENS, limits.max_sequences):
        return batch
    running = _rows_in_flight(in_flight)
    # A Fill that the step in flight completes is answered before its context continues.
    waiting = {*in_flight.complete, *_stale(in_flight)}
    budget = limits.step_tokens
    max_decode_reserve = budget // 2
    num_decoding = sum(_decodes(context, running.get(context)) for context in active)
    for context in active:
        if budget == 0 or len(batch.rows) == limits.max_sequences:
            break
        if context.is_released or context in waiting:
            continue
        if context.hidden_sum is not None:
            # The sum of a step in flight is not known: the next step starts when it was read.
            return batch._replace(is_cut=True)
        row = running.get(context)
        max_new = 1
        if _decodes(context, row):
            num_decoding -= 1
        else:
            max_new = budget - min(num_decoding, max_decode_reserve)
            if max_new <= 0 or (row is None and not kv.match_prefix(context)):
                continue
        begin = context.num_computed if row is None else row.end
        length = _length(context, row, limits)
        if begin >= length:
            if row is None and context.is_filling:
                batch.complete.append(context)
            if row is not None or context.is_filling or context.is_blocked:
                continue
            begin -= 1  # Run the last token again for its logits.
        end = min(length, begin + max_new)
        if not kv.fits(context, end):
            return batch._replace(is_cut=True)
        granted = kv.allocate(context, begin, end)
        assert granted == end, "enough blocks are available"
        samples = end == length and not context.is_blocked
        batch.rows.append(_new_row(context, row, begin, end, samples=samples))
        batch.contexts.append(context)
        budget -= end - begin
    return batch


def _rows_in_flight(in_flight: InFlightStep) -> dict[Context, _InFlightRow]:
    running: dict[Context, _InFlightRow] = {}
    num_sampled = 0
    for context, row, generation in zip(
        in_flight.contexts, in_flight.rows, in_flight.generations, strict=True
    ):
        id_index = None
        if row.sampling is not None:
            if context not in in_flight.discarded:
                id_index = num_sampled
            num_sampled += 1
        running[context] = _InFlightRow(row.length, id_index, generation)
    return running


def _stale(in_flight: InFlightStep) -> list[Context]:
    """Return the contexts whose row is useless."""
    return [
        context
        for context, row, generation in zip(
            in_flight.contexts, in_flight.rows, in_flight.generations, strict=True
        )
        if is_stale(context, row, generation)
    ]


def is_stale(context: Context, row: ScheduledSequence, generation: GenerationState | None) -> bool:
    """Return whether a row of a step in flight is useless: its tokens are no longer the context's.

    The output ended or was cut after the step was started. The context may have other tokens at
    these positions since then, so their number says nothing.

    Args:
        context: The context of the row.
        row: A row that was started and not committed.
        generation: The generation of the context when the row was started.
    """
    return (
        row.ids is not context.ids  # replaced when an output is cut
        or row.length > len(context.ids)
        or (row.previous_id_index is not None and context.generation is not generation)
    )


def _decodes(context: Context, row: _InFlightRow | None) -> bool:
    """Return whether a context needs exactly one token, which no other context computes."""
    if row is not None and row.id_index is not None:
        return True
    num_computed = context.num_computed if row is None else row.end
    generation = context.generation
    return (
        generation is not None
        and len(context.ids) - num_computed <= 1
        and context.parent is None
        and not generation.is_blocked
    )


def _length(context: Context, row: _InFlightRow | None, limits: EngineLimits) -> int:
    """Return how many tokens a context should have KV for after the lookahead step."""
    if row is None or row.id_index is None:
        return context.num_runnable
    generation = row.generation
    length = len(context.ids) + 1
    if (
        generation is None
        or context.generation is not generation
        or generation.finish_reason is not None
        or length >= min(generation.end, limits.num_blocks * limits.block_size)
    ):
        return 0  # The output ends, or has ended, with the step in flight.
    return length


def _new_row(
    context: Context, row: _InFlightRow | None, begin: int, end: int, *, samples: bool
) -> ScheduledSequence:
    """Return a row; the context's own may be in flight."""
    own, generation = context.row, context.generation
    new = ScheduledSequence(
        context.id, context.ids, begin, end - begin, context.blocks, num_prompt=own.num_prompt
    )
    if row is not None:
        new.previous_id_index = row.id_index
    if samples and generation is not None and generation.finish_reason is None:
        new.sampling = generation.sampling
        new.token_counts = own.token_counts
        new.biases = own.biases
        new.mask = own.mask
        new.is_deferred = new.previous_id_index is not None and (
            generation.constraint is not None or has_penalty(generation.sampling)
        )
    return new
