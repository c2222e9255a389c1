"""Build the work table of a step: the attention work that a persistent kernel reads on the GPU.

An item is a tile of queries and a chunk of a KV range: what one program computes at once, for
one KV head. The ranges are the shared ranges of the plan's prefix tree and the private range of
each row. Queries are cut so that, times the heads of their group, they fill the rows of a tile.
Ranges are cut so that all items take about the same time, a few for each program.
A fixed chunk length (Parrot, FastTree) fails at both ends: a few long ranges leave processors
idle, and many short chunks write more partials than they read keys. Items are ordered longest
first: programs take the next one when they are free.

The table is int32 words: `TableHeader`, then items of `ITEM_SIZE` words (`ItemField`), merges,
entries, partials of each query and pages. An entry is one query of one range: the query's index,
and the slot of its first partial; chunk c of the range writes to that slot plus c. The partials of
a query are neighbours, so a merge is three words: query, first slot, number of partials. A query
with a single partial has no slot. Large items precede small ones.

Short private ranges of rows that decode are packed: one item reads the pages of several rows, and
has a word for each page, which names the row and the number of tokens (`ItemField.OWNERS`).

Offsets are in the header: one copy of the words brings a step to the device, and the launch does
not depend on their values, as CUDA graphs require.

While all rows decode, only the last item of each row grows, and there is room for
`SPARE_BLOCKS` more pages of each row. For any other change the table is rebuilt.

Out of scope: tensors.

Invariants: the items of a query cover each position that it may see exactly once. Its merge
names the slot of each of its partials, or it has one item and no merge.

Shapes: R rows - S ranges - E entries - T queries.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...planning.plan import Plan
from ...planning.prefix_tree import Integers, PrefixTree
from .partition import (
    ITEM_OVERHEAD_TOKENS,
    KVRanges,
    QueryTiles,
    Reals,
    assign_partial_slots,
    chunk_lengths,
    cut_queries,
    cut_ranges,
    duration,
    list_ranges,
    longest_first,
    pack_ranges,
    select,
)
from .table import (
    HEADER_SIZE,
    ITEM_SIZE,
    OWNER,
    QUERY_PARTIALS_SIZE,
    SPARE_BLOCKS,
    ItemField,
    PackedRows,
    RowTails,
    TableHeader,
    Words,
    WorkTable,
    ranges,
)

NO_PARTIALS: Final = np.zeros((0, QUERY_PARTIALS_SIZE), dtype=np.int64)
FEW_ROUNDS: Final = 8
"""Rounds of items above which their number per program does not matter."""


class LayerGroup(NamedTuple):
    """The properties of layers that use the same work table."""

    kv_heads: int
    group: int
    """Query heads of a KV head."""
    window: int | None
    small: int
    """Rows of a small item: at least the group."""
    large: int
    """Maximum rows of a large item; 0 if all items are small."""
    processors: int
    """Multiprocessors of the device."""
    programs: tuple[int, int, int]
    """Programs that a processor runs at once: of small items, and of large ones of 64 and 128
    rows."""
    max_items_per_program: int = 4
    merges_in_attention: bool = False
    """Whether the attention kernel merges partials, and reads where those of a query are."""
    packs: bool = False
    """Whether the kernel reads packed items."""


class WorkTableBuilder:
    """Builds the work table of one layer group for each step, or extends the previous one."""

    def __init__(self, layers: LayerGroup) -> None:
        self.layers: Final = layers
        self.words: Words = np.zeros(0, dtype=np.int32)
        """The table of the current step."""
        self.large = 0
        """Rows of the large items in the table; 0 if all items are small."""
        self.num_partials = 0
        """Number of slots that the partials of this step use."""
        self.num_merges = 0
        """Number of queries with several partials."""
        self.num_built = 0
        """Number of tables that were not an extension of the previous one."""
        self._tree: PrefixTree | None = None
        self._table: WorkTable | None = None

    def update(self, plan: Plan) -> None:
        """Build or extend the table for a step."""
        has_window = self.layers.window is not None
        if (
            self._table is None
            or self._tree is not plan.tree
            or not self._table.extend(plan, has_window=has_window)
        ):
            self._table, self._tree = self._build(plan), plan.tree
            self.words = self._table.words
            self.num_partials = self._table.num_partials
            self.num_merges = self._table.num_merges
            self.num_built += 1

    @property
    def is_merged(self) -> bool:
        """Whether the step needs a merge launch, which `merges_in_attention` replaces.

        Under a window it always gets one: whether rows are cut then depends on all their lengths,
        and a recording would be missing for one case or the other.
        """
        if self.layers.merges_in_attention:
            return False
        return self.num_merges > 0 or self.layers.window is not None

    def num_programs(self, large: int) -> int:
        """Return the programs that share the large items of `large` rows, or (0) the small ones."""
        return self.layers.processors * self.layers.programs[large // 64]

    def _large_rows(self, most: int) -> int:
        """Return the rows of large items if a range has at most `most` rows."""
        layers = self.layers
        # A large tile costs the same for any number of used rows, so it is kept small.
        return min(layers.large, 64 if most <= 64 else 128) if most > layers.small else 0

    def _lengths(self, tiles: QueryTiles) -> Integers:
        """Return the chunk length of each tile; items of each size have their own programs."""
        lengths = np.zeros(len(tiles.first), dtype=np.int64)
        for large in {0, self.large}:
            chosen = tiles.is_large == (large > 0)
            if chosen.any():
                of_size = select(tiles, chosen)
                target = self._target(of_size, self.num_programs(large))
                lengths[chosen] = chunk_lengths(of_size, target)
        return lengths

    def _target(self, tiles: QueryTiles, programs: int) -> float:
        """Return the cost of an item for which the programs should finish first.

        Many short items balance the programs, few long ones start less often and fill whole
        rounds. Only a step of few items is sensitive to it.
        """
        layers = self.layers
        cost = float(((tiles.end - tiles.begin + ITEM_OVERHEAD_TOKENS) * tiles.cost).sum())
        most = layers.max_items_per_program
        targets = [cost * layers.kv_heads / (programs * count) for count in range(most, 0, -1)]
        if len(tiles.first) * layers.kv_heads > FEW_ROUNDS * programs:
            return targets[0]
        return min(targets, key=lambda target: self._duration(tiles, target, programs))

    def _duration(self, tiles: QueryTiles, target: float, programs: int) -> float:
        """Return the estimated time of the step for a target cost of an item."""
        tokens = tiles.end - tiles.begin
        length = chunk_lengths(tiles, target)
        chunks = -(-tokens // length)
        cost = np.repeat((np.minimum(length, tokens) + ITEM_OVERHEAD_TOKENS) * tiles.cost, chunks)
        at_once = max(1, programs // self.layers.kv_heads)
        return duration(cost[longest_first(cost)], at_once)

    def _packed(self, kv_ranges: KVRanges, plan: Plan) -> KVRanges:
        """Pack short private ranges as far as their items exceed the programs of a launch."""
        layers = self.layers
        units = plan.num_rows * layers.kv_heads
        max_rows = min(layers.small // layers.group, -(-units // self.num_programs(0)))
        if not layers.packs or layers.window is not None or max_rows < 2:
            return kv_ranges
        return pack_ranges(kv_ranges, plan, max_rows)

    def _build(self, plan: Plan) -> WorkTable:
        layers = self.layers
        kv_ranges = self._packed(list_ranges(plan, layers.window), plan)
        num_queries = kv_ranges.num_queries
        self.large = self._large_rows(int(num_queries.max()) * layers.group)
        is_large = (num_queries * layers.group > layers.small) & (self.large > 0)
        rows = np.where(is_large, max(self.large, layers.small), layers.small)
        tiles = cut_queries(kv_ranges, is_large, rows // layers.group, self.large)
        items, chunks = cut_ranges(kv_ranges, tiles, self._lengths(tiles), plan.block_size)
        slots, merges = assign_partial_slots(kv_ranges, tiles, chunks, plan.num_queries)
        is_merged = slots[items[:, ItemField.ENTRY]] >= 0
        items[:, ItemField.CHUNK] = np.where(is_merged, items[:, ItemField.CHUNK], -1)
        factor: Reals = np.where(items[:, ItemField.IS_LARGE], tiles.large_cost, 1.0)
        cost: Reals = factor * (items[:, ItemField.NUM_KV] + ITEM_OVERHEAD_TOKENS)
        # Large items precede small ones.
        cost += np.where(items[:, ItemField.IS_LARGE], cost.max(), 0.0)
        items = items[longest_first(cost)]
        partials = _query_partials(plan, merges) if layers.merges_in_attention else NO_PARTIALS
        return _write_table(plan, kv_ranges, items, merges, slots, partials)


def _query_partials(plan: Plan, merges: Integers) -> Integers:
    """Return the first slot and the number of partials of each query, 0 without a merge."""
    partials = np.zeros((plan.num_queries, QUERY_PARTIALS_SIZE), dtype=np.int64)
    partials[merges[:, 0]] = merges[:, 1:]
    return partials


def _write_table(
    plan: Plan,
    kv_ranges: KVRanges,
    items: Integers,
    merges: Integers,
    slots: Integers,
    partials: Integers,
) -> WorkTable:
    """Write the words of a table.

    Args:
        plan: Of the step.
        kv_ranges: What is read.
        items: [I, ITEM_SIZE] in their final order.
        merges: [M, MERGE_SIZE].
        slots: [E] first slot of each entry, or -1.
        partials: [T, QUERY_PARTIALS_SIZE], or empty if attention does not merge.
    """
    queries, pages = kv_ranges.queries, kv_ranges.pages
    range_of = np.searchsorted(kv_ranges.entry, items[:, ItemField.ENTRY], side="right") - 1
    owners, packs = _page_owners(plan, kv_ranges, items, range_of)
    sections: tuple[NDArray[Any], ...] = (items, merges, queries, slots, partials, pages, owners)
    offsets = np.cumsum([HEADER_SIZE, *(section.size for section in sections)]).tolist()
    words = np.zeros(offsets[-1], dtype=np.int32)
    for section, (begin, end) in zip(sections, pairwise(offsets), strict=True):
        words[begin:end] = section.reshape(-1)
    words[TableHeader.NUM_ITEMS], words[TableHeader.ITEMS] = len(items), offsets[0]
    words[TableHeader.NUM_MERGES], words[TableHeader.MERGES] = len(merges), offsets[1]
    words[TableHeader.ENTRY_QUERIES], words[TableHeader.ENTRY_SLOTS] = offsets[2], offsets[3]
    words[TableHeader.QUERY_PARTIALS], words[TableHeader.PAGES] = offsets[4], offsets[5]
    words[TableHeader.NUM_LARGE] = int(items[:, ItemField.IS_LARGE].sum())
    words[TableHeader.PAGE_OWNERS] = offsets[6]
    row_of = np.where(kv_ranges.num_packed > 0, -1, kv_ranges.row)[range_of]
    return WorkTable(
        words=words,
        items=words[offsets[0] : offsets[1]].reshape(-1, ITEM_SIZE),
        pages=words[offsets[5] : offsets[6]],
        owners=words[offsets[6] :],
        num_merges=len(merges),
        num_partials=int(merges[:, 2].sum()),
        tails=_row_tails(plan, kv_ranges, items, row_of),
        packs=packs,
        floor=items[:, ItemField.FLOOR],
        row_of=np.maximum(row_of, 0),
    )


def _page_owners(
    plan: Plan, kv_ranges: KVRanges, items: Integers, range_of: Integers
) -> tuple[Integers, PackedRows]:
    """Return the words of the pages of packed items, and where their rows end.

    The items are changed: `OWNERS` of packed ones.
    """
    packed = np.flatnonzero(kv_ranges.num_packed[range_of])
    leaders, sizes = (values[range_of[packed]] for values in (kv_ranges.row, kv_ranges.num_packed))
    rows = ranges(leaders, sizes)
    place = ranges(np.zeros_like(sizes), sizes)
    item = np.repeat(packed, sizes)
    used = items[packed, ItemField.NUM_KV] // plan.block_size
    capacity = used + sizes * SPARE_BLOCKS
    first = np.cumsum(capacity) - capacity
    items[packed, ItemField.OWNERS] = first
    num_kv = plan.kv_len[rows] - plan.tree.private_start_block[rows] * plan.block_size
    num_pages = -(-num_kv // plan.block_size)
    # The pages of the rows of an item follow each other.
    before = np.cumsum(num_pages) - num_pages
    start = np.repeat(first, sizes) + before - np.repeat(before[np.cumsum(sizes) - sizes], sizes)
    owners = np.zeros(int(capacity.sum()), dtype=np.int64)
    owners[ranges(start, num_pages)] = np.repeat(place * OWNER + plan.block_size, num_pages)
    last = start + num_pages - 1
    owners[last] = place * OWNER + num_kv - (num_pages - 1) * plan.block_size
    page = items[item, ItemField.PAGE]
    return owners, PackedRows(
        rows=rows,
        place=place,
        item=item,
        last=last,
        page_shift=page - np.repeat(first, sizes),
        blocks=-(-plan.kv_len[rows] // plan.block_size),
        used=dict(zip(packed.tolist(), (first + used).tolist(), strict=True)),
        end=dict(zip(packed.tolist(), (first + capacity).tolist(), strict=True)),
    )


def _row_tails(plan: Plan, kv_ranges: KVRanges, items: Integers, row_of: Integers) -> RowTails:
    """Return where private ranges end; `row_of` is negative for shared and packed ranges."""
    # The chunks of a row are in any order: the last one is the one that begins last.
    private = np.flatnonzero(row_of >= 0)
    offset, page = items[private, ItemField.OFFSET], items[private, ItemField.PAGE]
    private = private[np.lexsort((offset, page, row_of[private]))]
    of_row = np.flatnonzero((kv_ranges.row >= 0) & (kv_ranges.num_packed == 0))
    rows = kv_ranges.row[of_row]
    last = private[np.searchsorted(row_of[private], rows, side="right") - 1]
    return RowTails(
        rows=rows,
        kv_len=plan.kv_len,
        blocks=-(-plan.kv_len // plan.block_size),
        last_item=last,
        num_kv=items[last, ItemField.NUM_KV],
        page=kv_ranges.page[of_row] - kv_ranges.begin[of_row],
    )
