"""Find the prefix tree of block tables: which rows share which ranges of blocks.

Rows are sorted by their block tables, so rows with a common prefix are neighbours. The number
of blocks that each row has in common with the next one defines the whole tree: its nodes are
the intervals of this list (Abouelhoda et al. 2004, for suffix arrays). The cost is one sort and
one comparison of neighbours, a few array operations for any number of rows and levels.

A node becomes a shared range only if sharing saves more than it costs. A shared range is read
once instead of once per row. With more than `ridge` queries the computation takes longer than the
read, so sharing saves less: a read for q queries counts as max(1, q / `ridge`) reads. The cost is
one work item, plus one partial to merge for each query of the range. Both are measured in tokens
read. FastTree (MLSys'25) and PAT (ASPLOS'26) use the same rule. If a node does not become a
shared range, each of its children reads the node's blocks.

Out of scope: queries, except their number per row.

Invariants: the shared ranges of a row are contiguous from its first block on, and its private
range starts where they end (`private_start_block`).

Shapes: R rows - N shared ranges - W blocks of the widest table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Blocks = NDArray[np.int32]

MIN_SAVED_TOKENS: Final = 128
PARTIAL_TOKENS: Final = 4


class SplitCost(NamedTuple):
    """The cost of a shared range. It decides whether a node of the tree becomes one."""

    min_saved: int = MIN_SAVED_TOKENS
    """Tokens of reading that a shared range must save; 0 shares wherever possible."""
    partial_tokens: float = PARTIAL_TOKENS
    """Tokens of reading that one more partial of a query costs."""
    ridge: float = float("inf")
    """Number of queries for which the computation of a range takes as long as its read. With more
    queries, the computation takes longer."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """The ranges of blocks that several rows share. Parents precede their children."""

    row_order: Integers
    """Rows, ordered so that the rows of every shared range are neighbours, [R]."""
    first: Integers
    """Position in `row_order` of the first row of each range, [N]."""
    end: Integers
    """Position in `row_order` after the last row of each range, [N]."""
    begin_block: Integers
    """First block of each range, as an index into the tables of its rows, [N]."""
    end_block: Integers
    """Block after the last block of each range, [N]."""
    private_start_block: Integers
    """First block of each row that no other row reads with it, [R]."""

    def equals(self, other: PrefixTree) -> bool:
        """Return whether the trees have the same ranges and rows."""
        return all(
            np.array_equal(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        )


def build_prefix_tree(
    tables: Blocks, limits: Integers, num_new: Integers, cost: SplitCost, *, block_size: int
) -> PrefixTree:
    """Return the ranges that rows share.

    Args:
        tables: [R, W] blocks of each row.
        limits: [R] number of blocks of each row that other rows may share.
        num_new: [R] queries of each row.
        cost: Decides which ranges are shared.
        block_size: Tokens of a block.
    """
    num_rows = len(limits)
    width = int(limits.max())
    if num_rows == 1 or not width:
        order, common = np.arange(num_rows), np.zeros(num_rows - 1, dtype=np.int64)
        return _split(order, common, num_new, cost, block_size)
    least = int(limits.min())
    same = (tables[:, :least] == tables[0, :least]).all(axis=0)
    root = int(_num_leading(same[None])[0])
    # The prefix common to all rows does not affect their order. Block ids are shifted by 1, and
    # entries after a row's limit are 0, so that a prefix precedes its extensions. Each row becomes
    # one big-endian byte string, so that one call compares two rows.
    words = tables[:, root:width].astype(np.uint32)
    words += 1
    words[:, least - root :][np.arange(least, width) >= limits[:, None]] = 0
    text, size = words.astype(">u4").tobytes(), 4 * (width - root)
    keys = [text[at : at + size] for at in range(0, len(text), size)] if size else [b""] * num_rows
    order = np.array(sorted(range(num_rows), key=keys.__getitem__))
    words, sorted_limits = words[order], limits[order]
    same = words[1:] == words[:-1]
    common = root + _num_leading(same)
    np.minimum(common, np.minimum(sorted_limits[1:], sorted_limits[:-1]), out=common)
    return _split(order, common, num_new, cost, block_size)


def _split(
    order: Integers, common: Integers, num_new: Integers, cost: SplitCost, block_size: int
) -> PrefixTree:
    """Return the shared ranges that are worth their cost.

    `common` is the argument of `_intervals`; the others are those of `build_prefix_tree`.
    """
    nodes = sorted(_intervals(common), key=itemgetter(0, 2))
    ranges = _worthwhile(nodes, num_new[order], cost, block_size) if nodes else []
    shared_blocks = np.zeros(len(order), dtype=np.int64)
    for first, end, _, end_block in ranges:
        shared_blocks[first:end] = end_block
    private_start = np.empty_like(shared_blocks)
    private_start[order] = shared_blocks
    columns = np.array(ranges, dtype=np.int64).reshape(-1, 4).T
    return PrefixTree(
        row_order=order,
        first=columns[0],
        end=columns[1],
        begin_block=columns[2],
        end_block=columns[3],
        private_start_block=private_start,
    )


def _num_leading(flags: NDArray[np.bool_]) -> Integers:
    """Return the number of leading true values in each row."""
    width = flags.shape[1]
    if not width:
        return np.zeros(len(flags), dtype=np.int64)
    leading: Integers = np.where(flags.all(axis=1), width, flags.argmin(axis=1))
    return leading


def _worthwhile(
    nodes: Sequence[tuple[int, int, int]], num_new: Integers, cost: SplitCost, block_size: int
) -> list[tuple[int, int, int, int]]:
    """Return the ranges worth a work item: first and end position, first and end block.

    Args:
        nodes: First position, end position and depth in blocks; parents before children.
        num_new: [R] queries of each row, in tree order.
        cost: See `build_prefix_tree`.
        block_size: See `build_prefix_tree`.
    """
    # `queries` and `reads` are cumulative over rows. In a decode-only step each row adds 1 to both.
    queries: Sequence[int] = range(len(num_new) + 1)
    reads: Sequence[float] = queries
    if int(num_new.max()) > 1 or cost.ridge < 1:
        queries = [0, *np.cumsum(num_new).tolist()]
        reads = [0.0, *np.cumsum(np.maximum(1, num_new / cost.ridge)).tolist()]
    ranges: list[tuple[int, int, int, int]] = []
    # Ancestors of the current node: end position, and first block that is not yet shared.
    ancestors: list[tuple[int, int]] = []
    for first, end, depth in nodes:
        while ancestors and ancestors[-1][0] <= first:
            ancestors.pop()
        begin = ancestors[-1][1] if ancestors else 0
        num = queries[end] - queries[first]
        # Rounding gives a tiny negative number where nothing is saved.
        saved = max(0.0, reads[end] - reads[first] - max(1.0, num / cost.ridge))
        price = cost.min_saved + cost.partial_tokens * num if cost.min_saved else 0
        if saved * (depth - begin) * block_size >= price:
            ranges.append((first, end, begin, depth))
            begin = depth
        ancestors.append((end, begin))
    return ranges


def _intervals(common: Integers) -> Iterator[tuple[int, int, int]]:
    """Yield the nodes of the tree: first position, end position, depth in blocks.

    Args:
        common: Blocks that each row has in common with the next, in sorted order.
    """
    open_nodes: list[tuple[int, int]] = [(0, 0)]
    # No node begins or ends where the value is the same as at the position before.
    positions = np.flatnonzero(common[1:] != common[:-1]) + 1
    depths = [*common[:1].tolist(), *common[positions].tolist()]
    for position, depth in zip([0, *positions.tolist()], depths, strict=False):
        first = position
        while open_nodes[-1][1] > depth:
            first, deeper = open_nodes.pop()
            yield first, position + 1, deeper
        if open_nodes[-1][1] < depth:
            open_nodes.append((first, depth))
    while len(open_nodes) > 1:
        first, depth = open_nodes.pop()
        yield first, len(common) + 1, depth
