"""One step as the device sees it: packed tokens, where their KV lies, and what attends.

`pack` writes rows down as arrays, on the host. `Attention` stands behind the model's layers
while the step runs there: it stores keys and values and attends by the plan.

A step of decode rows alone may be *padded* to one of few numbers of rows, so that its arrays
have known shapes. What fills up is no row of the plan: tokens whose KV goes to a scratch block
that nobody reads, and whose results are thrown away.

Knows rows, plans and caches; refuses to know the model and what is done with its logits.

Shapes: T packed tokens - R rows - S sampling rows - H query heads - K kv heads - D, E head
dims of keys, values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from conure.kernels import ops
from conure.kernels.plan import Plan
from conure.kernels.planner import Planner

from .api import Limits
from .runner import Row
from .trial import Layer

Integers = NDArray[np.int64]
Caches = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


class Packed(NamedTuple):
    """The rows of a step on the host."""

    plan: Plan
    ids: Integers
    """[T] tokens."""
    last: Integers
    """[S] packed tokens whose logits are wanted."""
    unread: Integers | None = None
    """[2, U] packed tokens that the host does not know (their `ids` are 0), and which of the
    ids of the step before they are; None where it knows all."""

    def arrays(self, sizes: tuple[int, int] | None, scratch: int) -> list[Integers]:
        """Return ids, positions, slots and `last` as the device gets them.

        Args:
            sizes: Tokens to fill up to, and wanted ones; None leaves them as they are.
            scratch: The block of tokens that fill up.
        """
        arrays = [self.ids, self.plan.positions, self.plan.slots]
        if sizes is None:
            return [*arrays, self.last]
        rests = (0, 0, scratch * self.plan.block_size)
        filled = [_filled(array, sizes[0], rest) for array, rest in zip(arrays, rests, strict=True)]
        return [*filled, _filled(self.last, sizes[1], 0)]


def pack(rows: Sequence[Row], planner: Planner) -> Packed:
    """Write at least one row down."""
    plan = planner.plan(
        [row.num_new for row in rows],
        [row.start + row.num_new for row in rows],
        [row.blocks for row in rows],
    )
    wanted = [index for index, row in enumerate(rows) if row.sampling is not None]
    last = plan.query_start[1:][wanted] - 1
    follows = [row.follows for row in rows]
    known = [
        row.ids[row.start : row.start + row.num_new] if place is None else (0,)
        for row, place in zip(rows, follows, strict=True)
    ]
    ids = np.fromiter(chain.from_iterable(known), np.int64, plan.num_queries)
    pairs = [
        (at, place)
        for at, place in zip(plan.query_start, follows, strict=False)
        if place is not None
    ]
    return Packed(plan, ids, last, np.array(pairs, np.int64).T if pairs else None)


def warming(num_rows: int, limits: Limits, scratch: int) -> list[list[Row]]:
    """Return decode steps of all that attention may be recorded for.

    Rows as long as fit beside each other, the same that share all but their end, and rows of
    one token. Each writes to the block `scratch` alone and reads whatever the others hold.
    """
    size = limits.block_size
    length = min(limits.context_len, limits.num_blocks // num_rows * size)
    width = -(-length // size) - 1
    if width < 1:
        return [[Row(0, [0], 0, 1, [scratch])] * num_rows]
    ids = [0] * length
    firsts = [row * width for row in range(num_rows)]
    return [
        [Row(0, ids, length - 1, 1, [*range(a, a + width), scratch]) for a in firsts],
        [Row(0, ids, length - 1, 1, [*range(width), scratch]) for _ in firsts],
        [Row(0, [0], 0, 1, [scratch]) for _ in firsts],
    ]


def filling(limits: Limits, scratch: int) -> list[list[Row]]:
    """Return the widest steps that fill prompts: what attention keeps for a step grows to them.

    One prompt that takes all of a step at the end of the longest context, and as many as there
    may be side by side, behind a common stretch and alone. They are planned, and never run.
    """
    most = min(limits.max_sequences, limits.step_tokens)
    steps = [
        _prompts(num_rows, limits, scratch, is_shared=is_shared)
        for num_rows, is_shared in dict.fromkeys([(1, True), (most, True), (most, False)])
    ]
    return [rows for rows in steps if rows]


def _prompts(num_rows: int, limits: Limits, scratch: int, *, is_shared: bool) -> list[Row]:
    """Return prompts with equal parts of a step at the end of contexts; none if none fit."""
    size = limits.block_size
    num_blocks = limits.num_blocks // (1 if is_shared else num_rows)
    length = min(limits.context_len, num_blocks * size)
    new = min(limits.step_tokens // num_rows, limits.context_len)
    if length < new:
        return []
    ids, width, num_old = [0] * length, -(-length // size), (length - new) // size
    end = [scratch] * (width - num_old)
    firsts = [0 if is_shared else row * width for row in range(num_rows)]
    return [Row(0, ids, length - new, new, [*range(a, a + num_old), *end]) for a in firsts]


def _filled(array: Integers, size: int, rest: int) -> Integers:
    filled = np.full(size, rest, np.int64)
    filled[: len(array)] = array
    return filled


class Kind(NamedTuple):
    """What layers have in common whose attention is prepared together."""

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Attention:
    """What a model's layers attend through during one step; see `architecture.Attending`."""

    plan: Plan
    slots: Tensor
    caches: Sequence[Caches]
    operations: ops.Operations
    layers: Sequence[Layer]
    seen: dict[Kind, tuple[Tensor, Caches]] | None = None
    """Set to note queries and caches of each kind of layer."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        assert mask is None, "the probe saw no mask"
        layer = module.layer_idx
        assert isinstance(layer, int), "the probe saw numbered layers"
        key_cache, value_cache = self.caches[layer]
        self.operations.store_kv(
            key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, self.slots
        )
        query = query[0].transpose(0, 1)
        if self.seen is not None:
            kv_heads, key_dim = key_cache.shape[2:]
            kind = Kind(query.shape[1], kv_heads, key_dim, value_cache.shape[3], window)
            self.seen[kind] = query, (key_cache, value_cache)
        out = self.operations.attention(
            query,
            key_cache,
            value_cache,
            self.plan,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return out[None]

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Do the same for `lean.LeanModel`; see `lean.Attend`."""
        self.operations.store_kv(key, value, *self.caches[layer], self.slots)
        return self.read(layer, query, scale)

    def read(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attend queries [T, H, D] of a layer whose new keys and values are stored."""
        return self.operations.attention(
            query, *self.caches[layer], self.plan, scale=scale, window=self.layers[layer].window
        )
