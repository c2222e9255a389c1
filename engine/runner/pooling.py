"""Sums of hidden states over the tokens of rows, for embeddings.

Shapes: T packed tokens - H hidden size - P rows whose hidden states are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import ScheduledSequence


class PooledTokens(NamedTuple):
    """The tokens of one row that are summed."""

    row: ScheduledSequence
    begin: int
    """First packed token."""
    end: int


def pooled_tokens(rows: Sequence[ScheduledSequence]) -> list[PooledTokens]:
    """Return the packed tokens of a step whose hidden states are summed."""
    found = []
    offset = 0
    for row in rows:
        if row.pool_from is not None and row.pool_from < row.length:
            begin = offset + max(0, row.pool_from - row.start)
            found.append(PooledTokens(row, begin, offset + row.num_new))
        offset += row.num_new
    return found


def sums(hidden: Tensor, pooled: Sequence[PooledTokens]) -> Tensor:
    """Return the sums [P, H] of hidden states [T, H], in float32."""
    return torch.stack([hidden[each.begin : each.end].float().sum(0) for each in pooled])


def set_hidden_sums(values: Tensor, pooled: Sequence[PooledTokens]) -> None:
    """Set the sums of the rows."""
    for each, total in zip(pooled, values.tolist(), strict=True):
        each.row.hidden_sum = total


@contextmanager
def last_hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """Yield a list that receives the states [T, H] that a model's output layer reads."""
    states: list[Tensor] = []

    def keep(module: Any, given: Any, output: Any) -> None:
        states.append(output.last_hidden_state[0])

    hook = model.base_model.register_forward_hook(keep)
    try:
        yield states
    finally:
        hook.remove()
