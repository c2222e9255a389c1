"""Plans the steps of one engine, each from the one before where it can.

Between two decode steps little changes: each row is one token longer, and now and then has
a block more. Such a plan is the former one with its lengths and positions moved on, and the
same tree. Where a few rows join, leave, or bring several tokens, the others keep their places
in the tree, and the few are taken out and put in. All else makes a new plan; tables that the
last step knew are not read again even then.

A block that was replaced is never missed. A `BlockTable` counts them; tables that cannot say
are compared with what they were, which costs 1.5 ns a block in lists, less in arrays.

Knows the last step, no contexts. Kept true: the plan of a step is the one that `plan.build`
makes of the same rows, whatever was planned before.

Shapes: R rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .blocktable import BlockTable
from .plan import Change, Plan, assemble, checked, lengths_of, shareable
from .tree import ITEM_TOKENS, PART_TOKENS, Integers, Tree, Worth, find, insert, split, without

Table: TypeAlias = "BlockTable | list[int] | array[int]"
"""Blocks of a row. Arrays are compared and read several times as fast as other lists."""
SPARE_BLOCKS: Final = 8
"""Blocks that every row may gain before its table is laid out anew."""
MOST_MOVED: Final = 8
"""Rows that are put into the tree one by one; more are sorted together."""


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
        self._replaced: Integers | None = None
        """What the tables of the last step counted, where all of them count, [R]."""
        self._known: list[Table] = []
        """Where not, those tables as far as they were used."""
        self._largest = np.zeros(0, dtype=np.int64)
        """Largest block of each, [R]."""
        self._closest = np.zeros(0, dtype=np.int64)
        """Blocks that each shared with any other when it was put into the tree, or -1, [R]."""
        self._tables: list[Table] = []
        """The same tables as they were given, to know them again."""
        self._places: dict[int, int] = {}
        """Their numbers by identity; fewer than tables where one stands for two rows."""
        self.num_built = 0
        """Plans whose tree was not made from the one before."""

    def plan(self, num_new: Sequence[int], kv_len: Sequence[int], tables: Sequence[Table]) -> Plan:
        """Plan one step; see `plan.build` for arguments and errors."""
        new, lengths = lengths_of(num_new, kv_len, tables, block_size=self._block_size)
        replaced = _replaced(tables)
        self._last = self._continue(new, lengths, tables, replaced) or self._change(
            new, lengths, tables, replaced
        )
        return self._last

    def _continue(
        self,
        new: Integers,
        lengths: Integers,
        tables: Sequence[Table],
        replaced: Integers | None,
    ) -> Plan | None:
        """Return the last plan moved on by one token, or None where it does not fit."""
        last = self._last
        if last is None or len(last.num_new) != len(new):
            return None
        if new.max() != 1 or last.num_new.max() != 1 or (lengths != last.kv_len + 1).any():
            return None
        size = self._block_size
        rows = np.flatnonzero(last.kv_len % size == 0)
        if len(rows) and not self._grow(last, rows, [tables[row] for row in rows.tolist()]).all():
            return None
        if not self._are_known(tables, replaced):
            return None
        slots = last.slots + 1
        if len(rows):
            slots[rows] = last.tables[rows, last.kv_len[rows] // size] * size
        return replace(
            last,
            kv_len=lengths,
            positions=last.positions + 1,
            slots=slots,
            max_block=int(self._largest.max()),
            change=None,
            derived={},
        )

    def _are_known(self, tables: Sequence[Table], replaced: Integers | None) -> bool:
        """Say whether these are the tables of the last step, perhaps with more blocks."""
        if self._replaced is not None:
            if replaced is None or (replaced != self._replaced).any():
                return False
            return all(map(is_, tables, self._tables))
        if all(map(eq, tables, self._known)):
            return True
        pairs = zip(tables, self._known, strict=True)
        return all(table[: len(known)] == known for table, known in pairs)

    def _grow(self, last: Plan, rows: Integers, tables: Sequence[Table]) -> NDArray[np.bool_]:
        """Take up the blocks that some rows of the last plan begin; say of which it was done.

        It is not where the place of a row in the tree may change: the block that it has just
        filled may now be shared, if another row reads it too.
        """
        places = last.kv_len[rows] // self._block_size
        filled = places - 1
        is_done: NDArray[np.bool_] = places < last.tables.shape[1]
        # Who shares less than all blocks before it with the next cannot share this one.
        near = np.flatnonzero(self._closest[rows] >= filled)
        if len(near):
            theirs, mine = last.tables[:, filled[near]], last.tables[rows[near], filled[near]]
            is_done[near] &= np.count_nonzero(theirs == mine, axis=0) == 1
        blocks = []
        for index, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
            table = tables[index]
            block = table[place] if len(table) > place else -1
            blocks.append(block)
            if block < 0:
                is_done[index] = False
            elif is_done[index] and self._replaced is None:
                del self._known[row][place:]
                self._known[row].append(block)
        begun, done = np.array(blocks)[is_done], rows[is_done]
        last.tables[done, places[is_done]] = begun
        self._largest[done] = np.maximum(self._largest[done], begun)
        return is_done

    def _change(
        self,
        new: Integers,
        lengths: Integers,
        tables: Sequence[Table],
        replaced: Integers | None,
    ) -> Plan:
        """Plan a step some of whose rows are not those of the last with one token more."""
        places = dict(zip(map(id, tables), range(len(tables)), strict=True))
        before = self._before(new, lengths, tables, places, replaced)
        moved, stayed = np.flatnonzero(before < 0), np.flatnonzero(before >= 0)
        padded = self._lay_out(before, lengths)
        largest = self._largest[before] if len(stayed) else np.zeros_like(lengths)
        for row in moved.tolist():
            width = -(-int(lengths[row]) // self._block_size)
            padded[row] = -1
            padded[row, :width] = checked(tables[row], width, row)
            largest[row] = padded[row].max()
        former, num_built = self._last, self.num_built
        tree = self._tree(before, moved, new, lengths, padded)
        is_new = former is None or self.num_built > num_built
        change = None if is_new or former is None else Change(former.tree, before)
        self._known = [] if replaced is not None else self._copies(before, lengths, tables)
        self._replaced, self._largest, self._tables = replaced, largest, list(tables)
        self._places, self._closest = places, tree.closest()
        return assemble(
            new,
            lengths,
            padded,
            tree,
            block_size=self._block_size,
            max_block=int(largest.max()),
            change=change,
        )

    def _copies(self, before: Integers, lengths: Integers, tables: Sequence[Table]) -> list[Table]:
        """Return the tables as far as they are used, those that were known as they were."""
        widths = (-(-lengths // self._block_size)).tolist()
        return [
            tables[row][:width] if place < 0 or not self._known else self._known[place]
            for row, (place, width) in enumerate(zip(before.tolist(), widths, strict=True))
        ]

    def _before(
        self,
        new: Integers,
        lengths: Integers,
        tables: Sequence[Table],
        places: Mapping[int, int],
        replaced: Integers | None,
    ) -> Integers:
        """Return the place in the last plan of each row that goes on by a token, or -1.

        `places` are the tables' numbers by identity, in order.
        """
        last, former = self._last, self._places
        # One table that stands for two rows is the former row of neither.
        if last is None or len(former) < last.num_rows or len(places) < len(tables):
            return np.full(len(new), -1)
        numbers = map(former.get, places, repeat(-1))
        before: Integers = np.fromiter(numbers, np.int64, len(tables))
        goes_on = (before >= 0) & (new == 1)
        goes_on &= (last.num_new[before] == 1) & (lengths == last.kv_len[before] + 1)
        begins = np.flatnonzero(goes_on & (last.kv_len[before] % self._block_size == 0))
        if len(begins):
            theirs = [tables[row] for row in begins.tolist()]
            goes_on[begins] = self._grow(last, before[begins], theirs)
        if self._replaced is not None:
            if replaced is None:
                return np.full(len(new), -1)
            goes_on &= replaced == self._replaced[before]
            return np.where(goes_on, before, -1)
        known = map(self._known.__getitem__, before.tolist())
        same = np.fromiter(map(eq, tables, known), np.bool_, len(tables))
        for row in np.flatnonzero(goes_on & ~same).tolist():
            copy = self._known[before[row]]
            goes_on[row] = tables[row][: len(copy)] == copy
        return np.where(goes_on, before, -1)

    def _lay_out(self, before: Integers, lengths: Integers) -> Integers:
        """Return tables wide enough for all rows, with those of rows that stayed."""
        width = -(-int(lengths.max()) // self._block_size)
        last = self._last
        if last is not None and width <= last.tables.shape[1]:
            return last.tables[before]
        padded = np.full((len(lengths), width + SPARE_BLOCKS), -1, dtype=np.int64)
        stayed = np.flatnonzero(before >= 0)
        if last is not None and len(stayed):
            padded[stayed, : last.tables.shape[1]] = last.tables[before[stayed]]
        return padded

    def _tree(
        self,
        before: Integers,
        moved: Integers,
        new: Integers,
        lengths: Integers,
        padded: Integers,
    ) -> Tree:
        """Take rows that left out of the last tree, and put those in that moved or joined."""
        size, last = self._block_size, self._last
        limits = shareable(new, lengths, size)
        if last is None or len(moved) > MOST_MOVED or len(moved) == len(new):
            self.num_built += 1
            return find(padded, limits, new, self._worth, block_size=size)
        stayed = np.flatnonzero(before >= 0)
        now = np.full(last.num_rows, -1)
        now[before[stayed]] = stayed
        order, common = last.tree.order, last.tree.common
        common = without(order, common, now >= 0)
        order = now[order]
        order = order[order >= 0]
        for row in moved.tolist():
            order, common = insert(order, common, row, padded, limits)
        return split(order, common, new, self._worth, block_size=size)


_counts: Final = attrgetter("replaced")


def _replaced(tables: Sequence[Table]) -> Integers | None:
    """Return what tables count, [R], or None where some of them do not."""
    try:
        return np.fromiter(map(_counts, tables), np.int64, len(tables))
    except AttributeError:
        return None
