"""Random trees of block tables, as made by contexts that were forked from forks."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conure.kernels.ops import AttentionOperations
from tests.kernels.implementations import TRITON_DEVICE


def device_of(operations: AttentionOperations) -> torch.device:
    """Return the device that an implementation computes on."""
    return TRITON_DEVICE if operations.name == "triton" else torch.device("cpu")


class Rows(NamedTuple):
    """The rows of one step, and the number of blocks that their cache needs."""

    num_new: list[int]
    kv_len: list[int]
    tables: list[list[int]]
    num_blocks: int


def random_rows(
    seed: int,
    *,
    levels: int,
    block_size: int,
    max_rows: int = 12,
    max_new: int = 9,
) -> Rows:
    """Return rows over a tree of `levels` levels with odd lengths and permuted blocks.

    Forks may split a block: the child then has its own copy of that block. Some rows have one
    new token, others several. A row may read blocks that an earlier row of the step writes.
    """
    rng = random.Random(seed)
    fresh = iter(rng.sample(range(4096), 4096))
    contexts: list[tuple[list[int], int]] = [([], 0)] * (1 if rng.random() < 0.8 else 2)
    for _ in range(levels):
        grown = []
        for table, length in contexts:
            for _ in range(rng.choice((1, 2, 3))):
                end = length + rng.choice((1, 5, block_size, 2 * block_size + 3, 40))
                # The child copies a block that it shares only partly.
                shared = list(table[: length // block_size])
                while len(shared) * block_size < end:
                    shared.append(next(fresh))
                grown.append((shared, end))
        contexts = rng.sample(grown, min(len(grown), max_rows))
    num_new = [min(length, rng.choice((1, 1, 1, 2, max_new))) for _, length in contexts]
    tables = [table for table, _ in contexts]
    used = sorted({block for table in tables for block in table})
    # Half of the cache's blocks are unused, at random places.
    ids = dict(zip(used, rng.sample(range(2 * len(used)), len(used)), strict=True))
    return Rows(
        num_new,
        [length for _, length in contexts],
        [[ids[block] for block in table] for table in tables],
        2 * len(used),
    )


def random_caches(
    seed: int, rows: Rows, *, block_size: int, kv_heads: int, head_dim: int, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Return float64 caches whose slots outside the rows hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.zeros(rows.num_blocks * block_size, dtype=torch.bool)
    for table, length in zip(rows.tables, rows.kv_len, strict=True):
        for position in range(length):
            used[table[position // block_size] * block_size + position % block_size] = True
    caches = []
    for dim in (head_dim, value_dim):
        cache = torch.randn(
            rows.num_blocks * block_size, kv_heads, dim, generator=generator, dtype=torch.float64
        )
        cache[~used] = float("nan")
        caches.append(cache.view(rows.num_blocks, block_size, kv_heads, dim))
    return caches[0], caches[1]


def comb(levels: int, *, block_size: int) -> Rows:
    """Return rows that branch off one spine one after the other: the last has every level."""
    spine = [3 * block % 31 for block in range(2 * (levels - 1))]
    rows = [[*spine[: 2 * min(row + 1, levels - 1)], 31 + row] for row in range(levels)]
    lengths = [(len(table) - 1) * block_size + 1 + row for row, table in enumerate(rows)]
    return Rows([1] * levels, lengths, rows, 31 + levels)


def expected_slots(rows: Rows, block_size: int, window: int | None) -> list[Counter[int]]:
    """Return the slots that each query must read once, from the definition."""
    expected = []
    for new, length, table in zip(rows.num_new, rows.kv_len, rows.tables, strict=True):
        for position in range(length - new, length):
            first = 0 if window is None else max(0, position - window + 1)
            expected.append(
                Counter(
                    table[p // block_size] * block_size + p % block_size
                    for p in range(first, position + 1)
                )
            )
    return expected


TableType = Callable[[list[int]], Any]


def as_array(blocks: list[int]) -> array[int]:
    """Return a block table as the engine stores it."""
    return array("i", blocks)


TABLE_TYPES: tuple[TableType, ...] = (list, as_array)


class RandomSteps:
    """Contexts that decode, join and leave, and whose blocks are replaced."""

    def __init__(self, seed: int, block_size: int, table_type: TableType) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.table_type = table_type
        rows = random_rows(seed, levels=3, block_size=block_size)
        self.num_new = rows.num_new
        self.lengths = rows.kv_len
        self.tables: list[Any] = [table_type(table) for table in rows.tables]
        self.unused_block = rows.num_blocks

    def decode(self) -> None:
        """Make every row one token longer."""
        self.num_new = [1] * len(self.tables)
        self.lengths = [length + 1 for length in self.lengths]
        for table, length in zip(self.tables, self.lengths, strict=True):
            if len(table) * self.block_size < length:
                # Sometimes two rows get the same block: one reads what the other wrote.
                table.append(self.unused_block)
                self.unused_block += self.rng.random() < 0.7

    def disturb(self) -> None:
        """Change the batch so that the last plan cannot be continued."""
        row = self.rng.randrange(len(self.tables))
        table, change = self.tables[row], self.rng.randrange(5)
        if change == 0 and len(self.tables) > 1:
            del self.tables[row], self.lengths[row], self.num_new[row]
        elif change == 1:
            self.tables.insert(row, self.table_type(list(table)))
            self.lengths.insert(row, self.lengths[row])
            self.num_new.insert(row, self.num_new[row])
        elif change == 2:
            table[self.rng.randrange(len(table))] = self.unused_block
            self.unused_block += 1
        elif change == 3:
            self.num_new[row] = min(self.lengths[row], 3)
        else:
            other = self.rng.randrange(len(self.tables))
            shared = min(len(self.tables[other]), len(table) - 1)
            table[:shared] = self.tables[other][:shared]
