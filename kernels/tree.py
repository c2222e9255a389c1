"""Finds the tree that block tables form: which rows share which stretches of blocks.

Rows are sorted by their tables. Those that share a prefix are then neighbours, and how many
blocks each has in common with the next tells the whole tree: the intervals of this list
(Abouelhoda et al. 2004, on suffix arrays) are the nodes. So the work is one sort and one
comparison of neighbours, a few array operations for any number of rows and levels.

A node is split off as a stretch of its own only if that saves more reading than it costs.
A stretch of `n` tokens is read once instead of once by each row; past `ridge` queries a
read takes as long as computing with it, so that there is less to save. Against that stands
the price of an item, and of a part to merge for each of its queries (the rule of FastTree,
MLSys'25, and PAT, ASPLOS'26, in tokens of reading). What is not split off is read by each of
its children with their own.

Knows tables, no queries but their number. Kept true: a row's stretches follow each other from
its first block on, and what they leave begins at its `own` block.

Shapes: R rows - N stretches - W blocks of the widest table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

ITEM_TOKENS: Final = 128
PART_TOKENS: Final = 4


class Worth(NamedTuple):
    """When a stretch is worth an item of its own."""

    min_saved: int = ITEM_TOKENS
    """Tokens of reading that it must save. 0 shares wherever possible; a huge number never."""
    part_tokens: float = PART_TOKENS
    """Tokens of reading that one more part of a query costs."""
    ridge: float = float("inf")
    """Queries of one reading from which on computing takes longer than reading."""


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The stretches that several rows share. Parents come before their children."""

    order: Integers
    """Rows, so that those of every stretch are neighbours, [R]."""
    first: Integers
    """Place in `order` of the first row of each stretch, [N]."""
    end: Integers
    """Place after its last row, [N]."""
    begin_block: Integers
    """First block of each stretch, counted in its rows' tables, [N]."""
    end_block: Integers
    """Block after its last, [N]."""
    own: Integers
    """First block of each row that is in no stretch, [R]."""
    common: Integers
    """Blocks that each row of `order` has in common with the next, [R - 1]."""

    def closest(self) -> Integers:
        """Return what each row has in common with the row it shares the most with, or -1, [R]."""
        around = np.full(len(self.order) + 1, -1, dtype=np.int64)
        around[1:-1] = self.common
        found = np.empty(len(self.order), dtype=np.int64)
        found[self.order] = np.maximum(around[1:], around[:-1])
        return found


def find(
    tables: Integers, limits: Integers, num_new: Integers, worth: Worth, *, block_size: int
) -> Tree:
    """Return what rows share.

    Args:
        tables: [R, W] blocks of each row.
        limits: [R] blocks of each row that others may share.
        num_new: [R] queries of each row.
        worth: When to split a stretch off.
        block_size: Tokens of a block.
    """
    num_rows = len(limits)
    width = int(limits.max())
    if num_rows == 1 or not width:
        order, common = np.arange(num_rows), np.zeros(num_rows - 1, dtype=np.int64)
        return split(order, common, num_new, worth, block_size=block_size)
    least = int(limits.min())
    same = (tables[:, :least] == tables[0, :least]).all(axis=0)
    root = int(_num_leading(same[None])[0])
    # What all rows share tells none from another. Shifted by one, and 0 behind the limit: then
    # a prefix has words of its own. As bytes, two rows are compared in one call.
    words = tables[:, root:width].astype(np.uint32)
    words += 1
    words[:, least - root :][np.arange(least, width) >= limits[:, None]] = 0
    text, size = words.tobytes(), 4 * (width - root)
    keys = [text[at : at + size] for at in range(0, len(text), size)] if size else [b""] * num_rows
    order = np.array(sorted(range(num_rows), key=keys.__getitem__))
    words, sorted_limits = words[order], limits[order]
    same = words[1:] == words[:-1]
    common = root + _num_leading(same)
    np.minimum(common, np.minimum(sorted_limits[1:], sorted_limits[:-1]), out=common)
    return split(order, common, num_new, worth, block_size=block_size)


def split(
    order: Integers, common: Integers, num_new: Integers, worth: Worth, *, block_size: int
) -> Tree:
    """Return the stretches that are worth it, of rows in order and what neighbours share."""
    nodes = sorted(_intervals(common), key=itemgetter(0, 2))
    found = _choose(nodes, num_new[order], worth, block_size) if nodes else []
    owned = np.zeros(len(order), dtype=np.int64)
    for first, end, _, depth in found:
        owned[first:end] = depth
    own = np.empty_like(owned)
    own[order] = owned
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return Tree(order, columns[0], columns[1], columns[2], columns[3], own, common)


def without(order: Integers, common: Integers, stays: NDArray[np.bool_]) -> Integers:
    """Return what neighbours share when some rows are gone.

    Args:
        order: As in `Tree`.
        common: As in `Tree`.
        stays: [R] whether a row is still there; one is at least.
    """
    places = np.flatnonzero(stays[order])
    if len(places) < 2:
        return np.zeros(0, dtype=np.int64)
    # Rows that were apart share what all pairs between them share.
    found: Integers = np.minimum.reduceat(common[: places[-1]], places[:-1])
    return found


def insert(
    order: Integers, common: Integers, row: int, tables: Integers, limits: Integers
) -> tuple[Integers, Integers]:
    """Put one more row where it shares the most; return order and what neighbours share.

    Args:
        order: Rows that are there, as in `Tree`.
        common: As in `Tree`.
        row: The row that comes, in `tables` and `limits`.
        tables: As in `find`.
        limits: As in `find`.
    """
    mine, limit = tables[row], int(limits[row])

    def with_it(rows: Integers, begin: int) -> Integers:
        """Return what rows share with it if they share the blocks before `begin`."""
        found = begin + _num_leading(tables[rows, begin:limit] == mine[begin:limit])
        return np.minimum(found, limits[rows])

    leader = order[0]
    same = tables[leader, :limit] == mine[:limit]
    first = min(limit if same.all() else int(same.argmin()), int(limits[leader]))
    # A row that shares more or less with the first row than it does shares the smaller of both.
    of_first = np.minimum.accumulate(common)
    shared = np.concatenate(([first], np.minimum(first, of_first)))
    if first < limit:
        rows = order[1:][of_first == first]
        closer = (tables[rows, first] == mine[first]) & (limits[rows] > first)
        places = 1 + np.flatnonzero(of_first == first)[closer]
        shared[places] = with_it(order[places], first)
    # Those that share the most with it are neighbours, and those behind them share less.
    place = len(order) - int(shared[::-1].argmax())
    around = shared[place - 1 : place + 1]
    order = np.concatenate((order[:place], [row], order[place:]))
    return order, np.concatenate((common[: place - 1], around, common[place:]))


def _num_leading(same: NDArray[np.bool_]) -> Integers:
    """Count how many are true in each row before the first that is not."""
    width = same.shape[1]
    if not width:
        return np.zeros(len(same), dtype=np.int64)
    found: Integers = np.where(same.all(axis=1), width, same.argmin(axis=1))
    return found


def _choose(
    nodes: Sequence[tuple[int, int, int]], num_new: Integers, worth: Worth, block_size: int
) -> list[tuple[int, int, int, int]]:
    """Return the stretches worth an item: first and last place, first and last block.

    Args:
        nodes: Of the tree, parents before children: first place, place after the last, depth.
        num_new: [R] queries of each row, in order.
        worth: See `find`.
        block_size: See `find`.
    """
    queries: Sequence[int] = range(len(num_new) + 1)
    readings: Sequence[float] = queries
    # Where all rows decode, both are the number of rows.
    if int(num_new.max()) > 1 or worth.ridge < 1:
        queries = [0, *np.cumsum(num_new).tolist()]
        readings = [0.0, *np.cumsum(np.maximum(1, num_new / worth.ridge)).tolist()]
    found: list[tuple[int, int, int, int]] = []
    # Nodes around the one at hand: where each ends, and where what it leaves begins.
    around: list[tuple[int, int]] = []
    for first, end, depth in nodes:
        while around and around[-1][0] <= first:
            around.pop()
        begin = around[-1][1] if around else 0
        num = queries[end] - queries[first]
        saved = readings[end] - readings[first] - max(1.0, num / worth.ridge)
        cost = worth.min_saved + worth.part_tokens * num if worth.min_saved else 0
        if saved * (depth - begin) * block_size >= cost:
            found.append((first, end, begin, depth))
            begin = depth
        around.append((end, begin))
    return found


def _intervals(common: Integers) -> Iterator[tuple[int, int, int]]:
    """Yield the nodes of the tree: first place, place after the last, depth in blocks.

    Args:
        common: Blocks that each row has in common with the next, in sorted order.
    """
    open_nodes: list[tuple[int, int]] = [(0, 0)]
    # Where it is the same as one place before, no node ends and none begins.
    places = np.flatnonzero(common[1:] != common[:-1]) + 1
    depths = [*common[:1].tolist(), *common[places].tolist()]
    for place, depth in zip([0, *places.tolist()], depths, strict=False):
        first = place
        while open_nodes[-1][1] > depth:
            first, deeper = open_nodes.pop()
            yield first, place + 1, deeper
        if open_nodes[-1][1] < depth:
            open_nodes.append((first, depth))
    while len(open_nodes) > 1:
        first, depth = open_nodes.pop()
        yield first, len(common) + 1, depth
