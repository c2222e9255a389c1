"""Products of few rows with a matrix of their own, as sums of bags.

A decoding query has keys and values that nobody else reads, and for each kv head no more rows
than the heads of a group. torch's matrix products first copy such keys into an order of their
own, which takes longer than to multiply them. `torch.embedding_bag` adds up rows of a table by
weights, in float32 until the end, and copies nothing. Weights times values are a bag for each
query and head, read where they lie in the cache. Scores are bags as well, where keys are kept
turned over: then a row of the table is one number of all keys, and the query is the weights.

Knows tables and indices; refuses to know what they are of. Kept true: rows of the table that no
index names are not read.

Shapes: R rows of a table of E numbers - B bags of C rows each.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

MOST_ROWS: Final = 4
"""Heads of a group at most: each reads the matrix for itself, products read it once for all."""


class Bags(NamedTuple):
    """Which rows of a table are added up."""

    rows: Tensor
    """[.., C] int64, contiguous: those of each bag."""
    offsets: Tensor
    """[B + 1] where each bag begins, and the end of the last."""

    @staticmethod
    def of(index: Tensor) -> Bags:
        """Return the bags of an index [.., C]."""
        index = index.contiguous()
        return Bags(index, torch.arange(0, index.numel() + 1, index.shape[-1]))


def can_bag(rows: Tensor) -> bool:
    """Say whether rows [.., G, C] of each matrix are sooner multiplied by bags."""
    return rows.dtype.itemsize == 2 and rows.shape[-2] <= MOST_ROWS


def add_up(table: Tensor, bags: Bags, weights: Tensor) -> Tensor:
    """Return [.., E]: the rows of each bag, times their weights, added up.

    Args:
        table: [R, E] contiguous.
        bags: Indices below R.
        weights: [.., C] as the rows, in the dtype of the table.
    """
    found, *_ = torch.embedding_bag(
        table,
        bags.rows.view(-1),
        bags.offsets,
        mode=0,
        per_sample_weights=weights.reshape(-1),
        include_last_offset=True,
    )
    return found.view(*weights.shape[:-1], -1)
