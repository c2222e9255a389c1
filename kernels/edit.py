"""Rows that come and go in a step's table, which else stays as it is.

- A row that leaves gives up its entries, slots and pages. In a stretch that others read too, the
  last entry takes the place of the one that is gone, unless a row that joins does.
- A row that joins is put into the stretches on its path through the tree, and brings items of
  its own. It takes what those that left had, as far as that will do, and else room at the end.

All else asks for a new table: stretches that are not those of the former tree, rows that have
queries beside the one of decoding, no room. So does a table that was changed often: what was
dealt out evenly is a little less even with each change.

Knows one table and the plans before and after. Kept true: a table that was changed shows each
query what one that is made anew shows it; only cuts and the order of items may differ.

Shapes: R rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .plan import Change, Plan
from .table import ITEM_SIZE, NO_LIMIT, SPARE_BLOCKS, Field, Header, Place, Shared, Table
from .tree import Integers, Tree

CHANGES: Final = 4
"""Of so many rows of a new table one may come or go until it is made anew."""


def apply(table: Table, plan: Plan, change: Change, cut: Callable[[int], int]) -> bool:
    """Take out the rows that left and put in those that joined; False where it cannot.

    After a refusal the table is of no use.

    Args:
        table: Of the plan before.
        plan: Of rows of one query each. Their ends are not moved on: `grow` follows.
        change: From the plan that this table was of last.
        cut: Says into chunks of how many tokens an own stretch of so many is cut.
    """
    stays = change.before >= 0
    stayed = np.flatnonzero(stays)
    old = change.before[stayed]
    is_left = np.ones(len(table.query_start) - 1, dtype=np.bool_)
    is_left[old] = False
    left, joined = np.flatnonzero(is_left).tolist(), np.flatnonzero(~stays).tolist()
    table.num_changes += len(left) + len(joined)
    if plan.num_queries != plan.num_rows or table.num_changes * CHANGES > table.num_rows:
        return False
    if not _are_same(change.former, ~is_left, plan.tree, stays):
        return False
    edit = _Edit(table, [stretch.count for stretch in table.shared])
    edit.renumber(old, stayed)
    for row in left:
        edit.take_out(row, int(change.former.own[row]))
    table.query_start = plan.query_start
    table.ends = table.ends.of(np.maximum(change.before, 0))
    return all(edit.put_in(plan, row, cut) for row in joined) and edit.settle()


class _Edit:
    """One change of a table: what has no place yet, and places that are free."""

    def __init__(self, table: Table, counts: list[int]) -> None:
        self._table: Final = table
        self._counts: Final = counts
        """Queries that each shared stretch had."""
        self._holes: Final[list[list[int]]] = [[] for _ in table.shared]
        """Entries of each shared stretch whose query left, in order."""
        self._merges: list[int] = []
        """Merges whose query left."""
        self._items: list[int] = []
        """Items whose queries left."""
        self._new: list[tuple[list[int], int]] = []
        """Items to come, and the row whose last they are, or -1."""

    def renumber(self, old: Integers, stayed: Integers) -> None:
        """Give queries their new numbers; note what those that left leave behind."""
        table = self._table
        now = np.full(int(table.query_start[-1]), -1, dtype=np.int64)
        now[table.query_start[old]] = stayed
        queries = now[table.queries[: table.num_entries]]
        table.queries[: table.num_entries] = queries
        if table.shared:
            begins = [stretch.entry for stretch in table.shared]
            end = begins[-1] + table.shared[-1].room
            for entry in np.flatnonzero(queries[:end] < 0).tolist():
                number = bisect_right(begins, entry) - 1
                # Behind those in use stands anything.
                if entry - begins[number] < table.shared[number].count:
                    self._holes[number].append(entry)
        merges = table.merges[: table.num_merges]
        merges[:, 0] = now[merges[:, 0]]
        self._merges = np.flatnonzero(merges[:, 0] < 0).tolist()
        for merge in self._merges:
            _, first, count = merges[merge].tolist()
            table.free_slots.append((first, count))

    def take_out(self, row: int, own: int) -> None:
        """Free the items, entries and pages of a row whose own stretch began at block `own`."""
        table, ends = self._table, self._table.ends
        entry, page, room = int(ends.entry[row]), int(ends.page[row]), int(ends.room[row])
        num_queries = int(table.query_start[row + 1] - table.query_start[row])
        place = table.items[: table.num_items, Field.ENTRY] - entry
        self._items += np.flatnonzero((place >= 0) & (place < num_queries)).tolist()
        table.free_places.append(Place(entry, page + own, room - own))

    def put_in(self, plan: Plan, row: int, cut: Callable[[int], int]) -> bool:
        """Enter a row; False where there is no room."""
        table, tree, size = self._table, plan.tree, plan.block_size
        own, kv_len = int(tree.own[row]), int(plan.kv_len[row])
        num_kv, blocks = kv_len - own * size, -(-kv_len // size)
        length = cut(num_kv)
        chunks = -(-num_kv // length)
        at = int(np.flatnonzero(tree.order == row)[0])
        path = np.flatnonzero((tree.first <= at) & (tree.end > at)).tolist()
        parts = chunks + sum(table.shared[number].chunks for number in path)
        if parts > 1 and table.num_merges == len(table.merges):
            return False
        slot = self._merge(row, parts) if parts > 1 else -1
        begin = slot
        for number in path:
            if not self._enter(number, row, begin):
                return False
            begin += table.shared[number].chunks
        place = self._place(blocks - own + SPARE_BLOCKS)
        if place is None:
            return False
        table.queries[place.entry], table.slots[place.entry] = row, begin
        table.pages[place.page : place.page + blocks - own] = plan.tables[row, own:blocks]
        for chunk in range(chunks):
            first = chunk * length
            item = [0] * ITEM_SIZE
            item[Field.ENTRY], item[Field.NUM_QUERIES] = place.entry, 1
            item[Field.PAGE], item[Field.OFFSET] = place.page + first // size, first % size
            item[Field.NUM_KV] = min(length, num_kv - first)
            item[Field.PART] = chunk if parts > 1 else -1
            item[Field.LIMIT] = NO_LIMIT
            self._new.append((item, row if chunk == chunks - 1 else -1))
        room, page = own + place.num_pages, place.page - own
        # The item of its last token gets its place at the end.
        news = (kv_len, blocks, room, 0, num_kv - (chunks - 1) * length, page, place.entry)
        for column, word in zip(table.ends, news, strict=True):
            column[row] = word
        return True

    def settle(self) -> bool:
        """Close gaps and give what is new its place; False where there is no room."""
        table = self._table
        for number, stretch in enumerate(table.shared):
            for entry in reversed(self._holes[number]):
                last = stretch.entry + stretch.count - 1
                table.queries[entry] = table.queries[last]
                table.slots[entry] = table.slots[last]
                stretch.count -= 1
            if stretch.count != self._counts[number]:
                self._cut_again(stretch)
        for merge in reversed(self._merges):
            table.num_merges -= 1
            table.merges[merge] = table.merges[table.num_merges]
        if table.num_items + len(self._new) - len(self._items) > len(table.items):
            return False
        free = sorted(self._items, reverse=True)
        for item, row in self._new:
            if free:
                place = free.pop()
            else:
                place, table.num_items = table.num_items, table.num_items + 1
            table.items[place] = item
            if row >= 0:
                table.ends.last[row] = place
        for place in free:
            table.num_items -= 1
            table.items[place] = table.items[table.num_items]
            table.ends.last[table.ends.last == table.num_items] = place
        table.words[Header.NUM_ITEMS] = table.num_items
        table.words[Header.NUM_MERGES] = table.num_merges
        return True

    def _merge(self, query: int, parts: int) -> int:
        """Find slots that are neighbours for the parts of a query; return the first."""
        table = self._table
        for number, (first, count) in enumerate(table.free_slots):
            if count >= parts:
                slot = first
                del table.free_slots[number]
                break
        else:
            slot, table.num_parts = table.num_parts, table.num_parts + parts
        if self._merges:
            place = self._merges.pop()
        else:
            place, table.num_merges = table.num_merges, table.num_merges + 1
        table.merges[place] = query, slot, parts
        return slot

    def _enter(self, number: int, query: int, slot: int) -> bool:
        """Add an entry to a shared stretch; False where there is no room."""
        table, stretch = self._table, self._table.shared[number]
        if self._holes[number]:
            entry = self._holes[number].pop()
        elif stretch.count == stretch.room:
            return False
        else:
            entry = stretch.entry + stretch.count
            stretch.count += 1
        table.queries[entry], table.slots[entry] = query, slot
        return True

    def _place(self, num_pages: int) -> Place | None:
        """Find an entry and pages for an own stretch, or None."""
        table = self._table
        for number, place in enumerate(table.free_places):
            if place.num_pages >= num_pages:
                return table.free_places.pop(number)
        place = Place(table.num_entries, table.num_pages, num_pages)
        table.num_entries += 1
        table.num_pages += num_pages
        has_room = table.num_entries <= len(table.queries) and table.num_pages <= len(table.pages)
        return place if has_room else None

    def _cut_again(self, stretch: Shared) -> None:
        """Make the tiles of a shared stretch those of the queries that it has now."""
        table = self._table
        first = table.items[: table.num_items, Field.ENTRY] - stretch.entry
        mine = np.flatnonzero((first >= 0) & (first < stretch.room))
        first = first[mine]
        num = np.clip(stretch.count - first, 0, stretch.most)
        table.items[mine, Field.NUM_QUERIES] = num
        self._items += mine[num == 0].tolist()
        for begin in range(int(first.max()) + stretch.most, stretch.count, stretch.most):
            for item in table.items[mine[first == 0]].tolist():
                item[Field.ENTRY] = stretch.entry + begin
                item[Field.NUM_QUERIES] = min(stretch.count - begin, stretch.most)
                self._new.append((item, -1))


def _are_same(
    former: Tree, is_kept: NDArray[np.bool_], tree: Tree, stays: NDArray[np.bool_]
) -> bool:
    """Say whether two trees have the same stretches, each with the rows that stayed.

    Those that stayed stand in the same order in both. So a stretch is the same if it has the
    same blocks and as many of them stand before its rows, and before the end of its rows.

    Args:
        former: A tree.
        is_kept: [R] which of its rows stay.
        tree: The one that was made of it.
        stays: [R] which of its rows were in the former.
    """
    if len(former.first) != len(tree.first):
        return False
    bounds = []
    for each, kept in ((former, is_kept), (tree, stays)):
        before = np.zeros(len(kept) + 1, dtype=np.int64)
        kept[each.order].cumsum(out=before[1:])
        first, end = before[each.first], before[each.end]
        if (first == end).any():
            return False
        # Few numbers are compared several times as fast as bytes.
        bounds.append([each.begin_block.tobytes(), each.end_block.tobytes()])
        bounds[-1] += [first.tobytes(), end.tobytes()]
    return bounds[0] == bounds[1]
