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

While rows decode on, only the end of each row's last item moves: the table is patched. There
is room for `SPARE_BLOCKS` more pages of each row; then it is made anew.

Knows plans and sizes, no tensors. Kept true: for each query, its items cover each position it
may see exactly once, and its merge names the slot of each of them, or there is one and none.

Shapes: R rows - S stretches - E entries - T queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .plan import Plan
from .tree import Integers, Tree

Words = NDArray[np.int32]
Reals = NDArray[np.float64]


class Header(IntEnum):
    """Where a table says what it holds; offsets count from its beginning."""

    NUM_ITEMS = 0
    ITEMS = 1
    ENTRY_QUERIES = 2
    ENTRY_SLOTS = 3
    PAGES = 4
    NUM_MERGES = 5
    MERGES = 6


HEADER_SIZE: Final = 16


class Field(IntEnum):
    """The words of an item."""

    ENTRY = 0
    """Its first entry; the others follow."""
    NUM_QUERIES = 1
    PAGE = 2
    """Its first page, counted in the pages of the table."""
    OFFSET = 3
    """Its first token, counted in that page."""
    NUM_KV = 4
    PART = 5
    """Number of its chunk, or -1: it is all that its queries see."""
    LIMIT = 6
    """Its query j sees the keys before LIMIT + j."""
    FLOOR = 7
    """Under a window, its query j sees the keys from FLOOR + j on."""
    IS_LARGE = 8


ITEM_SIZE: Final = 16
MERGE_SIZE: Final = 3
NO_LIMIT: Final = 2**30

CHUNK_UNIT: Final = 64
"""Chunks begin at multiples of this: no tile of keys is cut."""
CHUNK_TOKENS: Final = 128
"""A chunk is no shorter, or its launch takes longer than its reading."""
CHUNK_TOKENS_PER_QUERY: Final = 16
"""Nor shorter than this for each query: a part costs as much as reading half of it."""
ITEMS_PER_PROGRAM: Final = 4
PROGRAMS: Final = {0: 3, 64: 2, 128: 1}
"""Programs that a processor runs at once, by the rows of large items: what registers allow."""
RIDGE_ROWS: Final = 96
"""Rows from which on multiplying takes longer than reading: 400 TFLOP/s at 4.3 TB/s."""
ITEM_TOKENS: Final = 32
"""Tokens of reading that the beginning and end of an item cost."""
SPARE_BLOCKS: Final = 4
"""Blocks that a row may gain before the table is made anew."""


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
        self.num_parts = 0
        """Slots that the parts of this step take."""
        self.num_merges = 0
        self.large = 0
        """Rows of the large items in the table; 0 where there is none."""
        self.programs = 0
        """Programs that share the work."""
        self.num_built = 0
        """Tables that were not made from the one before."""
        self._tree: Tree | None = None
        self._built: _Built | None = None

    def update(self, plan: Plan) -> None:
        """Make the table of a step."""
        if self._built is None or self._tree is not plan.tree or not self._patch(plan, self._built):
            self._build(plan)
            self.num_built += 1

    def _build(self, plan: Plan) -> None:
        kind = self.kind
        stretches = _stretches(plan, kind.window)
        rows = stretches.num_queries * kind.group
        most = int(rows.max())
        # A large tile costs the same for all its rows: no larger than there is use for.
        self.large = min(kind.large, 64 if most <= 64 else 128) if most > kind.small else 0
        self.programs = kind.processors * PROGRAMS[self.large]
        tiles = _tiles(stretches, kind, self.large)
        units = self.programs * ITEMS_PER_PROGRAM
        items, chunks = _items(stretches, tiles, units / kind.kv_heads, plan.block_size)
        slots, merges = _slots(stretches, tiles, chunks, plan.num_queries)
        is_merged = slots[items[:, Field.ENTRY]] >= 0
        items[:, Field.PART] = np.where(is_merged, items[:, Field.PART], -1)
        factor: Reals = np.where(items[:, Field.IS_LARGE], tiles.large_cost, 1.0)
        cost: Reals = factor * items[:, Field.NUM_KV]
        order = _deal(cost, max(1, self.programs // kind.kv_heads))
        items = items[order]
        self.num_merges, self.num_parts = len(merges), int(merges[:, 2].sum())
        parts = (items.reshape(-1), merges.reshape(-1), stretches.queries, slots, stretches.pages)
        offsets = np.cumsum([HEADER_SIZE, *(len(part) for part in parts)]).tolist()
        table = np.zeros(offsets[-1], dtype=np.int32)
        for begin, part in zip(offsets[:-1], parts, strict=True):
            table[begin : begin + len(part)] = part
        table[Header.NUM_ITEMS], table[Header.NUM_MERGES] = len(items), len(merges)
        table[Header.ITEMS], table[Header.MERGES] = offsets[0], offsets[1]
        table[Header.ENTRY_QUERIES], table[Header.ENTRY_SLOTS] = offsets[2], offsets[3]
        table[Header.PAGES] = offsets[4]
        self.table, self._tree = table, plan.tree
        self._built = _Built.of(plan, stretches, items, table)

    def _patch(self, plan: Plan, built: _Built) -> bool:
        """Move the ends of all rows on; False where there is no room."""
        grown = plan.kv_len - built.kv_len
        if plan.num_queries != plan.num_rows or grown.min() < 0:
            return False
        blocks = -(-plan.kv_len // plan.block_size)
        gained = blocks - built.blocks
        if int(gained.max()) > SPARE_BLOCKS:
            return False
        items = built.items
        items[built.last, Field.NUM_KV] = built.num_kv + grown
        if self.kind.window is not None:
            items[:, Field.FLOOR] = built.floor + grown[built.row_of]
        rows = np.flatnonzero(gained)
        if len(rows):
            index = _ranges(built.blocks[rows], gained[rows])
            owner = np.repeat(rows, gained[rows])
            at = built.pages[owner] + index
            self.table[at] = plan.tables[owner, index]
        return True


@dataclass(slots=True)
class _Built:
    """What a patch needs to know of the table as it was made."""

    kv_len: Integers
    blocks: Integers
    """Blocks of each row."""
    items: Words
    """The items in the table, [I, ITEM_SIZE]."""
    last: Integers
    """The item of each row's last token, [R]."""
    num_kv: Integers
    """What those had to read, [R]."""
    floor: Integers
    """Of each item."""
    row_of: Integers
    """Row of each item; of shared stretches, any."""
    pages: Integers
    """Where in the table the page of block 0 of each row would stand, [R]."""

    @staticmethod
    def of(plan: Plan, stretches: _Stretches, items: Integers, table: Words) -> _Built:
        begin = int(table[Header.ITEMS])
        view = table[begin : begin + items.size].reshape(items.shape)
        num_rows, num_shared = plan.num_rows, len(stretches.begin) - plan.num_rows
        stretch = np.searchsorted(stretches.entry, items[:, Field.ENTRY], side="right") - 1
        row_of = np.maximum(stretch - num_shared, 0)
        # Chunks of a row are in any order: its last is the one that begins last.
        own = np.flatnonzero(stretch >= num_shared)
        own = own[np.lexsort((items[own, Field.OFFSET], items[own, Field.PAGE], row_of[own]))]
        ends = np.searchsorted(row_of[own], np.arange(num_rows), side="right") - 1
        last = own[ends]
        pages = stretches.page[num_shared:] + table[Header.PAGES]
        return _Built(
            kv_len=plan.kv_len,
            blocks=-(-plan.kv_len // plan.block_size),
            items=view,
            last=last,
            num_kv=items[last, Field.NUM_KV],
            floor=items[:, Field.FLOOR],
            row_of=row_of,
            pages=pages - stretches.begin[num_shared:],
        )


class _Stretches(NamedTuple):
    """Shared stretches, then what remains of each row."""

    begin: Integers
    """First block, [S]."""
    num_kv: Integers
    """Tokens, [S]."""
    num_queries: Integers
    is_own: NDArray[np.bool_]
    window: int | None
    entry: Integers
    """First entry of each stretch, [S]."""
    queries: Integers
    """Query of each entry, [E]."""
    page: Integers
    """First page of each stretch, [S]."""
    pages: Integers


class _Tiles(NamedTuple):
    """Neighbouring queries of one stretch, [number of tiles] each."""

    stretch: Integers
    first: Integers
    """First query, counted in the stretch."""
    num_queries: Integers
    is_large: NDArray[np.bool_]
    begin: Integers
    """First token that one of them sees, in units of chunks."""
    end: Integers
    cost: Reals
    """Of a token, in tokens of reading."""
    large_cost: float


def _stretches(plan: Plan, window: int | None) -> _Stretches:
    """List what is read, and by which queries."""
    tree, size = plan.tree, plan.block_size
    starts = plan.kv_len - plan.num_new
    blocks = -(-plan.kv_len // size)
    if window is None:
        rows = tree.order[_ranges(tree.first, tree.end - tree.first)]
        owners = np.repeat(np.arange(len(tree.first)), tree.end - tree.first)
        leaders, begin, end, own = (
            tree.order[tree.first],
            tree.begin_block,
            tree.end_block,
            tree.own,
        )
    else:
        # The window of each row moves on its own.
        rows = owners = leaders = begin = end = np.zeros(0, dtype=np.int64)
        own = np.maximum(starts - window + 1, 0) // size
    num_shared = len(begin)
    shared = np.bincount(owners, weights=plan.num_new[rows], minlength=num_shared)
    num_queries = np.concatenate((shared.astype(np.int64), plan.num_new))
    queries = np.concatenate(
        (_ranges(plan.query_start[rows], plan.num_new[rows]), np.arange(plan.num_queries))
    )
    leaders = np.concatenate((leaders, np.arange(plan.num_rows)))
    first = np.concatenate((begin, own))
    num_pages = np.concatenate((end - begin, blocks - own + SPARE_BLOCKS))
    tables = plan.tables
    if (missing := int(blocks.max()) + SPARE_BLOCKS - tables.shape[1]) > 0:
        tables = np.pad(tables, ((0, 0), (0, missing)))
    places = _ranges(leaders * tables.shape[1] + first, num_pages)
    return _Stretches(
        begin=first,
        num_kv=np.concatenate(((end - begin) * size, plan.kv_len - own * size)),
        num_queries=num_queries,
        is_own=np.arange(len(first)) >= num_shared,
        window=window,
        entry=np.cumsum(num_queries) - num_queries,
        queries=queries,
        page=np.cumsum(num_pages) - num_pages,
        pages=tables.reshape(-1)[places],
    )


def _tiles(stretches: _Stretches, kind: Kind, large: int) -> _Tiles:
    """Cut the queries of each stretch."""
    num = stretches.num_queries
    is_large = (num * kind.group > kind.small) & (large > 0)
    most = np.where(is_large, max(large, kind.small) // kind.group, kind.small // kind.group)
    count = -(-num // most)
    stretch = np.repeat(np.arange(len(num)), count)
    first = _ranges(np.zeros_like(count), count) * most[stretch]
    mine = np.minimum(most[stretch], num[stretch] - first)
    end = stretches.num_kv[stretch]
    begin = np.zeros_like(end)
    # What a row's own queries see ends with each, and under a window begins with the first.
    seen = end - num[stretch] + first
    is_own = stretches.is_own[stretch]
    end = np.where(is_own, seen + mine, end)
    if stretches.window is not None:
        begin = np.maximum(seen - stretches.window + 1, 0) // CHUNK_UNIT * CHUNK_UNIT
    large_cost = max(1.0, large / RIDGE_ROWS)
    cost = np.where(is_large[stretch], large_cost, 1.0)
    return _Tiles(stretch, first, mine, is_large[stretch], begin, end, cost, large_cost)


def _items(
    stretches: _Stretches, tiles: _Tiles, wanted: float, block_size: int
) -> tuple[Integers, Integers]:
    """Cut what each tile reads into about `wanted` items; return them and each tile's chunks."""
    tokens = tiles.end - tiles.begin
    target = float(((tokens + ITEM_TOKENS) * tiles.cost).sum()) / wanted / tiles.cost
    least = np.maximum(CHUNK_TOKENS, tiles.num_queries * CHUNK_TOKENS_PER_QUERY)
    chunks = np.maximum(1, np.rint(tokens / np.maximum(target, least))).astype(np.int64)
    length = -(-tokens // (chunks * CHUNK_UNIT)) * CHUNK_UNIT
    chunks = -(-tokens // length)

    tile = np.repeat(np.arange(len(chunks)), chunks)
    chunk = _ranges(np.zeros_like(chunks), chunks)
    begin = tiles.begin[tile] + chunk * length[tile]
    end = np.minimum(begin + length[tile], tiles.end[tile])
    stretch, first = tiles.stretch[tile], tiles.first[tile]
    seen = stretches.num_kv[stretch] - stretches.num_queries[stretch] + first + 1 - begin
    items = np.zeros((len(tile), ITEM_SIZE), dtype=np.int64)
    items[:, Field.ENTRY] = stretches.entry[stretch] + first
    items[:, Field.NUM_QUERIES] = tiles.num_queries[tile]
    items[:, Field.PAGE] = stretches.page[stretch] + begin // block_size
    items[:, Field.OFFSET] = begin % block_size
    items[:, Field.NUM_KV] = end - begin
    items[:, Field.PART] = chunk
    is_causal = stretches.is_own[stretch] & (stretches.num_queries[stretch] > 1)
    items[:, Field.LIMIT] = np.where(is_causal, seen, NO_LIMIT)
    if stretches.window is not None:
        items[:, Field.FLOOR] = seen - stretches.window
    items[:, Field.IS_LARGE] = tiles.is_large[tile]
    return items, chunks


def _slots(
    stretches: _Stretches, tiles: _Tiles, chunks: Integers, num_queries: int
) -> tuple[Integers, Integers]:
    """Give every part a slot; return the first of each entry, or -1, and the merges."""
    parts = np.repeat(chunks, tiles.num_queries)
    number = np.bincount(stretches.queries, weights=parts, minlength=num_queries).astype(np.int64)
    merged = np.flatnonzero(number > 1)
    kept = np.where(number > 1, number, 0)
    begin = np.cumsum(kept) - kept
    order = np.argsort(stretches.queries, kind="stable")
    before = np.cumsum(parts[order]) - parts[order]
    # Counted from the first part of its query on.
    queries = stretches.queries[order]
    first = np.cumsum(number) - number
    slots = np.empty_like(parts)
    slots[order] = np.where(number[queries] > 1, begin[queries] + before - first[queries], -1)
    return slots, np.stack((merged, begin[merged], number[merged]), axis=1)


def _deal(cost: Reals, at_once: int) -> Integers:
    """Order items longest first, every second round of `at_once` backwards."""
    order: Integers = np.argsort(-cost, kind="stable")
    place = np.arange(len(order))
    turn = place // at_once
    ends = np.minimum((turn + 1) * at_once, len(order))
    backwards = turn * at_once + ends - 1 - place
    return order[np.where(turn % 2 == 1, backwards, place)]


def _ranges(first: Integers, count: Integers) -> Integers:
    """Return first[i], first[i] + 1, ... count[i] times, for all i in a row."""
    before = np.cumsum(count) - count
    found: Integers = np.arange(int(count.sum())) + np.repeat(first - before, count)
    return found
