"""Random trees of block tables, as contexts that fork from forks make them."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The rows of one step and how many blocks a cache must have for them."""

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

    Forks may fall into the middle of a block: the child then has a block of its own there.
    Some rows decode one token, others bring several; a row may read blocks that an earlier
    row of the step writes.
    """
    rng = random.Random(seed)
    fresh = iter(rng.sample(range(4096), 4096))
    contexts: list[tuple[list[int], int]] = [([], 0)] * (1 if rng.random() < 0.8 else 2)
    for _ in range(levels):
        grown = []
        for table, length in contexts:
            for _ in range(rng.choice((1, 2, 3))):
                end = length + rng.choice((1, 5, block_size, 2 * block_size + 3, 40))
                # A block that is only partly the parent's is the child's own copy.
                shared = list(table[: length // block_size])
                while len(shared) * block_size < end:
                    shared.append(next(fresh))
                grown.append((shared, end))
        contexts = rng.sample(grown, min(len(grown), max_rows))
    num_new = [min(length, rng.choice((1, 1, 1, 2, max_new))) for _, length in contexts]
    tables = [table for table, _ in contexts]
    used = sorted({block for table in tables for block in table})
    # Half of the cache's blocks belong to nobody, in between.
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
    """Return rows that leave one spine one after the other: the last reads every level."""
    spine = [3 * block % 31 for block in range(2 * (levels - 1))]
    rows = [[*spine[: 2 * min(row + 1, levels - 1)], 31 + row] for row in range(levels)]
    lengths = [(len(table) - 1) * block_size + 1 + row for row, table in enumerate(rows)]
    return Rows([1] * levels, lengths, rows, 31 + levels)
