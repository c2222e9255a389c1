"""The table of a step where it stands, lengthened as rows decode on.

What its words mean is told in `work`, which lays it out. Each part of it has room behind its
end, so that little moves when rows change (`edit`). While they decode on, the last item of each
reads a token more, and now and then a row has a page more.

Knows one table, no launches. Kept true: the words say what the header counts; what stands in
the room behind means nothing.

Shapes: R rows - I items - M merges - E entries - P pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .plan import Plan
from .tree import Integers

Words = NDArray[np.int32]


class Header(IntEnum):
    """Where a table says what it holds; offsets count from its beginning."""

    NUM_ITEMS = 0
    ITEMS = 1
    ENTRY_QUERIES = 2
    ENTRY_SLOTS = 3
    PAGES = 4
    NUM_MERGES = 5
    MERGES = 6


HEADER_SIZE: Final = 16


class Field(IntEnum):
    """The words of an item."""

    ENTRY = 0
    """Its first entry; the others follow."""
    NUM_QUERIES = 1
    PAGE = 2
    """Its first page, counted in the pages of the table."""
    OFFSET = 3
    """Its first token, counted in that page."""
    NUM_KV = 4
    PART = 5
    """Number of its chunk, or -1: it is all that its queries see."""
    LIMIT = 6
    """Its query j sees the keys before LIMIT + j."""
    FLOOR = 7
    """Under a window, its query j sees the keys from FLOOR + j on."""
    IS_LARGE = 8


ITEM_SIZE: Final = 16
MERGE_SIZE: Final = 3
NO_LIMIT: Final = 2**30
SPARE_BLOCKS: Final = 4
"""Blocks that a row may gain before the table is made anew."""
SPARE: Final = 64
"""Items, merges and entries that there is room for beside those of a new table."""
SPARE_PAGES: Final = 8
"""Of so many pages of a new table there is room for one more."""


@dataclass(slots=True)
class Shared:
    """A stretch that several rows read."""

    entry: int
    """Its first entry."""
    room: int
    """Entries that it may have."""
    count: int
    """Entries that it has: queries that read it."""
    most: int
    """Queries of a tile."""
    chunks: int
    """Parts that it gives each query."""
    is_large: bool


class Ends(NamedTuple):
    """What a table holds of each row's own stretch, [R] each."""

    kv_len: Integers
    """Tokens of the row when `num_kv` was taken down."""
    blocks: Integers
    """Blocks of the row then."""
    room: Integers
    """Blocks that the row may have."""
    last: Integers
    """The item of its last token."""
    num_kv: Integers
    """What that has to read."""
    page: Integers
    """Where in the pages that of the row's block 0 would stand."""
    entry: Integers
    """Its first entry."""

    def of(self, rows: Integers) -> Ends:
        """Return those of some rows."""
        return Ends(*(column[rows] for column in self))


class Place(NamedTuple):
    """What a row that left has left free."""

    entry: int
    page: int
    num_pages: int


@dataclass(slots=True, eq=False)
class Table:
    """Words with room behind each part, and what is known of them."""

    words: Words
    items: Words
    """View of the words, [I and room, ITEM_SIZE]."""
    merges: Words
    """View, [M and room, MERGE_SIZE]."""
    queries: Words
    """View: the query of each entry, [E and room]."""
    slots: Words
    """View: the slot of each entry, [E and room]."""
    pages: Words
    """View, [P and room]."""
    num_items: int
    num_merges: int
    num_entries: int
    num_pages: int
    num_parts: int
    """Slots that parts take, those between them included that nobody uses."""
    shared: list[Shared]
    """The stretches of the tree, in its order. Their entries come first."""
    ends: Ends
    query_start: Integers
    floor: Integers
    """Under a window, the FLOOR of each item when `ends` were taken down, [I]."""
    row_of: Integers
    """Under a window, the row of each item, [I]."""
    num_rows: int
    """Rows when the table was made."""
    num_changes: int = 0
    """Rows that came and went."""
    free_slots: list[tuple[int, int]] = field(default_factory=list)
    """First slot and number of those that queries which left had."""
    free_places: list[Place] = field(default_factory=list)

    @property
    def in_use(self) -> Words:
        """The words that a device has to have."""
        return self.words[: int(self.words[Header.PAGES]) + self.num_pages]

    def grow(self, plan: Plan, *, has_window: bool) -> bool:
        """Move the ends of all rows on; False where there is no room."""
        ends = self.ends
        grown = plan.kv_len - ends.kv_len
        if plan.num_queries != plan.num_rows or grown.min() < 0:
            return False
        blocks = -(-plan.kv_len // plan.block_size)
        if (blocks > ends.room).any():
            return False
        self.items[ends.last, Field.NUM_KV] = ends.num_kv + grown
        if has_window:
            self.items[: self.num_items, Field.FLOOR] = self.floor + grown[self.row_of]
        gained = blocks - ends.blocks
        rows = np.flatnonzero(gained)
        if len(rows):
            index = ranges(ends.blocks[rows], gained[rows])
            owner = np.repeat(rows, gained[rows])
            self.pages[ends.page[owner] + index] = plan.tables[owner, index]
        return True


def ranges(first: Integers, count: Integers) -> Integers:
    """Return first[i], first[i] + 1, ... count[i] times, for all i in a row."""
    before = np.cumsum(count) - count
    found: Integers = np.arange(int(count.sum())) + np.repeat(first - before, count)
    return found
