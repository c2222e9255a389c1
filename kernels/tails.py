"""The ends of decoding rows, side by side: what each query of a step reads alone.

A tail is padded to one width, so that one call multiplies all of its queries with keys of
their own. Its tokens lie all over the cache and have to be gathered; but from one decoding
step to the next each row only gains a token. So a tail can grow, and keeps what it has
gathered from each cache: a step then copies one token per row instead of all of them.

Knows slots and tensors of caches by address; refuses to know rows, plans and layers. Kept
true: what `read` returns is what the cache holds at the tail's tokens, as long as its caller
tells the truth about what was written; all tails together keep no more than their `Room`.

Shapes: n queries - W tokens of the widest - K kv heads - M slots - D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

KEPT_BYTES: Final = 2**27
"""What is kept of all caches at most; what is beyond is gathered in every step."""


@dataclass(slots=True)
class Room:
    """How much tails may keep together."""

    num_bytes: int = KEPT_BYTES


@dataclass(slots=True)
class _Kept:
    tokens: Tensor
    """[K * n * W, D]."""
    num_grown: int
    """How often the tail had grown when they were true."""


@dataclass(slots=True, eq=False)
class Tail:
    """Tokens that each of n queries reads alone."""

    lengths: Integers
    """Tokens of each query, [n], at least 1."""
    width: int
    index: Tensor
    """Slots, [n * W]; with `num_slots` counted through all heads, [K * n * W]. Padding repeats
    a slot of the same query."""
    bias: Tensor
    """0 where a query has a token, else -inf: [n, 1, W]."""
    num_slots: int | None
    """Slots of a head where heads lie one after the other."""
    room: Room
    num_grown: int = 0
    _kept: dict[int, _Kept] = field(default_factory=dict)
    _newest: Tensor | None = None
    """Where in [K * n * W] the tokens stand by which the tail grew last, [K * n]."""

    @property
    def can_grow(self) -> bool:
        """Whether there is room for one more token of each query."""
        return int(self.lengths.max()) < self.width

    def grow(self, slots: Integers) -> None:
        """Append one token to each query's, [n]; there must be room."""
        num = len(slots)
        new = torch.from_numpy(slots)
        places = torch.from_numpy(np.arange(num) * self.width + self.lengths)
        self.bias.view(-1).index_fill_(0, places, 0.0)
        if self.num_slots is not None:
            heads = torch.arange(len(self.index) // (num * self.width))[:, None]
            new = (heads * self.num_slots + new).view(-1)
            places = (heads * (num * self.width) + places).view(-1)
        self.index.index_copy_(0, places, new)
        self._newest = places
        self.lengths += 1
        self.num_grown += 1

    def read(self, rows: Tensor, *, is_stored: bool, is_same: bool) -> Tensor:
        """Return the tail's tokens of a cache, [K * n * W, D]. They are lent.

        Args:
            rows: The cache, [K * M, D].
            is_stored: Since the last `read` of this cache exactly the tokens were written to
                it by which the tail grew last.
            is_same: Since the last `read` nothing was written to it.
        """
        kept = self._kept.get(rows.data_ptr())
        if kept is None:
            tokens = rows.index_select(0, self.index)
            # Where steps do not go on nothing is kept.
            if self.num_grown and tokens.nbytes <= self.room.num_bytes:
                self.room.num_bytes -= tokens.nbytes
                self._kept[rows.data_ptr()] = _Kept(tokens, self.num_grown)
            return tokens
        if is_same and kept.num_grown == self.num_grown:
            return kept.tokens
        newest = self._newest
        if is_stored and newest is not None and kept.num_grown >= self.num_grown - 1:
            new = rows.index_select(0, self.index.index_select(0, newest))
            kept.tokens.index_copy_(0, newest, new)
        else:
            torch.index_select(rows, 0, self.index, out=kept.tokens)
        kept.num_grown = self.num_grown
        return kept.tokens

    def forget(self) -> None:
        """Keep nothing any more."""
        self.room.num_bytes += sum(kept.tokens.nbytes for kept in self._kept.values())
        self._kept.clear()
