"""The work table of a step: int32 words for the device, extended in place while rows decode.

While all rows only decode, the last work item of each row reads one token more per step, and
now and then a row gets one more page. `WorkTable.extend` writes these changes; any other change
needs a new table.

Out of scope: how work is divided (`partition`, `builder`) and launches.

Shapes: R rows - I items - M merges - E entries - P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...planning.plan import Plan
from ...planning.prefix_tree import Integers

Words = NDArray[np.int32]


class TableHeader(IntEnum):
    """The words of the header; the offsets count from the first word of the table."""

    NUM_ITEMS = 0
    ITEMS = 1
    ENTRY_QUERIES = 2
    ENTRY_SLOTS = 3
    PAGES = 4
    NUM_MERGES = 5
    MERGES = 6
    QUERY_PARTIALS = 7
    NUM_LARGE = 8
    """Items with many rows; they precede the others."""
    PAGE_OWNERS = 9


HEADER_SIZE: Final = 16


class ItemField(IntEnum):
    """The words of an item."""

    ENTRY = 0
    """First entry; the other entries of the item follow it."""
    NUM_QUERIES = 1
    PAGE = 2
    """First page, as an index into the table's pages."""
    OFFSET = 3
    """First token, as an offset into that page."""
    NUM_KV = 4
    CHUNK = 5
    """Index of the chunk, or -1 if the item is everything that its queries see."""
    LIMIT = 6
    """Query j of the item sees the keys before LIMIT + j."""
    FLOOR = 7
    """Under a window, query j of the item sees the keys from FLOOR + j on."""
    IS_LARGE = 8
    OWNERS = 9
    """First word of the pages of a packed item, as an index into the page owners; otherwise -1.
    The word of a page is the index of the query that sees it, times `OWNER`, plus its tokens."""


ITEM_SIZE: Final = 16
MERGE_SIZE: Final = 3
QUERY_PARTIALS_SIZE: Final = 2
TICKET_WORDS: Final = 16
"""Words of the counters before those of the queries; the first two count the tickets of small and
of large items."""
OWNER: Final = 2**16
NO_LIMIT: Final = 2**30
SPARE_BLOCKS: Final = 4
"""Blocks that a row may start before the table is rebuilt."""


class RowTails(NamedTuple):
    """The end of each row's own range when the table was built.

    Shapes: R rows - N rows whose range is not packed.
    """

    rows: Integers
    """The rows that are not packed, [N]."""
    kv_len: Integers
    """Tokens of each row, [R]."""
    blocks: Integers
    """Blocks of each row, [R]."""
    last_item: Integers
    """The item that reads the row's last token, [N]."""
    num_kv: Integers
    """Tokens that this item reads, [N]."""
    page: Integers
    """Index of the row's block 0 in the table's pages, as if all its blocks were there, [N]."""


class PackedRows(NamedTuple):
    """The rows of packed items. The arrays and dictionaries change with the table.

    Shapes: N rows of packed items.
    """

    rows: Integers
    """[N]."""
    place: Integers
    """Index of the row's query in its item, [N]."""
    item: Integers
    """[N]."""
    last: Integers
    """Index of the word of the row's last page, [N]."""
    page_shift: Integers
    """Index of a page less that of its word, [N]."""
    blocks: Integers
    """Blocks of the row, [N]."""
    used: dict[int, int]
    """Index after the words of used pages, by item."""
    end: dict[int, int]
    """Index after the words of all pages, by item."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkTable:
    """The words of a table, and what is needed to extend them."""

    words: Words
    items: Words
    """View of the words, [I, ITEM_SIZE]."""
    pages: Words
    """View of the words, [P]."""
    owners: Words
    """View of the words: a word of each page of the packed items."""
    num_merges: int
    """Number of queries with several partials."""
    num_partials: int
    """Number of slots for partials."""
    tails: RowTails
    packs: PackedRows
    floor: Integers
    """Under a window, the FLOOR of each item when the table was built, [I]."""
    row_of: Integers
    """Under a window, the row of each item, [I]."""

    def extend(self, plan: Plan, *, has_window: bool) -> bool:
        """Extend all rows to the lengths of a plan; return False if a row needs more room."""
        tails = self.tails
        added = plan.kv_len - tails.kv_len
        blocks = -(-plan.kv_len // plan.block_size)
        if (blocks > tails.blocks + SPARE_BLOCKS).any():
            return False
        if len(self.packs.rows) and not self._extend_packs(plan):
            return False
        self.items[tails.last_item, ItemField.NUM_KV] = tails.num_kv + added[tails.rows]
        if has_window:
            self.items[:, ItemField.FLOOR] = self.floor + added[self.row_of]
        new_blocks = (blocks - tails.blocks)[tails.rows]
        grown = np.flatnonzero(new_blocks)
        if len(grown):
            index = ranges(tails.blocks[tails.rows[grown]], new_blocks[grown])
            owner = np.repeat(grown, new_blocks[grown])
            self.pages[tails.page[owner] + index] = plan.tables[tails.rows[owner], index]
        return True

    def _extend_packs(self, plan: Plan) -> bool:
        """Extend the rows of packed items; return False if an item has no page left."""
        packs = self.packs
        blocks = -(-plan.kv_len[packs.rows] // plan.block_size)
        for index in np.flatnonzero(blocks > packs.blocks).tolist():
            row, item, place = (int(each[index]) for each in (packs.rows, packs.item, packs.place))
            for block in range(int(packs.blocks[index]), int(blocks[index])):
                word = packs.used[item]
                if word == packs.end[item]:
                    return False
                self.owners[packs.last[index]] = place * OWNER + plan.block_size
                self.pages[word + packs.page_shift[index]] = plan.tables[row, block]
                packs.last[index], packs.used[item] = word, word + 1
                self.items[item, ItemField.NUM_KV] += plan.block_size
        packs.blocks[:] = blocks
        tokens = plan.kv_len[packs.rows] - (blocks - 1) * plan.block_size
        self.owners[packs.last] = packs.place * OWNER + tokens
        return True


def ranges(first: Integers, count: Integers) -> Integers:
    """Return first[i], first[i] + 1, ... of length count[i], concatenated over i."""
    before = np.cumsum(count) - count
    numbers: Integers = np.arange(int(count.sum())) + np.repeat(first - before, count)
    return numbers
