"""Lookahead: plan the step that starts before the previous step is read.

On a device that computes asynchronously, step n + 1 may start while step n runs, if everything
about it is known except the ids that step n samples: every row decodes one token and depends on
those ids through the model alone. An output that ends in step n (EOS, a stop string) is
detected late, and its result of step n + 1 is discarded.

Out of scope: blocks, reports and the processing of ids. `plan_lookahead` is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..protocol import EngineLimits
from ..runner.base import Handle, ScheduledSequence
from ..sampling.token_counts import has_penalty
from .context import Context
from .generation import GenerationState


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that was started and not read yet."""

    contexts: list[Context]
    rows: list[ScheduledSequence]
    """One per context, unchanged since the step was started."""
    generations: list[GenerationState | None]
    """The generation of each context when the step was started."""
    complete: list[Context]
    """Contexts that need no row: other rows compute their missing tokens."""
    handle: Handle
    written_blocks: set[int] = field(default_factory=set)


class LookaheadRow(NamedTuple):
    """A context that continues to decode."""

    context: Context
    id_index: int
    """Index of the context's last token among the ids that the previous step samples."""


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """Handle of a step that could not be started."""

    error: Exception

    @property
    def is_ready(self) -> bool:
        """Return True: the error is known."""
        return True

    def read(self) -> list[int]:
        """Raise the error of the launch."""
        raise self.error


def plan_lookahead(
    in_flight: InFlightStep, active: Sequence[Context], limits: EngineLimits, num_available: int
) -> list[LookaheadRow]:
    """Return the rows of the step that may start before `in_flight` is read.

    The rows are those that the batch scheduler would choose if no output ended. The list is
    empty if `in_flight` must be read first.

    Args:
        in_flight: The last step that was started.
        active: All contexts with work, highest priority first.
        limits: Limits of the engine.
        num_available: Blocks that can be allocated without taking any from a context. A row
            needs at most one.
    """
    sampled: dict[Context, tuple[int, GenerationState | None]] = {}
    for context, row, generation in zip(
        in_flight.contexts, in_flight.rows, in_flight.generations, strict=True
    ):
        if row.sampling is not None:
            sampled[context] = len(sampled), generation
    rows: list[LookaheadRow] = []
    max_rows = min(limits.max_sequences, limits.step_tokens)
    for context in active:
        if len(rows) == max_rows:
            break
        if context.is_released or context.is_stalled:
            continue
        id_index, generation = sampled.get(context, (-1, None))
        if generation is None or context.generation is not generation:
            return []
        length = len(context.ids) + 1
        if not _allows_lookahead(generation) or length >= limits.num_blocks * limits.block_size:
            return []
        if length < generation.end:
            rows.append(LookaheadRow(context, id_index))
    return rows if len(rows) <= num_available else []


def _allows_lookahead(generation: GenerationState) -> bool:
    """Return whether the next token can be sampled without the host knowing the previous one."""
    sampling = generation.sampling
    return (
        generation.finish_reason is None
        and generation.constraint is None
        and not has_penalty(sampling)
    )
