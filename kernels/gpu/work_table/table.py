"""The work table of a step: int32 words for the device, extended in place while rows decode.

While all rows only decode, the last work item of each row reads one token more per step, and a row
gets one more page (a block of the KV cache) when its last one is full. `WorkTable.extend` writes
these changes; any other change needs a new table.

An entry is one query of one KV range. A partial is the result of a query for one chunk of the
range; a slot is the place of a partial in memory. Programs draw tickets from a counter: each ticket
is the number of an item and KV head to compute.

Out of scope: how work is divided (`partition`, `builder`) and launches.

Shapes: R rows - I items - P pages.
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


class ItemField(IntEnum):
    """The words of an item."""

    ENTRY = 0
    """Index in the table of the first entry's query; those of the other entries follow."""
    NUM_QUERIES = 1
    PAGE = 2
    """Index of the first page."""
    OFFSET = 3
    """First token, as an offset into that page."""
    NUM_KV = 4
    """Tokens that the item reads."""
    CHUNK = 5
    """Index of the chunk, or -1 if the item is everything that its queries see."""
    LIMIT = 6
    """Query j of the item sees the keys before LIMIT + j."""
    FLOOR = 7
    """Under a window, query j of the item sees the keys from FLOOR + j on."""
    IS_LARGE = 8
    NUM_ITEMS = 9
    """Number of items of this size in the table; also set in places without an item."""
    SLOTS = 10
    """Index of the first partial slot of the item's first entry."""
    QUERY_PARTIALS = 11
    """Index of the partials of query 0."""


ITEM_SIZE: Final = 16
"""Words of an item."""
SIZES: Final = 2
"""Number of item sizes; places of small and of large items alternate."""
MERGE_SIZE: Final = 4
"""Words of a merge."""
MERGE_PLACES: Final = 256
"""Merges that each table has room for."""
QUERY_PARTIALS_SIZE: Final = 2
TICKET_WORDS: Final = 16
"""Counter words before the counters of the queries. The first two count the tickets with which
programs take small and large items."""
NO_LIMIT: Final = 2**30
SPARE_BLOCKS: Final = 4
"""Blocks by which a row may grow before the table must be rebuilt."""


class RowTails(NamedTuple):
    """The end of each row's private range when the table was built, [R] each."""

    kv_len: Integers
    """Tokens of the row."""
    blocks: Integers
    """Blocks of the row."""
    last_item: Integers
    """The item that reads the row's last token."""
    num_kv: Integers
    """Tokens that this item reads."""
    page: Integers
    """Index that the row's block 0 would have in the table's pages if all its blocks were there;
    may be negative."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkTable:
    """The words of a table, and what is needed to extend them."""

    words: Words
    first_item: int
    """Index of the first item."""
    items: Words
    """View of the words: the places of items, [I, ITEM_SIZE]."""
    pages: Words
    """View of the words, [P]."""
    num_merges: int
    """Number of queries with several partials."""
    num_partials: int
    """Number of slots for partials."""
    tails: RowTails
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
        self.items[tails.last_item, ItemField.NUM_KV] = tails.num_kv + added
        if has_window:
            self.items[:, ItemField.FLOOR] = self.floor + added[self.row_of]
        new_blocks = blocks - tails.blocks
        rows = np.flatnonzero(new_blocks)
        if len(rows):
            index = ranges(tails.blocks[rows], new_blocks[rows])
            owner = np.repeat(rows, new_blocks[rows])
            self.pages[tails.page[owner] + index] = plan.tables[owner, index]
        return True


def ranges(first: Integers, count: Integers) -> Integers:
    """Return first[i], first[i] + 1, ... of length count[i], concatenated over i."""
    before = np.cumsum(count) - count
    numbers: Integers = np.arange(int(count.sum())) + np.repeat(first - before, count)
    return numbers
