"""The attention plan of one step: work items that read every shared KV block once.

A row is the new tokens of one context: `num_new` queries at the end of `kv_len` tokens whose
keys and values are in the blocks of its table. Rows whose tables start with the same blocks
share that prefix, at several levels if contexts were forked from forks. The plan has one
`WorkItem` for every range of blocks that at least two rows share and whose sharing pays off, with
the queries of all these rows, and one item for the private rest of every row. Attention computes
each item separately and merges the partials of a query by their log-sum-exp. Without sharing there
is one item per row, computed by the same code.

Only blocks that end before the first new token of a row count as shared, so an item of several
rows never needs a causal mask. The private item of a row reads the KV that is written in this
step, by the row itself or by an earlier row.

`prefix_tree` finds the shared ranges and decides which ones save more reading than they cost.
`planner` derives the plan of a step from the previous one.

Out of scope: tensors; one plan serves all layers of a step.

Invariants: the items of a query cover each position that it may see exactly once.

Shapes: T queries of all rows in order - R rows - B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .prefix_tree import (
    MIN_SAVED_TOKENS,
    PARTIAL_TOKENS,
    Blocks,
    Integers,
    PrefixTree,
    SplitCost,
    build_prefix_tree,
)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Queries that attend to one range of positions, which is read from the cache once."""

    queries: Integers
    """Indices of packed queries. The queries of a causal item belong to one row, in order."""
    blocks: Blocks
    """The blocks of the range; the first one holds position `first`."""
    first: int
    """Position of the first token of the range."""
    num_kv: int
    """Tokens of the range, at least 1."""
    causal: bool = False
    """Query i sees only positions up to `first + num_kv - len(queries) + i`."""
    window: int | None = None
    """With `causal`: a query sees its own position and at most `window - 1` before it."""

    def slots(self, block_size: int) -> Integers:
        """Return the slots of the range's tokens: block * block size + offset."""
        return kv_slots(self.blocks, self.first % block_size, self.num_kv, block_size)


@dataclass(slots=True, eq=False)
class Plan:
    """The attention work of one step, the same for all layers."""

    block_size: int
    num_new: Integers
    """Queries of each row, [R]."""
    kv_len: Integers
    """Tokens of each row including its new ones, [R]."""
    tables: Blocks
    """Block tables, [R, columns]; entries after the last block of a row are undefined."""
    query_start: Integers
    """First packed query of each row, and the number of queries, [R + 1]."""
    positions: Integers
    """Position of each query in its context, [T]."""
    slots: Integers
    """Where the key and value of each new token are stored, [T]."""
    max_block: int
    """Largest block that any row reads or writes."""
    tree: PrefixTree
    """What rows share; the same object in a plan derived from the previous one."""
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """Data that implementations cache for the other layers of the step, by their own keys."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the step."""
        return len(self.num_new)

    @property
    def num_queries(self) -> int:
        """Number of packed queries of all rows."""
        return len(self.positions)

    def effective_window(self, window: int | None) -> int | None:
        """Return the window, or None if no row of the step is longer than it."""
        return None if window is None or window >= int(self.kv_len.max()) else window

    def items(self, window: int | None = None) -> tuple[WorkItem, ...]:
        """Return the work items of a layer, computed once per step and window.

        Args:
            window: Positions that a query sees, including its own. A window that no row
                exceeds has no effect. Otherwise nothing is shared, because the visible range
                moves with each query.
        """
        window = self.effective_window(window)
        key = ("items", window)
        if key not in self.derived:
            if window is None:
                items = (*_shared_items(self), *_private_items(self))
            else:
                items = tuple(_window_items(self, window))
            self.derived[key] = items
        cached: tuple[WorkItem, ...] = self.derived[key]
        return cached


def build_plan(
    num_new: Sequence[int],
    kv_len: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    min_saved: int = MIN_SAVED_TOKENS,
    partial_tokens: float = PARTIAL_TOKENS,
    ridge: float = float("inf"),
    spare_columns: int = 0,
) -> Plan:
    """Plan one step.

    Args:
        num_new: New tokens of each row, at least 1.
        kv_len: Tokens of each row in total, at least its `num_new`.
        tables: Blocks of each row in order; they must cover its `kv_len` tokens, further
            blocks are ignored.
        block_size: Tokens of a block.
        min_saved: Tokens of reading that a shared range must save to become an item. 0
            shares wherever possible; a huge number disables sharing.
        partial_tokens: Tokens of reading that one more partial of a query costs.
        ridge: Number of queries above which one range takes longer to compute than to read.
        spare_columns: Extra columns of the plan's `tables`.

    Raises:
        ValueError: without rows, or if lengths and tables do not fit each other.
    """
    new, lengths = _check_lengths(num_new, kv_len, tables, block_size=block_size)
    widths = -(-lengths // block_size)
    columns = _read_tables(tables, widths, spare_columns)
    # Only blocks before the first new token of a row may be shared.
    limits = (lengths - new) // block_size
    cost = SplitCost(min_saved, partial_tokens, ridge)
    query_start = np.concatenate(([0], np.cumsum(new)))
    row_of = np.repeat(np.arange(len(new)), new)
    positions = np.arange(query_start[-1]) + (lengths - new - query_start[:-1])[row_of]
    blocks = columns[row_of, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    return Plan(
        block_size=block_size,
        num_new=new,
        kv_len=lengths,
        tables=columns,
        query_start=query_start,
        positions=positions,
        slots=slots,
        max_block=int(columns.max()),
        tree=build_prefix_tree(columns, limits, new, cost, block_size=block_size),
    )


def kv_slots(blocks: Blocks, offset: int, num_tokens: int, block_size: int) -> Integers:
    """Return the slots of `num_tokens` tokens, the first at `offset` in the first block."""
    inside = np.arange(block_size)
    return (blocks[:, None].astype(np.int64) * block_size + inside).reshape(-1)[
        offset : offset + num_tokens
    ]


def _check_lengths(
    num_new: Sequence[int],
    kv_len: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
) -> tuple[Integers, Integers]:
    """Return the lengths of a step's rows as arrays; raise ValueError if they are invalid."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if not len(num_new) == len(kv_len) == len(tables) or not len(num_new):
        raise ValueError(
            f"num_new, kv_len and tables must have one entry per row and at least one row,"
            f" got {len(num_new)}, {len(kv_len)} and {len(tables)}"
        )
    new = np.array(num_new, dtype=np.int64)
    lengths = np.array(kv_len, dtype=np.int64)
    if new.min() < 1 or (lengths < new).any():
        raise ValueError("num_new must be at least 1 and at most kv_len in every row")
    return new, lengths


def _read_tables(tables: Sequence[Sequence[int]], widths: Integers, spare_columns: int) -> Blocks:
    """Return the first `widths` blocks of each table as [R, columns]; unused entries are -1.

    Raises:
        ValueError: if a table has fewer blocks, or a negative one.
    """
    columns = np.full((len(tables), int(widths.max()) + spare_columns), -1, dtype=np.int32)
    for row, (table, width) in enumerate(zip(tables, widths.tolist(), strict=True)):
        if len(table) < width:
            raise ValueError(f"tables[{row}] has {len(table)} blocks, its tokens need {width}")
        columns[row, :width] = table[:width]
    invalid = np.flatnonzero(np.count_nonzero(columns >= 0, axis=1) < widths)
    if len(invalid):
        raise ValueError(f"tables[{invalid[0]}] has a negative block")
    return columns


def _packed_queries(plan: Plan, rows: Integers) -> Integers:
    """Return the packed queries of some rows, row by row."""
    num = plan.num_new[rows]
    before = np.cumsum(num) - num
    queries: Integers = np.arange(int(num.sum())) + np.repeat(plan.query_start[rows] - before, num)
    return queries


def _shared_items(plan: Plan) -> Iterator[WorkItem]:
    """Yield the shared ranges of the tree, parents before children."""
    tree, size = plan.tree, plan.block_size
    ranges = (tree.first, tree.end, tree.begin_block, tree.end_block)
    for first_row, end_row, begin, end in zip(*(each.tolist() for each in ranges), strict=True):
        rows = np.sort(tree.row_order[first_row:end_row])
        yield WorkItem(
            queries=_packed_queries(plan, rows),
            blocks=plan.tables[rows[0], begin:end],
            first=begin * size,
            num_kv=(end - begin) * size,
        )


def _private_items(plan: Plan) -> Iterator[WorkItem]:
    """Yield the private range of each row."""
    for row, begin in enumerate(plan.tree.private_start_block.tolist()):
        yield _row_item(plan, row, begin * plan.block_size, None)


def _window_items(plan: Plan, window: int) -> Iterator[WorkItem]:
    """Yield one item per row, which begins at the window of its first query."""
    for row, start in enumerate((plan.kv_len - plan.num_new).tolist()):
        yield _row_item(plan, row, max(0, start - window + 1), window)


def _row_item(plan: Plan, row: int, first: int, window: int | None) -> WorkItem:
    length, count = int(plan.kv_len[row]), int(plan.num_new[row])
    return WorkItem(
        queries=np.arange(plan.query_start[row], plan.query_start[row + 1]),
        blocks=plan.tables[row, first // plan.block_size : -(-length // plan.block_size)],
        first=first,
        num_kv=length - first,
        # A single new token sees the whole range, so it needs no mask.
        causal=count > 1,
        window=window if count > 1 else None,
    )
