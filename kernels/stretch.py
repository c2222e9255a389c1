"""Stretches of the cache that queries read, and copies of them in one piece each.

Blocks of a row lie all over a cache, and to gather them costs as much as to attend to them;
even of neighbours each head is a matrix far from the next, which torch's products copy first.
But from one decoding step to the next nothing in them changes, and each row only gains a token.
So a stretch keeps what it has gathered from each cache for the steps that go on. What there is
no room to keep is read in place where its slots are neighbours.

A `Stretch` is read by several queries. A `Tail` is what each query of a step reads alone: the
ends of decoding rows side by side, padded to one width, so that one call multiplies all of
them with keys of their own. They are aligned at their ends and gain their tokens in the same
column: a step copies one token per row, and only one column of what is kept changes. Keys
that are read by bags are kept turned over; values that are read so are kept not at all, for
bags read them in place.

Knows slots and tensors of caches by address; refuses to know rows, plans and layers. Kept
true: what `read` returns is what the cache holds at those slots, as long as its caller tells
the truth about what was written; all stretches together keep no more than their `Room`.

Shapes: n queries - W columns - L slots - K kv heads - M slots of a cache - D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .bags import Bags

Integers = NDArray[np.int64]

KEPT_BYTES: Final = 2**28
"""What is kept of all caches at most; what is beyond is gathered in every step."""


@dataclass(slots=True)
class Room:
    """How much stretches may keep together."""

    num_bytes: int = KEPT_BYTES


class Stored(NamedTuple):
    """A cache in two views, and what happened to it."""

    heads: Tensor
    """[K, M, D]."""
    rows: Tensor | None
    """[K * M, D], where heads lie one after the other: rows are gathered faster."""
    is_stored: bool
    """Since this cache was read last exactly the new tokens of the step were written to it."""
    is_same: bool
    """Since this cache was read last nothing was written to it."""

    def gather(self, index: Tensor) -> Tensor:
        """Return slots of every head, [K * n, D]: an index of `through`."""
        if self.rows is None:
            return pick(self.heads, index).flatten(0, 1)
        return self.rows.index_select(0, index)

    def through(self, slots: Tensor) -> Tensor:
        """Return an index of slots for `gather`: where it can, it counts through all heads."""
        if self.rows is None:
            return slots
        kv_heads, num_slots, _ = self.heads.shape
        return (torch.arange(kv_heads)[:, None] * num_slots + slots).view(-1)


@dataclass(slots=True)
class _Kept:
    tokens: Tensor
    step: int
    """When they were last true."""


class Stretch:
    """Slots that are read together, [L]; in a `Tail` [n, W]."""

    def __init__(self, slots: Integers, room: Room) -> None:
        """Name slots of a cache; `room` is for what is kept of it."""
        self._slots: Final = slots
        self._run: Final = run_of(slots) if slots.ndim == 1 else None
        self._room: Final = room
        self._step = 0
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._index: Tensor | None = None

    def go_on(self) -> None:
        """Begin a step that reads the same slots again, where the tokens of others are new."""
        self._step += 1

    def read(self, cache: Stored, *, is_turned: bool = False) -> Tensor:
        """Return what a cache holds there, [K, L, D]; of a `Tail` [K, n, W, D]. It is lent.

        With `is_turned` the last two dimensions change places in memory, if it can be kept.
        """
        kv_heads, _, dim = cache.heads.shape
        # Values may be the first part of the keys: then they begin where these do.
        address = cache.heads.data_ptr(), dim
        kept = self._kept.get(address)
        if kept is None:
            num_bytes = self._slots.size * kv_heads * dim * cache.heads.itemsize
            if num_bytes <= self._room.num_bytes:
                self._room.num_bytes -= num_bytes
                tokens = self._gather(cache)
                if is_turned:
                    tokens = tokens.transpose(-2, -1).contiguous().transpose(-2, -1)
                self._kept[address] = _Kept(tokens, self._step)
                return tokens
            return self._gather(cache) if self._run is None else cache.heads[:, self._run]
        if not cache.is_same or kept.step < self._step:
            if cache.is_stored and kept.step >= self._step - 1:
                self._renew(kept.tokens, cache)
            else:
                kept.tokens.copy_(self._gather(cache))
            kept.step = self._step
        return kept.tokens

    def forget(self) -> None:
        """Keep nothing any more."""
        self._room.num_bytes += sum(kept.tokens.nbytes for kept in self._kept.values())
        self._kept.clear()

    def _renew(self, tokens: Tensor, cache: Stored) -> None:
        """Bring tokens up to date that lack what this step alone has written.

        The new tokens of a later step are others; those of the first may be among these.
        """
        if self._step == 0:
            tokens.copy_(self._gather(cache))

    def _gather(self, cache: Stored) -> Tensor:
        if self._run is not None:
            return cache.heads[:, self._run].contiguous()
        if self._index is None:
            self._index = cache.through(torch.from_numpy(self._slots.reshape(-1)))
        found = cache.gather(self._index)
        return found.view(len(cache.heads), *self._slots.shape, -1)


class Tail(Stretch):
    """Tokens that each of n queries reads alone, [n, W]."""

    def __init__(
        self, stretches: Sequence[Integers], width: int, dtype: torch.dtype, room: Room
    ) -> None:
        """Align stretches.

        Args:
            stretches: Slots of each query, none of them empty.
            width: Columns, at least as many as the longest stretch has slots.
            dtype: Of the bias.
            room: For what is kept.
        """
        self._used = begin = max(map(len, stretches))
        lengths = np.array([len(stretch) for stretch in stretches])
        slots = np.empty((len(stretches), width), dtype=np.int64)
        for row, stretch in zip(slots, stretches, strict=True):
            # What fills up is a slot of the same query: its bias hides it.
            row[:] = stretch[0]
            row[begin - len(stretch) : begin] = stretch
        super().__init__(slots, room)
        columns = np.arange(width)
        unseen = (columns < begin - lengths[:, None]) | (columns >= begin)
        self.bias: Final = torch.from_numpy(np.where(unseen, -np.inf, 0.0))[:, None].to(dtype)
        """0 where a query has a token, else -inf: [n, 1, W]."""
        self._newest: Tensor | None = None
        """Where the tokens stand by which the tail grew last; see `Stored.through`."""
        # Made once for all layers of a kind: by heads, and by slots or head dim.
        self._places: dict[tuple[int, int, int], Bags] = {}
        self._turned: dict[tuple[int, int, int], Bags] = {}

    @property
    def num_queries(self) -> int:
        """How many stretches stand side by side."""
        return len(self._slots)

    @property
    def can_grow(self) -> bool:
        """Whether there is room for one more token of each query."""
        return self._used < int(self._slots.shape[1])

    def grow(self, slots: Integers) -> None:
        """Go on with one more token of each query, [n]; there must be room."""
        self.go_on()
        self._slots[:, self._used] = slots
        self.bias[:, :, self._used] = 0.0
        for (kv_heads, num_slots, _), bags in self._places.items():
            bags.rows[..., self._used] = _through(torch.from_numpy(slots), kv_heads, num_slots)
        self._used += 1
        self._index = self._newest = None

    def places(self, cache: Stored, group: int) -> Bags:
        """Return which rows of a cache each query reads, for every head: [K, n, G, W]."""
        kv_heads, num_slots, _ = cache.heads.shape
        bags = self._places.get((kv_heads, num_slots, group))
        if bags is None:
            index = _through(torch.from_numpy(self._slots), kv_heads, num_slots)
            bags = Bags.of(index.expand(-1, -1, group, -1))
            self._places[kv_heads, num_slots, group] = bags
        return bags

    def turned(self, kv_heads: int, group: int, dim: int) -> Bags:
        """Return which rows of what is kept turned over each query reads: [K, n, G, D]."""
        bags = self._turned.get((kv_heads, group, dim))
        if bags is None:
            index = torch.arange(kv_heads * self.num_queries * dim)
            index = index.view(kv_heads, self.num_queries, 1, dim)
            bags = self._turned[kv_heads, group, dim] = Bags.of(index.expand(-1, -1, group, -1))
        return bags

    def _renew(self, tokens: Tensor, cache: Stored) -> None:
        column = self._used - 1
        if self._newest is None:
            self._newest = cache.through(torch.from_numpy(self._slots[:, column].copy()))
        new = cache.gather(self._newest)
        tokens.select(2, column).copy_(new.view(len(tokens), len(self._slots), -1))


def _through(slots: Tensor, kv_heads: int, num_slots: int) -> Tensor:
    """Return slots [n, ..] as rows of all heads, [K, n, 1, ..]."""
    heads = torch.arange(kv_heads).view(-1, *[1] * slots.dim()) * num_slots
    return (heads + slots).unsqueeze(2)


def pick(heads: Tensor, slots: Tensor) -> Tensor:
    """Return some slots [n] of every head [K, M, D]."""
    # `index_select` is fast, but of memory in another order it first copies all there is.
    return heads.index_select(1, slots) if heads.is_contiguous() else heads[:, slots]


def run_of(numbers: Integers) -> slice | None:
    """Return a slice where the numbers follow each other."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first != len(numbers) - 1 or not (np.diff(numbers) == 1).all():
        return None
    return slice(first, last + 1)
