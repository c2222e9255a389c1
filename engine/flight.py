"""A step on its way: started, and not read yet.

A device that computes by itself need not wait for the host. While step n runs, step n + 1 may
be started if all of it is known but the ids that n is about to sample: every row decodes one
token, and what is sampled next depends on those ids through the model alone. That one of them
ends its output (EOS, a stop string) is found out late; then what n + 1 gives for it is thrown
away.

Knows contexts, rows and handles. Refuses to know blocks, reports and what follows from an
id. `following` is a pure decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .api import Limits
from .context import Context
from .generation import Generation
from .runner import Handle, Row
from .seen import has_penalty


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was started."""

    contexts: list[Context]
    rows: list[Row]
    """One of each context; they stay as they were when the step was started."""
    generations: list[Generation | None]
    """What each context was about then."""
    complete: list[Context]
    """Contexts that need no row: others compute what they lack."""
    handle: Handle
    unmade: set[int] = field(default_factory=set)
    """Blocks that it fills, begins, or writes to again."""


class Follower(NamedTuple):
    """A context that goes on decoding."""

    context: Context
    place: int
    """Which of the ids of the step before is its last token."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A step that could not be started."""

    error: Exception

    @property
    def is_ready(self) -> bool:
        """There is nothing to wait for."""
        return True

    def read(self) -> list[int]:
        """Raise what happened."""
        raise self.error


def following(
    flight: Flight, work: Sequence[Context], limits: Limits, num_spare: int
) -> list[Follower]:
    """Return the rows of the step that may be started before `flight` is read.

    They are the rows that the batcher would choose if no output ended. None, where the
    flight has to be read first.

    Args:
        flight: The last step that was started.
        work: All contexts with work, best first.
        limits: Of the engine.
        num_spare: Blocks that can be had without taking any from a context; a row needs one
            at most.
    """
    places: dict[Context, tuple[int, Generation | None]] = {}
    for context, row, generation in zip(
        flight.contexts, flight.rows, flight.generations, strict=True
    ):
        if row.sampling is not None:
            places[context] = len(places), generation
    chosen: list[Follower] = []
    most = min(limits.max_sequences, limits.step_tokens)
    for context in work:
        if len(chosen) == most:
            break
        if context.is_released or context.is_stalled:
            continue
        place, generation = places.get(context, (-1, None))
        if generation is None or context.generation is not generation:
            return []
        length = len(context.ids) + 1
        if not _is_free(generation) or length >= limits.num_blocks * limits.block_size:
            return []
        if length < generation.end:
            chosen.append(Follower(context, place))
    return chosen if len(chosen) <= num_spare else []


def _is_free(generation: Generation) -> bool:
    """Whether the host needs no id of an output to say how its next one is chosen."""
    sampling = generation.sampling
    return (
        generation.ending is None
        and generation.constraint is None
        and not has_penalty(sampling)
        and sampling.logprobs is None
    )
