"""Plans the steps of one engine, each from the one before where it can.

Between two decode steps little changes: each row is one token longer, and now and then has
a block more. Such a plan is the former one with its lengths and positions moved on, and the
same tree. Rows that join, leave or bring several tokens make a new plan; tables that the last
step knew are not read again even then.

Tables are compared with what they were, so that a block that was replaced is never missed.
That costs 1.5 ns a block in lists, less in arrays.

Knows the last step, no contexts. Kept true: the plan of a step is the one that `plan.build`
makes of the same rows, whatever was planned before.

Shapes: R rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from operator import eq
from typing import Final, TypeAlias

import numpy as np

from .plan import Plan, assemble, checked, lengths_of
from .tree import ITEM_TOKENS, PART_TOKENS, Integers, Worth

Table: TypeAlias = "list[int] | array[int]"
"""Blocks of a row. Arrays are compared and read several times as fast as lists."""
SPARE_BLOCKS: Final = 8
"""Blocks that every row may gain before its table is laid out anew."""


class Planner:
    """Makes the plan of each step. A plan is good until the planner makes the next."""

    def __init__(
        self,
        *,
        block_size: int,
        min_saved: int = ITEM_TOKENS,
        part_tokens: float = PART_TOKENS,
        ridge: float = float("inf"),
    ) -> None:
        """Plan for one cache; see `plan.build` for the arguments."""
        self._block_size: Final = block_size
        self._worth: Final = Worth(min_saved, part_tokens, ridge)
        self._last: Plan | None = None
        self._known: list[Table] = []
        """The tables of the last step, as far as they were used."""
        self._tables: list[Table] = []
        """The same as they were given, to know them again."""
        self.num_built = 0
        """Plans that were not made from the one before."""

    def plan(self, num_new: Sequence[int], kv_len: Sequence[int], tables: Sequence[Table]) -> Plan:
        """Plan one step; see `plan.build` for arguments and errors."""
        new, lengths = lengths_of(num_new, kv_len, tables, block_size=self._block_size)
        made = self._continue(new, lengths, tables)
        if made is None:
            made = self._build(new, lengths, tables)
            self.num_built += 1
        self._last = made
        return made

    def _continue(self, new: Integers, lengths: Integers, tables: Sequence[Table]) -> Plan | None:
        """Return the last plan moved on by one token, or None where it does not fit."""
        last = self._last
        if last is None or len(last.num_new) != len(new):
            return None
        if new.max() != 1 or last.num_new.max() != 1 or (lengths != last.kv_len + 1).any():
            return None
        size = self._block_size
        rows = np.flatnonzero(last.kv_len % size == 0)
        if len(rows) and not self._grow(last, rows, tables):
            return None
        if not all(map(eq, tables, self._known)):
            pairs = zip(tables, self._known, strict=True)
            if any(table[: len(known)] != known for table, known in pairs):
                return None
        slots = last.slots + 1
        max_block = last.max_block
        if len(rows):
            begun = last.tables[rows, last.kv_len[rows] // size]
            slots[rows] = begun * size
            max_block = max(max_block, int(begun.max()))
        return replace(
            last,
            kv_len=lengths,
            positions=last.positions + 1,
            slots=slots,
            max_block=max_block,
            derived={},
        )

    def _grow(self, last: Plan, rows: Integers, tables: Sequence[Table]) -> bool:
        """Take up the blocks that some rows begin; False if the tree may change."""
        places = last.kv_len[rows] // self._block_size
        if int(places.max()) >= last.tables.shape[1]:
            return False
        # The block that a row has just filled may now be shared, if another row reads it too.
        filled = places - 1
        whose = last.tables[:, filled] == last.tables[rows, filled]
        if (np.count_nonzero(whose, axis=0) > 1).any():
            return False
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            if len(tables[row]) <= place or tables[row][place] < 0:
                return False
            self._known[row].append(tables[row][place])
            last.tables[row, place] = tables[row][place]
        return True

    def _build(self, new: Integers, lengths: Integers, tables: Sequence[Table]) -> Plan:
        """Plan anew, with the rows of tables that are as they were."""
        needed = (-(-lengths // self._block_size)).tolist()
        padded = np.full((len(new), max(needed) + SPARE_BLOCKS), -1, dtype=np.int64)
        places = {id(table): place for place, table in enumerate(self._tables)}
        known: list[Table] = []
        kept: list[tuple[int, int]] = []
        for row, (table, width) in enumerate(zip(tables, needed, strict=True)):
            used = table if len(table) == width else table[:width]
            place = places.get(id(table))
            if place is not None and len(used) == width and used == self._known[place]:
                kept.append((row, place))
                known.append(self._known[place])
            else:
                padded[row, :width] = checked(table, width, row)
                known.append(used[:])
        if kept and self._last is not None:
            rows, before = np.array(kept).T
            width = min(padded.shape[1], self._last.tables.shape[1])
            padded[rows, :width] = self._last.tables[before, :width]
        self._known, self._tables = known, list(tables)
        return assemble(new, lengths, padded, block_size=self._block_size, worth=self._worth)
