"""Divide the attention of a step into work items of about the same duration, and order the items.

The queries of a KV range are cut into tiles, and the tokens that a tile reads into chunks. A work
item is one chunk of one tile. Each item writes one partial per query, to a slot of that query. A
query that reads several ranges has one *entry* in each of them.

Out of scope: the encoding of items as words of the table.

Invariants: the items of a query cover each position that the query sees exactly once. The slots of
a query are consecutive.

Shapes: R rows - S ranges - E entries - T queries.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...planning.plan import Plan
from ...planning.prefix_tree import Blocks, Integers
from .table import ITEM_SIZE, NO_LIMIT, SPARE_BLOCKS, ItemField, ranges

CHUNK_UNIT: Final = 64
"""Chunks begin at multiples of this, so that no tile of keys is cut."""
MIN_CHUNK_TOKENS: Final = 128
"""Lower bound of the target length of chunks: a shorter chunk takes longer to start than to read.
Rounding can make the chunks of a range up to a quarter shorter, and its last chunk as short as one
token."""
MIN_CHUNK_TOKENS_PER_QUERY: Final = 16
"""The same bound per query of a tile: a partial costs as much as reading 8 tokens."""
ITEM_OVERHEAD_TOKENS: Final = 32
"""Cost of starting and ending an item, in tokens of reading."""


class KVRanges(NamedTuple):
    """The shared ranges of a plan, followed by the private range of each row."""

    num_shared: int
    begin: Integers
    """First block, [S]."""
    num_kv: Integers
    """Tokens, [S]."""
    num_queries: Integers
    """Queries that read the range, [S]."""
    is_private: NDArray[np.bool_]
    window: int | None
    entry: Integers
    """First entry of each range, [S]."""
    queries: Integers
    """Query of each entry, [E]."""
    page: Integers
    """First page of each range, as an index into `pages`, [S]."""
    pages: Blocks
    """Blocks of all ranges, concatenated."""


class QueryTiles(NamedTuple):
    """Tiles of consecutive queries of one range. Arrays have one element per tile."""

    range_of: Integers
    first: Integers
    """First query, as an index into the range's queries."""
    num_queries: Integers
    widest: Integers
    """Queries of the widest tile of the same range, which is its first tile."""
    is_large: NDArray[np.bool_]
    begin: Integers
    """First token that one of the queries sees, rounded down to CHUNK_UNIT."""
    end: Integers
    """Token after the last one that one of the queries sees."""


def list_ranges(plan: Plan, window: int | None) -> KVRanges:
    """Return the KV ranges of a plan and their queries."""
    tree, size = plan.tree, plan.block_size
    blocks = -(-plan.kv_len // size)
    if window is None:
        num_rows = tree.end - tree.first
        rows = tree.row_order[ranges(tree.first, num_rows)]
        range_of = np.repeat(np.arange(len(tree.first)), num_rows)
        # The block table of any row of a shared range contains the blocks of the range.
        table_rows, begin, end = tree.row_order[tree.first], tree.begin_block, tree.end_block
        private = tree.private_start_block
    else:
        # Windows of different rows differ, so nothing is shared.
        rows = range_of = table_rows = begin = end = np.zeros(0, dtype=np.int64)
        private = np.maximum(plan.kv_len - plan.num_new - window + 1, 0) // size
    num_shared = len(begin)
    num_sharing = np.bincount(range_of, weights=plan.num_new[rows], minlength=num_shared)
    num_queries = np.concatenate((num_sharing.astype(np.int64), plan.num_new))
    queries = np.concatenate(
        (ranges(plan.query_start[rows], plan.num_new[rows]), np.arange(plan.num_queries))
    )
    table_rows = np.concatenate((table_rows, np.arange(plan.num_rows)))
    first = np.concatenate((begin, private))
    num_pages = np.concatenate((end - begin, blocks - private + SPARE_BLOCKS))
    tables = plan.tables
    if (missing := int(blocks.max()) + SPARE_BLOCKS - tables.shape[1]) > 0:
        tables = np.pad(tables, ((0, 0), (0, missing)))
    positions = ranges(table_rows * tables.shape[1] + first, num_pages)
    return KVRanges(
        num_shared=num_shared,
        begin=first,
        num_kv=np.concatenate(((end - begin) * size, plan.kv_len - private * size)),
        num_queries=num_queries,
        is_private=np.arange(len(first)) >= num_shared,
        window=window,
        entry=np.cumsum(num_queries) - num_queries,
        queries=queries,
        page=np.cumsum(num_pages) - num_pages,
        pages=tables.reshape(-1)[positions],
    )


def select(tiles: QueryTiles, chosen: NDArray[np.bool_]) -> QueryTiles:
    """Return the tiles that are chosen."""
    return QueryTiles(
        range_of=tiles.range_of[chosen],
        first=tiles.first[chosen],
        num_queries=tiles.num_queries[chosen],
        widest=tiles.widest[chosen],
        is_large=tiles.is_large[chosen],
        begin=tiles.begin[chosen],
        end=tiles.end[chosen],
    )


def cut_queries(
    kv_ranges: KVRanges, is_large: NDArray[np.bool_], max_queries: Integers
) -> QueryTiles:
    """Cut the queries of each range into tiles.

    Args:
        kv_ranges: The ranges that the tiles read.
        is_large: [S] whether the tiles of a range are large.
        max_queries: [S] maximum queries of a tile.
    """
    num = kv_ranges.num_queries
    count = -(-num // max_queries)
    range_of = np.repeat(np.arange(len(num)), count)
    first = ranges(np.zeros_like(count), count) * max_queries[range_of]
    num_queries = np.minimum(max_queries[range_of], num[range_of] - first)
    end = kv_ranges.num_kv[range_of]
    begin = np.zeros_like(end)
    # A private range ends with the tokens of its own queries, so query j of a tile is the token
    # `position + j` of the range. It sees no later token, and under a window none that is
    # `window` or more tokens earlier.
    position = end - num[range_of] + first
    end = np.where(kv_ranges.is_private[range_of], position + num_queries, end)
    if kv_ranges.window is not None:
        begin = np.maximum(position - kv_ranges.window + 1, 0) // CHUNK_UNIT * CHUNK_UNIT
    return QueryTiles(
        range_of=range_of,
        first=first,
        num_queries=num_queries,
        widest=np.minimum(max_queries, num)[range_of],
        is_large=is_large[range_of],
        begin=begin,
        end=end,
    )


def chunk_lengths(tiles: QueryTiles, target: float) -> Integers:
    """Return the chunk length of each tile with which an item costs about `target` tokens."""
    tokens = tiles.end - tiles.begin
    # `widest` is the same for all tiles of a shared range, so their chunks are equal.
    shortest = np.maximum(MIN_CHUNK_TOKENS, tiles.widest * MIN_CHUNK_TOKENS_PER_QUERY)
    target_length = np.maximum(target, shortest)
    chunks = np.maximum(1, np.rint(tokens / target_length)).astype(np.int64)
    lengths: Integers = -(-tokens // (chunks * CHUNK_UNIT)) * CHUNK_UNIT
    return lengths


def cut_ranges(
    kv_ranges: KVRanges, tiles: QueryTiles, length: Integers, block_size: int
) -> tuple[Integers, Integers]:
    """Return one item per chunk of `length` tokens of each tile.

    Returns:
        The items, [I, ITEM_SIZE], and the number of chunks of each tile.
    """
    chunks = -(-(tiles.end - tiles.begin) // length)
    tile = np.repeat(np.arange(len(chunks)), chunks)
    chunk = ranges(np.zeros_like(chunks), chunks)
    begin = tiles.begin[tile] + chunk * length[tile]
    end = np.minimum(begin + length[tile], tiles.end[tile])
    range_of, first = tiles.range_of[tile], tiles.first[tile]
    # The first key after the ones that the item's first query sees, counted from the chunk.
    limit = kv_ranges.num_kv[range_of] - kv_ranges.num_queries[range_of] + first + 1 - begin
    items = np.zeros((len(tile), ITEM_SIZE), dtype=np.int64)
    items[:, ItemField.ENTRY] = kv_ranges.entry[range_of] + first
    items[:, ItemField.NUM_QUERIES] = tiles.num_queries[tile]
    items[:, ItemField.PAGE] = kv_ranges.page[range_of] + begin // block_size
    items[:, ItemField.OFFSET] = begin % block_size
    items[:, ItemField.NUM_KV] = end - begin
    items[:, ItemField.CHUNK] = chunk
    is_causal = kv_ranges.is_private[range_of] & (kv_ranges.num_queries[range_of] > 1)
    items[:, ItemField.LIMIT] = np.where(is_causal, limit, NO_LIMIT)
    if kv_ranges.window is not None:
        items[:, ItemField.FLOOR] = limit - kv_ranges.window
    items[:, ItemField.IS_LARGE] = tiles.is_large[tile]
    return items, chunks


def assign_partial_slots(
    kv_ranges: KVRanges, tiles: QueryTiles, chunks: Integers, num_queries: int
) -> tuple[Integers, Integers]:
    """Assign slots to the partials of each query that has several.

    Returns:
        The first slot of each entry, [E], -1 if its query has one partial; and the merges, each as
        query, first slot and number of partials.
    """
    partials = np.repeat(chunks, tiles.num_queries)
    weights = np.bincount(kv_ranges.queries, weights=partials, minlength=num_queries)
    count = weights.astype(np.int64)
    merged = np.flatnonzero(count > 1)
    num_slots = np.where(count > 1, count, 0)
    begin = np.cumsum(num_slots) - num_slots
    order = np.argsort(kv_ranges.queries, kind="stable")
    before = np.cumsum(partials[order]) - partials[order]
    # Subtracting the number of the query's first partial gives the number within the query.
    queries = kv_ranges.queries[order]
    first = np.cumsum(count) - count
    slots = np.empty_like(partials)
    slots[order] = np.where(count[queries] > 1, begin[queries] + before - first[queries], -1)
    return slots, np.stack((merged, begin[merged], count[merged]), axis=1)


def longest_first(cost: Integers) -> Integers:
    """Return the items in order of decreasing cost."""
    order: Integers = np.argsort(-cost, kind="stable")
    return order


def duration(cost: Integers, at_once: int) -> float:
    """Return the time in which programs finish items, if a free program takes the next one.

    Args:
        cost: Cost of each item, in order.
        at_once: Items that run at the same time.
    """
    ends = cost[:at_once].tolist()
    heapify(ends)
    for each in cost[at_once:].tolist():
        heapreplace(ends, ends[0] + each)
    return float(max(ends))
