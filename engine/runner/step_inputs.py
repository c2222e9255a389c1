"""The inputs of one step: packed tokens, the slots of their KV, and attention over the caches.

`pack` turns rows into arrays on the host. `Attention` serves the model's layers during the forward
pass: it stores keys and values and attends by the plan.

A step may be *padded* to one of a few numbers of tokens, so that its arrays have known shapes.
Padding tokens are not part of the plan: they write their KV to a scratch block and their outputs
are discarded.

Out of scope: the model, and the use of its logits.

Shapes: T packed tokens - R rows - S sampling rows - U pending tokens - H query heads - K kv heads -
D, E head dims of keys, values.
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
from conure.kernels.planning.plan import Plan
from conure.kernels.planning.planner import Planner

from ..models.probe import LayerKVSpec
from .base import ScheduledSequence

Integers = NDArray[np.int64]
LayerCaches = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


class AttentionLayerGroup(NamedTuple):
    """Properties of layers whose attention is prepared together."""

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


class PackedInputs(NamedTuple):
    """The rows of a step on the host."""

    plan: Plan
    ids: Integers
    """[T] token ids."""
    last: Integers
    """[S] packed tokens whose logits are needed."""
    pending: Integers | None = None
    """[2, U] indices of packed tokens whose ids are still on the device (0 in `ids`), and for each
    its index in the ids that the previous step sampled. None if the host has all ids."""

    def arrays(self, sizes: tuple[int, int] | None, scratch_block: int) -> list[Integers]:
        """Return ids, positions, slots and `last`, padded for the device.

        Args:
            sizes: Padded lengths of the token arrays and of `last`; None for no padding.
            scratch_block: The block that padding tokens write to.
        """
        arrays = [self.ids, self.plan.positions, self.plan.slots]
        if sizes is None:
            return [*arrays, self.last]
        fills = (0, 0, scratch_block * self.plan.block_size)
        padded = [_pad(array, sizes[0], fill) for array, fill in zip(arrays, fills, strict=True)]
        return [*padded, _pad(self.last, sizes[1], 0)]


def pack(rows: Sequence[ScheduledSequence], planner: Planner) -> PackedInputs:
    """Return the inputs of a step of at least one row."""
    plan = planner.plan(
        [row.num_new for row in rows],
        [row.start + row.num_new for row in rows],
        [row.blocks for row in rows],
    )
    sampling = [index for index, row in enumerate(rows) if row.sampling is not None]
    last = plan.query_start[1:][sampling] - 1
    new_ids = [
        row.ids[row.start : row.start + row.num_new] if row.previous_id_index is None else (0,)
        for row in rows
    ]
    ids = np.fromiter(chain.from_iterable(new_ids), np.int64, plan.num_queries)
    pending = [
        (token, row.previous_id_index)
        for token, row in zip(plan.query_start[:-1], rows, strict=True)
        if row.previous_id_index is not None
    ]
    return PackedInputs(plan, ids, last, np.array(pending, np.int64).T if pending else None)


def _pad(array: Integers, size: int, fill: int) -> Integers:
    padded = np.full(size, fill, np.int64)
    padded[: len(array)] = array
    return padded


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a model's layers during one step; see `attention_backend.AttentionBackend`."""

    plan: Plan
    slots: Tensor
    caches: Sequence[LayerCaches]
    operations: ops.AttentionOperations
    layers: Sequence[LayerKVSpec]
    groups: dict[AttentionLayerGroup, tuple[Tensor, LayerCaches]] | None = None
    """If not None, `attend` stores the last query and caches of each layer group here."""

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
        assert mask is None, "the probe rejects models that pass a mask"
        layer = module.layer_idx
        assert isinstance(layer, int), "the probe rejects layers without a number"
        key_cache, value_cache = self.caches[layer]
        self.operations.store_kv(
            key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, self.slots
        )
        query = query[0].transpose(0, 1)
        if self.groups is not None:
            kv_heads, key_dim = key_cache.shape[2:]
            group = AttentionLayerGroup(
                query.shape[1], kv_heads, key_dim, value_cache.shape[3], window
            )
            self.groups[group] = query, (key_cache, value_cache)
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

    def read(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Return the attention [T, H, E] of a layer whose new keys and values are stored."""
        return self.operations.attention(
            query, *self.caches[layer], self.plan, scale=scale, window=self.layers[layer].window
        )
