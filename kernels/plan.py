"""Turns the rows of one step into work items that read every shared block once.

A row is the new tokens of one context: `num_new` queries at the end of `kv_len` tokens whose
keys and values lie in the blocks of its table. Rows whose tables begin with the same blocks
share that prefix, at several levels when contexts forked from forks. The plan walks the
tree of tables and emits an `Item` for every stretch of blocks that at least two rows share,
with the queries of all its sharers, and one item for what remains of every row. Attention
computes each item for itself and merges the parts of a query by their log-sum-exp. Without
sharing there is one item per row: the plain case is the same code.

Only blocks that lie wholly before a row's first new token count as shared, so an item of
several rows never needs a causal mask. What a row reads of its own step, or of an earlier
row of the step, is in its own item.

A stretch is split off only if that saves more reading than it costs; `tree` finds the
stretches and decides. `planner` makes the plans of steps that follow each other.

Knows block tables and lengths, no tensors: one plan serves all layers of a step. Kept true:
for each query the items that name it cover each position it may see exactly once.

Shapes: T queries of all rows in order - R rows - B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .tree import ITEM_TOKENS, PART_TOKENS, Tree, Worth, find
from .tree import Integers as Integers


@dataclass(frozen=True, slots=True)
class Item:
    """Queries that attend to one stretch of positions, read from the cache once."""

    queries: Integers
    """Indices of packed queries. The queries of a causal item are one row's, in order."""
    blocks: Integers
    """The blocks that hold the stretch, beginning with the block of position `first`."""
    first: int
    """Position of the first token that is read."""
    num_kv: int
    """Tokens that are read, at least 1."""
    causal: bool = False
    """Query i sees positions up to `first + num_kv - len(queries) + i` only."""
    window: int | None = None
    """With `causal`: a query sees its own position and at most `window - 1` before it."""

    def slots(self, block_size: int) -> Integers:
        """Return where the tokens of the stretch lie: block * block size + offset."""
        return slots_of(self.blocks, self.first % block_size, self.num_kv, block_size)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """How the tree of a plan was made from that of a plan before: rows went out and in."""

    former: Tree
    before: Integers
    """The row's number in the former plan, or -1 where it is another's or it has moved, [R]."""


@dataclass(slots=True, eq=False)
class Plan:
    """The work of one step, the same for all layers."""

    block_size: int
    num_new: Integers
    """Queries of each row, [R]."""
    kv_len: Integers
    """Tokens of each row, its new ones included, [R]."""
    tables: Integers
    """Block tables, [R, widest or more]; what lies behind a row's last block means nothing."""
    query_start: Integers
    """First packed query of each row and the end of the last, [R + 1]."""
    positions: Integers
    """Position of each query in its context, [T]."""
    slots: Integers
    """Where the key and value of each new token are stored, [T]."""
    max_block: int
    """Largest block that any row reads or writes."""
    tree: Tree
    """What rows share; the same object in a plan that continues another."""
    change: Change | None = None
    """From the plan before, where this one was made of it."""
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """What implementations keep for the other layers of the step, under keys of their own."""

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.num_new)

    @property
    def num_queries(self) -> int:
        """Packed queries of all rows."""
        return len(self.positions)

    def binding(self, window: int | None) -> int | None:
        """Return the window, or None where no row of the step is longer than it."""
        return None if window is None or window >= int(self.kv_len.max()) else window

    def items(self, window: int | None = None) -> tuple[Item, ...]:
        """Return the work items of a layer, made once per step and window.

        Args:
            window: Positions that a query sees, its own included. Rows no longer than it
                are not cut; if any row is, nothing is shared, for the stretch that a query
                sees moves with it.
        """
        window = self.binding(window)
        key = ("items", window)
        if key not in self.derived:
            if window is None:
                items = (*_shared_items(self), *_own_items(self))
            else:
                items = tuple(_window_items(self, window))
            self.derived[key] = items
        found: tuple[Item, ...] = self.derived[key]
        return found


def build(
    num_new: Sequence[int],
    kv_len: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    min_saved: int = ITEM_TOKENS,
    part_tokens: float = PART_TOKENS,
    ridge: float = float("inf"),
) -> Plan:
    """Plan one step.

    Args:
        num_new: New tokens of each row, at least 1.
        kv_len: Tokens of each row in all, at least its `num_new`.
        tables: Blocks of each row in order; they must cover its `kv_len` tokens, further
            ones are ignored.
        block_size: Tokens of a block.
        min_saved: Tokens of reading that a shared stretch must save to become an item. 0
            shares wherever possible; a huge number never does.
        part_tokens: Tokens of reading that one more part of a query costs.
        ridge: Queries from which on attending takes longer than reading once for all.

    Raises:
        ValueError: if there is no row, or lengths and tables do not fit each other.
    """
    new, lengths = lengths_of(num_new, kv_len, tables, block_size=block_size)
    needed = (-(-lengths // block_size)).tolist()
    padded = np.full((len(new), max(needed)), -1, dtype=np.int64)
    for row, (table, width) in enumerate(zip(tables, needed, strict=True)):
        padded[row, :width] = checked(table, width, row)
    worth = Worth(min_saved, part_tokens, ridge)
    limits = shareable(new, lengths, block_size)
    tree = find(padded, limits, new, worth, block_size=block_size)
    most = int(padded.max())
    return assemble(new, lengths, padded, tree, block_size=block_size, max_block=most)


def lengths_of(
    num_new: Sequence[int],
    kv_len: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
) -> tuple[Integers, Integers]:
    """Return the lengths of a step's rows as arrays.

    Raises:
        ValueError: if they are impossible.
    """
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


def checked(table: Sequence[int], width: int, row: int) -> Integers:
    """Return the first `width` blocks of a row's table.

    Raises:
        ValueError: if it has fewer, or one that cannot be.
    """
    if len(table) < width:
        raise ValueError(f"tables[{row}] has {len(table)} blocks, its tokens need {width}")
    blocks = np.array(table[:width], dtype=np.int64)
    if blocks.min() < 0:
        raise ValueError(f"tables[{row}] has a negative block")
    return blocks


def assemble(
    num_new: Integers,
    kv_len: Integers,
    tables: Integers,
    tree: Tree,
    *,
    block_size: int,
    max_block: int,
    change: Change | None = None,
) -> Plan:
    """Return the plan of rows that were checked; see `Plan` for the arguments."""
    if int(num_new.max()) == 1:
        query_start = np.arange(len(num_new) + 1)
        row_of, positions = query_start[:-1], kv_len - 1
    else:
        query_start = np.concatenate(([0], np.cumsum(num_new)))
        row_of = np.repeat(np.arange(len(num_new)), num_new)
        positions = np.arange(query_start[-1]) + (kv_len - num_new - query_start[:-1])[row_of]
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size
    return Plan(
        block_size=block_size,
        num_new=num_new,
        kv_len=kv_len,
        tables=tables,
        query_start=query_start,
        positions=positions,
        slots=slots,
        max_block=max_block,
        tree=tree,
        change=change,
    )


def shareable(num_new: Integers, kv_len: Integers, block_size: int) -> Integers:
    """Return how many blocks of each row others may share: those before its first new token."""
    return (kv_len - num_new) // block_size


def slots_of(blocks: Integers, offset: int, num_tokens: int, block_size: int) -> Integers:
    """Return the slots of `num_tokens` tokens, the first at `offset` in the first block."""
    inside = np.arange(block_size)
    return (blocks[:, None] * block_size + inside).reshape(-1)[offset : offset + num_tokens]


def queries_of(plan: Plan, rows: Integers) -> Integers:
    """Return the packed queries of some rows, row by row."""
    num = plan.num_new[rows]
    before = np.cumsum(num) - num
    found: Integers = np.arange(int(num.sum())) + np.repeat(plan.query_start[rows] - before, num)
    return found


def _shared_items(plan: Plan) -> Iterator[Item]:
    """Yield the stretches of the tree, parents before children."""
    tree, size = plan.tree, plan.block_size
    nodes = (tree.first, tree.end, tree.begin_block, tree.end_block)
    for first, end, begin, depth in zip(*(column.tolist() for column in nodes), strict=True):
        rows = np.sort(tree.order[first:end])
        yield Item(
            queries=queries_of(plan, rows),
            blocks=plan.tables[rows[0], begin:depth],
            first=begin * size,
            num_kv=(depth - begin) * size,
        )


def _own_items(plan: Plan) -> Iterator[Item]:
    """Yield what remains of each row."""
    for row, begin in enumerate(plan.tree.own.tolist()):
        yield _row_item(plan, row, begin * plan.block_size, None)


def _window_items(plan: Plan, window: int) -> Iterator[Item]:
    """Yield one item per row that begins where its first query's window begins."""
    for row, start in enumerate((plan.kv_len - plan.num_new).tolist()):
        yield _row_item(plan, row, max(0, start - window + 1), window)


def _row_item(plan: Plan, row: int, first: int, window: int | None) -> Item:
    length, count = int(plan.kv_len[row]), int(plan.num_new[row])
    return Item(
        queries=np.arange(plan.query_start[row], plan.query_start[row + 1]),
        blocks=plan.tables[row, first // plan.block_size : -(-length // plan.block_size)],
        first=first,
        num_kv=length - first,
        # A single new token sees the whole stretch: no mask of any kind.
        causal=count > 1,
        window=window if count > 1 else None,
    )
