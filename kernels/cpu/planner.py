"""The plan of each step, made by the C++ library; see `planning.planner`.

Shapes: R rows - T queries - N shared ranges.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, cast

import numpy as np

from ..planning.plan import Plan
from ..planning.planner import SPARE_COLUMNS, BlockTable, Planner
from ..planning.prefix_tree import Integers, PrefixTree
from .attention import NATIVE_PLAN, NativeLibrary, pack_plan

_REQUEST: Final = struct.Struct("@9P4q3d")
"""`PlanRequest` in planner.cpp."""
_INVALID, _NEW_TREE, _SAME_TREE = range(3)
"""`PlanStatus` in planner.cpp."""
_GROWTH: Final = 64
"""Further columns of new memory for block tables."""
_WORD: Final = 8
"""Bytes of a number."""


class NativePlanner(Planner):
    """Makes the same plans as `Planner`."""

    def __init__(self, native: NativeLibrary, **options: Any) -> None:
        """Plan for one cache; see `Planner` for the options."""
        super().__init__(**options)
        self._native: Final = native
        self._tables = np.zeros((0, 0), dtype=np.int32)
        """Block tables of the last step."""
        self._step = np.zeros(0, dtype=np.int64)
        """`num_new` and `kv_len` of the last step, and its results as in planner.cpp."""
        self._num_rows = 0
        """Rows of the last step; 0 if it was invalid."""
        self._words = np.zeros(0, dtype=np.int64)
        """The tree of the last step, as in planner.cpp."""
        self._tree = PrefixTree(*[self._words] * 6)
        # Kept, because reading an address takes microseconds.
        self._tables_address = self._step_address = self._words_address = 0

    def plan(
        self, num_new: Sequence[int], kv_len: Sequence[int], tables: Sequence[BlockTable]
    ) -> Plan:
        """Plan one step; see `build_plan` for the arguments and errors."""
        num = len(num_new)
        if not num == len(kv_len) == len(tables) or not num:
            return super().plan(num_new, kv_len, tables)  # raises the error
        arrays: Sequence[array[int]]
        if all(type(table) is array for table in tables):
            arrays = cast("Sequence[array[int]]", tables)
        else:
            arrays = [array("i", table) for table in tables]
        num_queries = max(0, sum(num_new))
        # num_new, kv_len, address and length of each table; then as `step` in planner.cpp
        step = np.empty(5 * num + 2 + 2 * num_queries, dtype=np.int64)
        step[:num], step[num : 2 * num] = num_new, kv_len
        places = chain.from_iterable(map(array.buffer_info, arrays))
        step[2 * num : 4 * num] = np.fromiter(places, np.int64, 2 * num)
        words = np.empty(7 * num + 1, dtype=np.int64)
        self._reserve(num, -(-max(kv_len) // self._block_size) + SPARE_COLUMNS)
        address, words_address = step.ctypes.data, words.ctypes.data
        request = _REQUEST.pack(
            address,
            address + _WORD * num,
            address + _WORD * 2 * num,
            self._step_address,
            self._step_address + _WORD * self._num_rows,
            self._words_address,
            self._tables_address,
            address + _WORD * 4 * num,
            words_address,
            num,
            self._num_rows,
            self._tables.shape[1],
            self._block_size,
            *self._cost,
        )
        status = self._native.functions.conure_plan(request)
        if status == _INVALID:
            self._num_rows = 0
            return super().plan(num_new, kv_len, tables)  # raises the error
        self._step, self._step_address, self._num_rows = step, address, num
        if status == _NEW_TREE:
            self._words, self._words_address = words, words_address
            self._tree = _read_tree(words, num)
            self.num_trees += 1
        return self._assemble(num, num_queries)

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        """Make room for block tables. More room discards those of the last step."""
        rows, columns = self._tables.shape
        if num_rows > rows or num_columns > columns:
            shape = max(rows, num_rows), max(columns, num_columns + _GROWTH)
            self._tables = np.full(shape, -1, dtype=np.int32)
            self._tables_address = self._tables.ctypes.data
            self._num_rows = 0

    def _assemble(self, num: int, num_queries: int) -> Plan:
        """Return the plan whose numbers planner.cpp wrote."""
        step, tree, tables = self._step, self._tree, self._tables[:num]
        start = 4 * num + 1
        positions = start + num + 1
        slots = positions + num_queries
        order, num_ranges = self._words_address + _WORD * (num + 1), len(tree.first)
        private = order + _WORD * num
        ranges = private + _WORD * num
        addresses = (
            self._step_address,
            self._step_address + _WORD * num,
            self._tables_address,
            self._step_address + _WORD * start,
            order,
            ranges,
            ranges + _WORD * num_ranges,
            ranges + _WORD * 2 * num_ranges,
            ranges + _WORD * 3 * num_ranges,
            private,
        )
        sizes = (num, num_ranges, tables.shape[1], self._block_size)
        return Plan(
            block_size=self._block_size,
            num_new=step[:num],
            kv_len=step[num : 2 * num],
            tables=tables,
            query_start=step[start:positions],
            positions=step[positions:slots],
            slots=step[slots:],
            max_block=int(step[start - 1]),
            tree=tree,
            derived={NATIVE_PLAN: pack_plan(addresses, sizes, (step, self._words, self._tables))},
        )


def _read_tree(words: Integers, num: int) -> PrefixTree:
    """Return the tree that planner.cpp wrote."""
    first, num_ranges = 3 * num + 1, int(words[num])
    ranges = words[first : first + 4 * num_ranges].reshape(4, num_ranges)
    order, private_start = words[num + 1 : 2 * num + 1], words[2 * num + 1 : first]
    first_row, end_row, begin_block, end_block = ranges
    return PrefixTree(order, first_row, end_row, begin_block, end_block, private_start)
