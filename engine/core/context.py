"""State of one context: its tokens, the blocks of their KV, and its pending work.

`ids` holds all tokens; the KV of the first `num_computed` of them is in `blocks`. The two
lengths are independent: a preempted context has ids without KV, and the last id of a finished
Generate has no KV until it is needed. Missing KV is recomputed from ids.

Out of scope: the model, and other contexts except the parent whose tokens it waits for.

Invariants between steps: `len(blocks)` is `num_computed` in blocks, rounded up. The first
`depth` blocks, all the full ones, are on the path of `node` in the prefix tree.

Counting: every token of a Fill, including those of the parent, is counted once as *computed*,
*shared* (KV of a live context) or *cached* (KV of the evictable cache). Tokens before
`num_counted` were counted before: running them through the model again counts as *recomputed*,
reusing their KV again counts as nothing. Generated tokens count as decoded and nothing else.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..kv.radix_tree import RadixNode
from ..protocol import Free
from ..runner.base import ScheduledSequence
from .generation import GenerationState

COMPUTED: Final = 0
SHARED: Final = 1
CACHED: Final = 2
RECOMPUTED: Final = 3


def _no_tokens() -> list[int]:
    return [0, 0, 0, 0]


class FillCounters(NamedTuple):
    """Token counts of one Fill."""

    end: int
    """Position after the Fill's last token."""
    counts: list[int]
    """By source: COMPUTED, SHARED, CACHED, RECOMPUTED."""


@dataclass(slots=True, eq=False)
class Context:
    """A sequence of tokens with KV for some of them."""

    id: int
    salt: str
    rank: float
    arrival: int
    """Order among equal ranks. A fork always arrives after its parent."""
    ids: list[int]
    blocks: array[int] = field(default_factory=lambda: array("i"))
    num_computed: int = 0
    node: RadixNode | None = None
    """Deepest prefix tree node of this context's blocks; None at depth 0."""
    depth: int = 0
    next_use: float | None = None
    generation: GenerationState | None = None
    fills: list[FillCounters] = field(default_factory=list)
    """Unanswered Fills, in order."""
    unclaimed: list[int] = field(default_factory=_no_tokens)
    """Counts of tokens after those Fills, by source. The next Fill takes them over."""
    num_counted: int = 0
    """Tokens before this position were counted."""
    generated_ranges: list[list[int]] = field(default_factory=list)
    """[begin, end) of generated tokens, in order. Ranges that were counted are dropped."""
    parent: Context | None = None
    """Set while this context waits for tokens that the parent is about to compute."""
    parent_len: int = 0
    origin: Context | None = None
    """Nearest live ancestor this context was forked from. On release, KV that this context had
    to recompute is shared with it."""
    origin_len: int = 0
    num_waiting_forks: int = 0
    """Contexts whose `parent` is this one."""
    pending_free: Free | None = None
    """Set when the server frees this context while forks still wait for its tokens."""
    hidden_sum: list[float] | None = None
    """[H] sum of the hidden states so far, if the context belongs to an Embed; see `pooling`."""
    is_released: bool = False
    is_queued: bool = False
    """Whether the context is in the engine's list of contexts with work."""
    step: int = -1
    """Last step it allocated blocks for, in the KV manager's count. It is not preempted during
    that step."""
    row: ScheduledSequence = field(init=False)

    def __post_init__(self) -> None:
        # One row for the lifetime of the context: a row per decoded token would be slow.
        self.row = ScheduledSequence(self.id, self.ids, 0, 0, self.blocks)

    @property
    def has_work(self) -> bool:
        """Whether tokens must be filled or generated."""
        return self.generation is not None or bool(self.fills)

    @property
    def is_blocked(self) -> bool:
        """Whether the context generates and waits for its constraint."""
        return self.generation is not None and self.generation.is_blocked

    @property
    def num_runnable(self) -> int:
        """How many of the tokens may be computed now.

        A blocked context runs its last token for a Fill only: the mask of the next one is unknown.
        """
        return len(self.ids) - (self.is_blocked and not self.fills)

    @property
    def is_filling(self) -> bool:
        """Whether the context computes tokens for its Fills only. None of its rows samples."""
        return self.generation is None or (self.is_blocked and bool(self.fills))

    @property
    def is_stalled(self) -> bool:
        """Whether the context is blocked, its Fills are answered, and no token may be computed."""
        return self.is_blocked and not self.fills and self.num_computed >= self.num_runnable

    def is_before(self, other: Context) -> bool:
        """Return whether this context has the higher priority: by rank, then by arrival."""
        return (self.rank, self.arrival) < (other.rank, other.arrival)

    def add_fill(self) -> None:
        """Add a Fill that ends with the last token."""
        self.fills.append(FillCounters(len(self.ids), self.unclaimed))
        self.unclaimed = _no_tokens()

    def pop_complete_fill(self) -> list[int] | None:
        """Remove the first Fill if all its tokens have KV. Return its counts by source."""
        if self.fills and self.fills[0].end <= self.num_computed:
            return self.fills.pop(0).counts
        return None

    def count_reused(self, source: int, begin: int, end: int) -> int:
        """Count tokens whose KV was reused. Return how many are counted for the first time."""
        return self._count_new(source, begin, end)

    def count_computed(self, begin: int, end: int) -> tuple[int, int]:
        """Count tokens that went through the model. Return (computed, recomputed)."""
        num_recomputed = max(0, min(end, self.num_counted) - begin)
        counts = self.fills[0].counts if self.fills else self.unclaimed
        counts[RECOMPUTED] += num_recomputed
        return self._count_new(COMPUTED, begin + num_recomputed, end), num_recomputed

    def _count_new(self, source: int, begin: int, end: int) -> int:
        """Count the tokens from `num_counted` to `end`, except generated ones."""
        begin = max(begin, self.num_counted)
        if begin >= end:
            return 0
        self.num_counted = end
        num = 0
        for first, last in self.generated_ranges:
            num += self._assign_to_fills(source, begin, min(end, first))
            begin = max(begin, last)
        # The last range may still grow.
        ranges = self.generated_ranges
        self.generated_ranges = [r for r in ranges[:-1] if r[1] > end] + ranges[-1:]
        return num + self._assign_to_fills(source, begin, end)

    def _assign_to_fills(self, source: int, begin: int, end: int) -> int:
        """Add the tokens of a range to the counters of the Fills that they belong to."""
        num = max(0, end - begin)
        for fill in self.fills:
            fill_end = min(end, fill.end)
            if begin < fill_end:
                fill.counts[source] += fill_end - begin
                begin = fill_end
        self.unclaimed[source] += max(0, end - begin)
        return num


@dataclass(slots=True)
class EngineCounters:
    """Token counts of an engine since it started."""

    computed: int = 0
    shared: int = 0
    cached: int = 0
    recomputed: int = 0
    decoded: int = 0

    def add_computed(self, computed: int, recomputed: int) -> None:
        """Add tokens that went through the model."""
        self.computed += computed
        self.recomputed += recomputed
