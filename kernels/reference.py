"""Reference implementation of the kernel operations in plain torch.

Defines the results of the operations: all other implementations are tested against it. Each row is
computed separately and without work items, and each query attends to all positions that it sees.
Computes in float64 for float64 arguments, otherwise in float32.

Shapes: T queries or new tokens - H query heads - K KV heads - D head dim - E value head dim -
B tokens of a block - N blocks - S partials - W maximum partials of one query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .planning.plan import Plan, kv_slots


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Attend each row's queries to its context; see `ops.AttentionOperations.attention`."""
    for row in range(plan.num_rows):
        begin, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
        length = int(plan.kv_len[row])
        slots = torch.from_numpy(kv_slots(plan.tables[row], 0, length, plan.block_size))
        keys = _at_least_float32(
            key_cache.flatten(0, 1)[slots.to(key_cache.device)]
        )  # [length, K, D]
        values = _at_least_float32(value_cache.flatten(0, 1)[slots.to(value_cache.device)])
        queries = _at_least_float32(query[begin:end])
        group = queries.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)

        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_at = torch.arange(length - (end - begin), length, device=query.device)[:, None]
        key_at = torch.arange(length, device=query.device)[None, :]
        visible = key_at <= query_at
        if window is not None:
            visible &= key_at > query_at - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            # A sink adds one score to the softmax of each head, and no value.
            sink = sinks.to(scores)[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,khe->qhe", weights, values).to(out.dtype)
    return out


def merge(outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
    """Merge the partials of each query; see `ops.AttentionOperations.merge`."""
    lse, outputs = _at_least_float32(lse), _at_least_float32(outputs)
    used = slots >= 0
    partials = slots.clamp(min=0)
    scores = lse[partials].masked_fill(~used[..., None], float("-inf"))  # [T, W, H]
    total = torch.logsumexp(scores, dim=1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(total).expand_as(total))
    weights = torch.exp(scores - total[:, None])
    gathered = outputs[partials].masked_fill(~used[..., None, None], 0.0)  # [T, W, H, E]
    return (weights[..., None] * gathered).sum(dim=1)


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write new keys and values to their slots; see `ops.AttentionOperations.store_kv`."""
    key_cache.flatten(0, 1)[slots] = key.to(key_cache.dtype)
    value_cache.flatten(0, 1)[slots] = value.to(value_cache.dtype)


def copy_blocks(caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copy whole blocks inside each cache; see `ops.AttentionOperations.copy_blocks`."""
    for cache in caches:
        cache[destination] = cache[source]


def new_cache(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return a contiguous cache of zeros; see `ops.AttentionOperations.new_cache`."""
    return torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
