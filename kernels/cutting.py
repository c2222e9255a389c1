"""Cuts what rows read into items that take about the same time, and deals them out.

The queries of a stretch are cut into tiles, and what a tile reads into chunks: each pair is an
item. Every part of a query gets a slot to write to.

Knows plans and sizes, no table. Kept true: the items of a query cover each position it may see
exactly once, and the slots of its parts are neighbours.

Shapes: R rows - S stretches - E entries - T queries.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .plan import Plan
from .table import ITEM_SIZE, NO_LIMIT, SPARE_BLOCKS, Field, ranges
from .tree import Integers

Reals = NDArray[np.float64]

CHUNK_UNIT: Final = 64
"""Chunks begin at multiples of this: no tile of keys is cut."""
CHUNK_TOKENS: Final = 128
"""A chunk is no shorter, or its launch takes longer than its reading."""
CHUNK_TOKENS_PER_QUERY: Final = 16
"""Nor shorter than this for each query: a part costs as much as reading half of it."""
RIDGE_ROWS: Final = 96
"""Rows from which on multiplying takes longer than reading: 400 TFLOP/s at 4.3 TB/s."""
ITEM_TOKENS: Final = 32
"""Tokens of reading that the beginning and end of an item cost."""


class Stretches(NamedTuple):
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


class Tiles(NamedTuple):
    """Neighbouring queries of one stretch, [number of tiles] each."""

    stretch: Integers
    first: Integers
    """First query, counted in the stretch."""
    num_queries: Integers
    widest: Integers
    """Queries of the first tile of the stretch, which no other has more of."""
    is_large: NDArray[np.bool_]
    begin: Integers
    """First token that one of them sees, in units of chunks."""
    end: Integers
    cost: Reals
    """Of a token, in tokens of reading."""
    large_cost: float


def list_stretches(plan: Plan, window: int | None) -> Stretches:
    """List what is read, and by which queries."""
    tree, size = plan.tree, plan.block_size
    starts = plan.kv_len - plan.num_new
    blocks = -(-plan.kv_len // size)
    if window is None:
        rows = tree.order[ranges(tree.first, tree.end - tree.first)]
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
        (ranges(plan.query_start[rows], plan.num_new[rows]), np.arange(plan.num_queries))
    )
    leaders = np.concatenate((leaders, np.arange(plan.num_rows)))
    first = np.concatenate((begin, own))
    num_pages = np.concatenate((end - begin, blocks - own + SPARE_BLOCKS))
    tables = plan.tables
    if (missing := int(blocks.max()) + SPARE_BLOCKS - tables.shape[1]) > 0:
        tables = np.pad(tables, ((0, 0), (0, missing)))
    places = ranges(leaders * tables.shape[1] + first, num_pages)
    return Stretches(
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


def cut_queries(
    stretches: Stretches, is_large: NDArray[np.bool_], most: Integers, large: int
) -> Tiles:
    """Cut the queries of each stretch into tiles of `most`."""
    num = stretches.num_queries
    count = -(-num // most)
    stretch = np.repeat(np.arange(len(num)), count)
    first = ranges(np.zeros_like(count), count) * most[stretch]
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
    widest = np.minimum(most, num)[stretch]
    return Tiles(stretch, first, mine, widest, is_large[stretch], begin, end, cost, large_cost)


def cut_stretches(
    stretches: Stretches, tiles: Tiles, target: float, block_size: int
) -> tuple[Integers, Integers]:
    """Cut what each tile reads into items of about `target`; return them and each tile's chunks."""
    tokens = tiles.end - tiles.begin
    # All tiles of a shared stretch are cut alike, so that a query may go from one to another.
    least = np.maximum(CHUNK_TOKENS, tiles.widest * CHUNK_TOKENS_PER_QUERY)
    longest = np.maximum(target / tiles.cost, least)
    chunks = np.maximum(1, np.rint(tokens / longest)).astype(np.int64)
    length = -(-tokens // (chunks * CHUNK_UNIT)) * CHUNK_UNIT
    chunks = -(-tokens // length)

    tile = np.repeat(np.arange(len(chunks)), chunks)
    chunk = ranges(np.zeros_like(chunks), chunks)
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


def give_slots(
    stretches: Stretches, tiles: Tiles, chunks: Integers, num_queries: int
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


def deal(cost: Reals, at_once: int) -> Integers:
    """Order items longest first, every second round of `at_once` backwards."""
    order: Integers = np.argsort(-cost, kind="stable")
    place = np.arange(len(order))
    turn = place // at_once
    ends = np.minimum((turn + 1) * at_once, len(order))
    backwards = turn * at_once + ends - 1 - place
    return order[np.where(turn % 2 == 1, backwards, place)]
