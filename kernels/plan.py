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

A stretch is split off only if that saves more reading than it costs: every item adds a part
to merge for each of its queries, worth about `PART_TOKENS` tokens of reading, and a fixed
cost worth about `ITEM_TOKENS` (the rule of FastTree, MLSys'25, and PAT, ASPLOS'26, in token
units). A stretch that is not split off is read by each of its children with their own.

Knows block tables and lengths, no tensors: one plan serves all layers of a step. Kept true:
for each query the items that name it cover each position it may see exactly once.

Shapes: T queries of all rows in order - R rows - B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

ITEM_TOKENS: Final = 128
PART_TOKENS: Final = 4


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


@dataclass(slots=True, eq=False)
class Plan:
    """The work of one step, the same for all layers."""

    block_size: int
    num_new: Integers
    """Queries of each row, [R]."""
    kv_len: Integers
    """Tokens of each row, its new ones included, [R]."""
    tables: Integers
    """Block tables, [R, widest], filled up with -1."""
    query_start: Integers
    """First packed query of each row and the end of the last, [R + 1]."""
    positions: Integers
    """Position of each query in its context, [T]."""
    slots: Integers
    """Where the key and value of each new token are stored, [T]."""
    max_block: int
    """Largest block that any row reads or writes."""
    min_saved: int
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
            items = _tree_items(self) if window is None else _window_items(self, window)
            self.derived[key] = tuple(items)
        found: tuple[Item, ...] = self.derived[key]
        return found


def build(
    num_new: Sequence[int],
    kv_len: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    min_saved: int = ITEM_TOKENS,
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

    Raises:
        ValueError: if there is no row, or lengths and tables do not fit each other.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if not len(num_new) == len(kv_len) == len(tables) or not len(num_new):
        raise ValueError(
            f"num_new, kv_len and tables must have one entry per row and at least one row,"
            f" got {len(num_new)}, {len(kv_len)} and {len(tables)}"
        )
    new = np.asarray(num_new, dtype=np.int64)
    lengths = np.asarray(kv_len, dtype=np.int64)
    if new.min() < 1 or (lengths < new).any():
        raise ValueError("num_new must be at least 1 and at most kv_len in every row")
    needed = -(-lengths // block_size)
    padded = np.full((len(new), int(needed.max())), -1, dtype=np.int64)
    for row, (table, width) in enumerate(zip(tables, needed.tolist(), strict=True)):
        if len(table) < width:
            raise ValueError(
                f"tables[{row}] has {len(table)} blocks, {int(lengths[row])} tokens need {width}"
            )
        padded[row, :width] = table[:width]
        if padded[row, :width].min() < 0:
            raise ValueError(f"tables[{row}] has a negative block")
    query_start = np.concatenate(([0], np.cumsum(new)))
    row_of = np.repeat(np.arange(len(new)), new)
    positions = np.arange(query_start[-1]) - query_start[row_of] + (lengths - new)[row_of]
    slots = padded[row_of, positions // block_size] * block_size + positions % block_size
    return Plan(
        block_size=block_size,
        num_new=new,
        kv_len=lengths,
        tables=padded,
        query_start=query_start,
        positions=positions,
        slots=slots,
        max_block=int(padded.max()),
        min_saved=min_saved,
    )


def slots_of(blocks: Integers, offset: int, num_tokens: int, block_size: int) -> Integers:
    """Return the slots of `num_tokens` tokens, the first at `offset` in the first block."""
    inside = np.arange(block_size)
    return (blocks[:, None] * block_size + inside).reshape(-1)[offset : offset + num_tokens]


def _tree_items(plan: Plan) -> list[Item]:
    """Walk the tree of tables from the root: shared stretches, then each row's own rest."""
    starts = plan.kv_len - plan.num_new
    # A row may share no further than the last block before its first new token.
    limits = starts // plan.block_size
    items: list[Item] = []
    own_from = np.zeros(plan.num_rows, dtype=np.int64)
    pending = [(np.arange(plan.num_rows), 0, 0)]
    while pending:
        rows, begin, depth = pending.pop()
        if len(rows) == 1:
            own_from[rows] = begin
            continue
        end = depth + _common_blocks(plan.tables, rows, depth, int(limits[rows].min()))
        if end > begin and _is_worth_it(plan, rows, (end - begin) * plan.block_size):
            items.append(_shared_item(plan, rows, begin, end))
            begin = end
        done = limits[rows] == end
        own_from[rows[done]] = begin
        rest = rows[~done]
        if len(rest):
            following = plan.tables[rest, end]
            for block in np.unique(following).tolist():
                pending.append((rest[following == block], begin, end))  # noqa: PERF401
    items.extend(_own_item(plan, row, int(own_from[row])) for row in range(plan.num_rows))
    return items


def _common_blocks(tables: Integers, rows: Integers, depth: int, limit: int) -> int:
    """Count the blocks from `depth` on, before `limit`, that all rows have in common."""
    if limit <= depth:
        return 0
    same = (tables[rows, depth:limit] == tables[rows[0], depth:limit]).all(axis=0)
    return len(same) if same.all() else int(same.argmin())


def _is_worth_it(plan: Plan, rows: Integers, num_tokens: int) -> bool:
    """Compare the reading that an item of these rows saves with what merging it costs."""
    if not plan.min_saved:
        return True
    saved = (len(rows) - 1) * num_tokens
    return saved >= plan.min_saved + PART_TOKENS * int(plan.num_new[rows].sum())


def _shared_item(plan: Plan, rows: Integers, begin: int, end: int) -> Item:
    starts = plan.query_start
    spans = [np.arange(int(starts[row]), int(starts[row + 1])) for row in rows]
    return Item(
        queries=np.concatenate(spans),
        blocks=plan.tables[rows[0], begin:end],
        first=begin * plan.block_size,
        num_kv=(end - begin) * plan.block_size,
    )


def _own_item(plan: Plan, row: int, begin: int) -> Item:
    """Return the item of one row from block `begin` to its end."""
    return _row_item(plan, row, begin * plan.block_size, None)


def _window_items(plan: Plan, window: int) -> list[Item]:
    """Return one item per row that begins where its first query's window begins."""
    starts = (plan.kv_len - plan.num_new).tolist()
    return [
        _row_item(plan, row, max(0, start - window + 1), window) for row, start in enumerate(starts)
    ]


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
