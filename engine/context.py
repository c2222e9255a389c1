"""One context: its tokens, where their KV lies, and what is still to be done for it.

`ids` are all tokens; the KV of the first `num_computed` of them lies in `blocks`. The two
never have to agree: an evicted context has ids and no KV, and the last id of a finished
Generate has no KV until somebody needs it. Whatever is missing is computed again from ids.

Knows no model and no other context, but for the parent whose tokens it waits for. Kept true
between steps: `len(blocks)` is `num_computed` in blocks, rounded up; `depth`, the full
blocks among them, all lie on the path of `node` in the prefix tree.

Counting. Every token of a Fill, the parent's part included, is counted once: *computed*,
*shared* (taken from a live context) or *cached* (taken from evictable cache). Tokens below
the high-water mark were counted before, so going through the model again is *recomputed*,
and taking their KV from somewhere again is free. Tokens that a Generate made are not prompt:
they are in the decoded count and in none of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from conure.kernels.blocktable import BlockTable

from .generation import Generation
from .radix import Node
from .runner import Row

COMPUTED: Final = 0
SHARED: Final = 1
CACHED: Final = 2
RECOMPUTED: Final = 3


@dataclass(slots=True)
class Tally:
    """Where the tokens of one Fill came from, by COMPUTED, SHARED, CACHED, RECOMPUTED."""

    end: int | None = None
    """Position after the Fill's last token; None for what no Fill has claimed yet."""
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])


@dataclass(slots=True, eq=False)
class Context:
    """Tokens with KV behind some of them."""

    id: int
    salt: str
    rank: float
    arrival: int
    """Order among equal ranks; a fork always comes after its parent."""
    ids: list[int]
    blocks: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    node: Node | None = None
    """Deepest node of the tree that this context holds as its own; None at depth 0."""
    depth: int = 0
    next_use: float | None = None
    generation: Generation | None = None
    tallies: list[Tally] = field(default_factory=lambda: [Tally()])
    """One per Fill that is not answered yet, in order, and an open one at the end."""
    high_water: int = 0
    decoded: list[list[int]] = field(default_factory=list)
    """[begin, end) of what Generates made, in order, as far as it may still lack KV."""
    parent: Context | None = None
    """Set while this context waits for tokens that the parent is about to compute."""
    parent_len: int = 0
    origin: Context | None = None
    """What it was forked from, or what that was once that has ended: gets back what had to be
    computed again."""
    origin_len: int = 0
    num_waiting: int = 0
    """Contexts whose `parent` this is."""
    keep: int | None = None
    """Set where the server has freed it but somebody waits: what to keep when all have it."""
    is_released: bool = False
    is_queued: bool = False
    """It is in the engine's list of work."""
    step: int = -1
    """Last step it was scheduled in: immovable during that one."""
    row: Row = field(init=False)

    def __post_init__(self) -> None:
        # One row per context for life: rows are made for every decoded token.
        self.row = Row(self.id, self.ids, 0, 0, self.blocks)

    @property
    def has_work(self) -> bool:
        """Tokens are to be filled or generated."""
        return self.generation is not None or len(self.tallies) > 1

    @property
    def is_held(self) -> bool:
        """It generates, and cannot go on before its constraint is ready."""
        return self.generation is not None and self.generation.is_held

    @property
    def is_stalled(self) -> bool:
        """It is held, and all that can be computed meanwhile is computed."""
        return self.is_held and self.num_computed >= len(self.ids) - 1

    def is_before(self, other: Context) -> bool:
        """Whether this one is served before the other: by rank, then by arrival."""
        return (self.rank, self.arrival) < (other.rank, other.arrival)

    def count_taken(self, kind: int, begin: int, end: int) -> int:
        """Count KV taken from elsewhere; return how many tokens are counted the first time."""
        return self._count_first(kind, begin, end)

    def count_computed(self, begin: int, end: int) -> tuple[int, int]:
        """Count tokens that went through the model; return (computed, recomputed)."""
        again = max(0, min(end, self.high_water) - begin)
        self.tallies[0].counts[RECOMPUTED] += again
        return self._count_first(COMPUTED, begin + again, end), again

    def _count_first(self, kind: int, begin: int, end: int) -> int:
        begin = max(begin, self.high_water)
        if begin >= end:
            return 0
        self.high_water = end
        num = 0
        for first, last in self.decoded:
            num += self._spread(kind, begin, min(end, first))
            begin = max(begin, last)
        # The last one may still grow.
        self.decoded = [d for d in self.decoded[:-1] if d[1] > end] + self.decoded[-1:]
        return num + self._spread(kind, begin, end)

    def _spread(self, kind: int, begin: int, end: int) -> int:
        num = max(0, end - begin)
        for tally in self.tallies:
            upto = end if tally.end is None else min(end, tally.end)
            if begin < upto:
                tally.counts[kind] += upto - begin
                begin = upto
        return num


@dataclass(slots=True)
class Totals:
    """What an engine did since it started, in tokens."""

    computed: int = 0
    shared: int = 0
    cached: int = 0
    recomputed: int = 0
    decoded: int = 0
