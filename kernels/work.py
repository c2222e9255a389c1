"""The work of a step as one flat table, which a persistent kernel reads on the device.

An item is a tile of queries and a chunk of a stretch: what one program computes at once, for
one KV head. The stretches are those of the plan's tree and what remains of each row. Queries
are cut so that they fill the rows of a tile with all heads of their group; stretches are cut
so that an item takes about the same time as all others, `ITEMS_PER_PROGRAM` for each program,
for a fixed cut is wrong at both ends: few long stretches leave processors idle, many short
pieces write more parts than they read keys (Parrot and FastTree cut at a fixed length).
Longest first, every second round backwards, so that each program gets as much as any other.

The table is int32 words: `Header`, then items of `ITEM_SIZE` words (`Field`), merges, entries,
pages. An entry is one query of one stretch: its number, and the slot of its first part; an
item of chunk c writes to that slot plus c. The parts of a query are neighbours, so that a
merge is three words: query, first slot, number of parts. A query of one part has no slot.
Offsets stand in the header: a copy of the words in use brings a step to the device, and the
launch is the same whatever they say, as a CUDA graph wants it.

While rows decode on, only the end of each row's last item moves; there is room for
`SPARE_BLOCKS` more pages of each row. Rows that come and go one by one are put in and taken out
where they stand (`edit`), as long as each stretch would be cut into the same tiles. Else the
table is made anew.

Knows plans and sizes, no tensors. Kept true: for each query, its items cover each position it
may see exactly once, and its merge names the slot of each of them, or there is one and none.

Shapes: R rows - S stretches - E entries - T queries.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import edit
from .cutting import (
    CHUNK_TOKENS,
    CHUNK_UNIT,
    ITEM_TOKENS,
    Reals,
    Stretches,
    cut_queries,
    cut_stretches,
    deal,
    give_slots,
    list_stretches,
)
from .plan import Plan
from .table import HEADER_SIZE, SPARE, SPARE_BLOCKS, SPARE_PAGES, Ends, Shared, Table, ranges
from .table import ITEM_SIZE as ITEM_SIZE
from .table import MERGE_SIZE as MERGE_SIZE
from .table import Field as Field
from .table import Header as Header
from .table import Words as Words
from .tree import Integers, Tree

ITEMS_PER_PROGRAM: Final = 4
PROGRAMS: Final = {0: 3, 64: 2, 128: 1}
"""Programs that a processor runs at once, by the rows of large items: what registers allow."""


class Kind(NamedTuple):
    """What layers have in common that run by the same table."""

    kv_heads: int
    group: int
    """Query heads of a KV head."""
    window: int | None
    small: int
    """Rows of a small item: at least the group."""
    large: int
    """Rows of a large item at most; 0 where all are small."""
    processors: int
    """Of the device."""


class Work:
    """The table of one kind of layer, from step to step."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Final = kind
        self.table: Words = np.zeros(0, dtype=np.int32)
        """The words in use."""
        self.large = 0
        """Rows of the large items in the table; 0 where there is none."""
        self.programs = 0
        """Programs that share the work."""
        self.num_built = 0
        """Tables that were not made from the one before."""
        self._target = 0.0
        """Tokens of an item, when the table was made."""
        self._tree: Tree | None = None
        self._made: Table | None = None

    @property
    def num_parts(self) -> int:
        """Slots that the parts of this step take."""
        return 0 if self._made is None else self._made.num_parts

    @property
    def num_merges(self) -> int:
        """Queries of several parts."""
        return 0 if self._made is None else self._made.num_merges

    def update(self, plan: Plan) -> None:
        """Make the table of a step."""
        if self._made is None or not self._go_on(plan, self._made):
            self._made = self._build(plan)
            self.num_built += 1
        self.table, self._tree = self._made.in_use, plan.tree

    def _go_on(self, plan: Plan, made: Table) -> bool:
        """Make the last table that of this step; False where it cannot be."""
        has_window = self.kind.window is not None
        if self._tree is not plan.tree:
            change = plan.change
            if has_window or change is None or change.former is not self._tree:
                return False
            if not edit.apply(made, plan, change, self._cut) or not self._is_as_cut(made.shared):
                return False
        return made.grow(plan, has_window=has_window)

    def _cut(self, tokens: int) -> int:
        """Return the tokens of a chunk of what one row alone reads."""
        chunks = max(1, round(tokens / max(self._target, CHUNK_TOKENS)))
        return -(-tokens // (chunks * CHUNK_UNIT)) * CHUNK_UNIT

    def _is_as_cut(self, shared: list[Shared]) -> bool:
        """Say whether a new table would have the same sizes of tiles."""
        group, small = self.kind.group, self.kind.small
        rows = max((stretch.count for stretch in shared), default=1) * group
        return self._large(rows) == self.large and all(
            stretch.is_large == (stretch.count * group > small and self.large > 0)
            for stretch in shared
        )

    def _large(self, most: int) -> int:
        """Return the rows of large items where a stretch has `most` rows at most."""
        # A large tile costs the same for all its rows: no larger than there is use for.
        return min(self.kind.large, 64 if most <= 64 else 128) if most > self.kind.small else 0

    def _build(self, plan: Plan) -> Table:
        kind = self.kind
        stretches = list_stretches(plan, kind.window)
        num_queries = stretches.num_queries
        self.large = self._large(int(num_queries.max()) * kind.group)
        self.programs = kind.processors * PROGRAMS[self.large]
        is_large = (num_queries * kind.group > kind.small) & (self.large > 0)
        most = np.where(is_large, max(self.large, kind.small), kind.small) // kind.group
        tiles = cut_queries(stretches, is_large, most, self.large)
        units = self.programs * ITEMS_PER_PROGRAM / kind.kv_heads
        self._target = float(((tiles.end - tiles.begin + ITEM_TOKENS) * tiles.cost).sum()) / units
        items, chunks = cut_stretches(stretches, tiles, self._target, plan.block_size)
        slots, merges = give_slots(stretches, tiles, chunks, plan.num_queries)
        is_merged = slots[items[:, Field.ENTRY]] >= 0
        items[:, Field.PART] = np.where(is_merged, items[:, Field.PART], -1)
        factor: Reals = np.where(items[:, Field.IS_LARGE], tiles.large_cost, 1.0)
        cost: Reals = factor * items[:, Field.NUM_KV]
        items = items[deal(cost, max(1, self.programs // kind.kv_heads))]
        shared = _shared(stretches, most, is_large, chunks)
        return _lay_out(plan, stretches, shared, items, merges, slots)


def _shared(
    stretches: Stretches, most: Integers, is_large: NDArray[np.bool_], chunks: Integers
) -> list[Shared]:
    """Note how the stretches of the tree were cut, in tiles of `most` and each into `chunks`."""
    num = stretches.num_queries
    count = -(-num // most)
    # A tile more than is full, and so one for who joins.
    room = (num // most + 1) * most
    columns = (np.cumsum(room) - room, room, num, most, chunks[np.cumsum(count) - count], is_large)
    num_shared = len(num) - int(stretches.is_own.sum())
    rows = zip(*(column[:num_shared].tolist() for column in columns), strict=True)
    return [Shared(*row) for row in rows]


def _lay_out(
    plan: Plan,
    stretches: Stretches,
    shared: list[Shared],
    items: Integers,
    merges: Integers,
    slots: Integers,
) -> Table:
    """Write all down, with room behind each part.

    Args:
        plan: What is planned.
        stretches: What is read.
        shared: Those that several rows read.
        items: [I, ITEM_SIZE] in order, entries counted without room.
        merges: [M, MERGE_SIZE].
        slots: [E] of the entries without room.
    """
    num_shared, num_rows, num = len(shared), plan.num_rows, stretches.num_queries
    room = np.concatenate(([each.room for each in shared], num[num_shared:])).astype(np.int64)
    entry = np.cumsum(room) - room
    stretch = np.searchsorted(stretches.entry, items[:, Field.ENTRY], side="right") - 1
    items[:, Field.ENTRY] += (entry - stretches.entry)[stretch]
    num_entries, num_pages = int(room.sum()), len(stretches.pages)
    sizes = (
        ITEM_SIZE * (len(items) + SPARE),
        MERGE_SIZE * (len(merges) + SPARE),
        num_entries + SPARE,
        num_entries + SPARE,
        num_pages + num_pages // SPARE_PAGES + SPARE,
    )
    offsets = np.cumsum([HEADER_SIZE, *sizes]).tolist()
    words = np.zeros(offsets[-1], dtype=np.int32)
    words[Header.NUM_ITEMS], words[Header.NUM_MERGES] = len(items), len(merges)
    words[Header.ITEMS], words[Header.MERGES] = offsets[0], offsets[1]
    words[Header.ENTRY_QUERIES], words[Header.ENTRY_SLOTS] = offsets[2], offsets[3]
    words[Header.PAGES] = offsets[4]
    parts = [words[begin:end] for begin, end in pairwise(offsets)]
    entries = ranges(entry, num)
    parts[2][entries], parts[3][entries] = stretches.queries, slots
    parts[4][:num_pages] = stretches.pages
    table = Table(
        words=words,
        items=parts[0].reshape(-1, ITEM_SIZE),
        merges=parts[1].reshape(-1, MERGE_SIZE),
        queries=parts[2],
        slots=parts[3],
        pages=parts[4],
        num_items=len(items),
        num_merges=len(merges),
        num_entries=num_entries,
        num_pages=num_pages,
        num_parts=int(merges[:, 2].sum()),
        shared=shared,
        ends=_ends(plan, stretches, items, stretch, entry[num_shared:]),
        query_start=plan.query_start,
        floor=items[:, Field.FLOOR],
        row_of=np.maximum(stretch - num_shared, 0),
        num_rows=num_rows,
    )
    table.items[: len(items)], table.merges[: len(merges)] = items, merges
    return table


def _ends(
    plan: Plan, stretches: Stretches, items: Integers, stretch: Integers, entry: Integers
) -> Ends:
    """Find the ends of rows: `stretch` is of each item, `entry` the first of each row."""
    num_shared = len(stretches.begin) - plan.num_rows
    row = stretch - num_shared
    # Chunks of a row are in any order: its last is the one that begins last.
    own = np.flatnonzero(row >= 0)
    own = own[np.lexsort((items[own, Field.OFFSET], items[own, Field.PAGE], row[own]))]
    last = own[np.searchsorted(row[own], np.arange(plan.num_rows), side="right") - 1]
    blocks = -(-plan.kv_len // plan.block_size)
    num_kv, page = items[last, Field.NUM_KV], stretches.page[num_shared:]
    page = page - stretches.begin[num_shared:]
    return Ends(plan.kv_len, blocks, blocks + SPARE_BLOCKS, last, num_kv, page, entry)
