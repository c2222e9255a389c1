"""Build the work table of a step: the attention work that a persistent kernel reads on the GPU.

An item is a tile of queries and a chunk of a KV range: what one program computes at once, for
one KV head. The ranges are the shared ranges of the plan's prefix tree and the private range of
each row. Queries are cut so that, times the heads of their group, they fill the rows of a tile.
Ranges are cut so that all items take about the same time, a few for each program.
A fixed chunk length (Parrot, FastTree) fails at both ends: a few long ranges leave processors
idle, and many short chunks write more partials than they read keys. Items are ordered longest
first: programs take the next one when they are free.

The table is int32 words: merges, items of `ITEM_SIZE` words (`ItemField`), entries, partials of
each query and pages. An entry is one query of one range: the query's index, and the slot of its
first partial; chunk c of the range writes to that slot plus c. The partials of a query are
neighbours, so a merge is three words: query, first slot, number of partials. A query with a single
partial has no slot.

No word is read by all programs: on an H200, a thousand warps that read the same word wait 2 us. So
merges and items begin at fixed places, which do not depend on a step as CUDA graphs require; small
and large items alternate, so that each list has room; and an item has the index of everything that
it uses, and the number of items of its size. Places without an item or a merge follow as far as
programs read.

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
    assign_partial_slots,
    chunk_lengths,
    cut_queries,
    cut_ranges,
    duration,
    list_ranges,
    longest_first,
    select,
)
from .table import (
    ITEM_SIZE,
    MERGE_PLACES,
    MERGE_SIZE,
    QUERY_PARTIALS_SIZE,
    SIZES,
    ItemField,
    RowTails,
    Words,
    WorkTable,
)

NO_PARTIALS: Final = np.zeros((0, QUERY_PARTIALS_SIZE), dtype=np.int64)
COST: Final = {64: 0.55, 128: 1.0}
"""Time that a processor needs for one token of a large tile, by the rows of the tile, relative to
128 rows. Two programs with 64 rows share a processor. Measured on an H200 with full tiles."""
FEW_ROUNDS: Final = 8
"""Rounds of items above which the number of items of a program does not matter."""


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
    max_items_per_program: int = 2
    merges_in_attention: bool = False
    """Whether the attention kernel merges partials, and reads where those of a query are."""


class WorkTableBuilder:
    """Builds the work table of one layer group for each step, or extends the previous one."""

    def __init__(self, layers: LayerGroup) -> None:
        self.layers: Final = layers
        self.words: Words = np.zeros(0, dtype=np.int32)
        """The table of the current step."""
        self.first_item = 0
        """Index of the first item in the words. It depends on the number of merges above 256."""
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
            self.first_item = self._table.first_item
            self.num_partials = self._table.num_partials
            self.num_merges = self._table.num_merges
            self.num_built += 1

    @property
    def is_merged(self) -> bool:
        """Whether the step needs a merge launch, which `merges_in_attention` replaces.

        With a window it always does: whether queries have several partials varies from step to
        step, and each recording of a CUDA graph has a fixed number of launches.
        """
        if self.layers.merges_in_attention:
            return False
        return self.num_merges > 0 or self.layers.window is not None

    def num_programs(self, large: int) -> int:
        """Return the number of programs of items of `large` rows; 0 means the small items."""
        return self.layers.processors * self.layers.programs[large // 64]

    def _large_rows(self, kv_ranges: KVRanges) -> int:
        """Return the rows of large items with which the ranges cost least; 0 if all are small."""
        layers = self.layers
        is_large = kv_ranges.num_queries * layers.group > layers.small
        if not layers.large or not is_large.any():
            return 0
        queries, tokens = kv_ranges.num_queries[is_large], kv_ranges.num_kv[is_large]

        def cost(size: int) -> float:
            tiles = -(-queries // (size // layers.group))
            return float((tiles * tokens).sum()) * COST[size]

        return min((size for size in COST if layers.small < size <= layers.large), key=cost)

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
        """Return the target cost of an item with the shortest estimated time of the step.

        Many short items balance the programs, few long ones start less often and fill whole
        rounds. Only a step of few items is sensitive to it.
        """
        layers = self.layers
        cost = float((tiles.end - tiles.begin + ITEM_OVERHEAD_TOKENS).sum())
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
        cost = np.repeat(np.minimum(length, tokens) + ITEM_OVERHEAD_TOKENS, chunks)
        at_once = max(1, programs // self.layers.kv_heads)
        return duration(cost[longest_first(cost)], at_once)

    def _build(self, plan: Plan) -> WorkTable:
        layers = self.layers
        kv_ranges = list_ranges(plan, layers.window)
        num_queries = kv_ranges.num_queries
        self.large = self._large_rows(kv_ranges)
        is_large = (num_queries * layers.group > layers.small) & (self.large > 0)
        rows = np.where(is_large, self.large, layers.small)
        tiles = cut_queries(kv_ranges, is_large, rows // layers.group)
        items, chunks = cut_ranges(kv_ranges, tiles, self._lengths(tiles), plan.block_size)
        slots, merges = assign_partial_slots(kv_ranges, tiles, chunks, plan.num_queries)
        is_merged = slots[items[:, ItemField.ENTRY]] >= 0
        items[:, ItemField.CHUNK] = np.where(is_merged, items[:, ItemField.CHUNK], -1)
        items = items[longest_first(items[:, ItemField.NUM_KV])]
        partials = _query_partials(plan, merges) if layers.merges_in_attention else NO_PARTIALS
        programs = max(self.num_programs(0), self.num_programs(self.large))
        min_items = -(-programs // layers.kv_heads)
        return _write_table(plan, kv_ranges, items, merges, slots, partials, min_items)


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
    min_items: int,
) -> WorkTable:
    """Write the words of a table.

    Args:
        plan: Plan of the step.
        kv_ranges: What is read.
        items: [I, ITEM_SIZE] in their final order.
        merges: [M, 3] query, first slot and number of partials.
        slots: [E] first slot of each entry, or -1.
        partials: [T, QUERY_PARTIALS_SIZE], or empty if attention does not merge.
        min_items: Items of each size that programs read, whether they exist or not.
    """
    range_of = np.searchsorted(kv_ranges.entry, items[:, ItemField.ENTRY], side="right") - 1
    is_large = items[:, ItemField.IS_LARGE] != 0
    number = np.where(is_large, np.cumsum(is_large), np.cumsum(~is_large)) - 1
    place = SIZES * number + is_large
    num_items = [int((~is_large).sum()), int(is_large.sum())]
    places = np.zeros((SIZES * max(*num_items, min_items), ITEM_SIZE), dtype=np.int64)
    # A power of 2, so that steps of about as many merges fit the same recording.
    num_places = max(MERGE_PLACES, 1 << max(0, len(merges) - 1).bit_length())
    merged = np.zeros((num_places, MERGE_SIZE), dtype=np.int64)
    merged[: len(merges), : merges.shape[1]] = merges
    queries, pages = kv_ranges.queries, kv_ranges.pages
    sections: tuple[NDArray[Any], ...] = (merged, places, queries, slots, partials, pages)
    offsets = np.cumsum([0, *(section.size for section in sections)]).tolist()
    _, first_item, first_query, first_slot, first_partials, first_page, end = offsets
    places[place] = items
    places[place, ItemField.ENTRY] += first_query
    places[place, ItemField.SLOTS] = first_slot + items[:, ItemField.ENTRY]
    places[place, ItemField.PAGE] += first_page
    places[place, ItemField.QUERY_PARTIALS] = first_partials
    for size, num in enumerate(num_items):
        places[size::SIZES, ItemField.NUM_ITEMS] = num
    row_of = np.full(len(places), -1)
    row_of[place] = range_of - kv_ranges.num_shared
    words = np.zeros(end, dtype=np.int32)
    for section, (begin, after) in zip(sections, pairwise(offsets), strict=True):
        words[begin:after] = section.reshape(-1)
    return WorkTable(
        words=words,
        first_item=first_item,
        items=words[first_item:first_query].reshape(-1, ITEM_SIZE),
        pages=words[first_page:],
        num_merges=len(merges),
        num_partials=int(merges[:, 2].sum()),
        tails=_row_tails(plan, kv_ranges, places, row_of),
        floor=places[:, ItemField.FLOOR].copy(),
        row_of=np.maximum(row_of, 0),
    )


def _row_tails(plan: Plan, kv_ranges: KVRanges, items: Integers, row_of: Integers) -> RowTails:
    """Return the end of each row's private range; `row_of` is negative for shared ranges."""
    # The chunks of a row are in any order: the last one is the one that begins last.
    private = np.flatnonzero(row_of >= 0)
    offset, page = items[private, ItemField.OFFSET], items[private, ItemField.PAGE]
    private = private[np.lexsort((offset, page, row_of[private]))]
    ends = np.searchsorted(row_of[private], np.arange(plan.num_rows), side="right")
    last = private[ends - 1]
    num_shared = kv_ranges.num_shared
    return RowTails(
        kv_len=plan.kv_len,
        blocks=-(-plan.kv_len // plan.block_size),
        last_item=last,
        num_kv=items[last, ItemField.NUM_KV],
        page=kv_ranges.page[num_shared:] - kv_ranges.begin[num_shared:],
    )
