"""The work of a step as flat tables."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


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
MERGE_SIZE: Final = 3


class Field(IntEnum):
    """The words of an item."""

    ENTRY = 0
    NUM_QUERIES = 1
    PAGE = 2
    OFFSET = 3
    NUM_KV = 4
    PART = 5
    LIMIT = 6
    FLOOR = 7
    IS_LARGE = 8


ITEM_SIZE: Final = 16
