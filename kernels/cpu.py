"""The operations on a CPU, built from fast torch calls.

Each work item becomes one call of the flash kernel that torch has for CPUs: the heads of a
group are packed as rows, so that the keys and values of a stretch are read once for all
queries and all heads that share them. The kernel also returns the log-sum-exp of each row,
by which the parts of a query are merged in float32.

Three shapes of call come out of the items. A stretch without a mask is read in place where
its blocks follow each other in memory, else gathered. Short stretches of single queries
(decoding) are gathered together, padded, into one call: on small models the number of calls
is what a step costs. Long ones stay apart, for a gathered batch of many megabytes costs more
in fresh memory than the calls. Several new tokens of one row become a part over what lay in
the cache before and a causal part over themselves.

The flash kernel is a private operator of torch and knows neither soft caps nor values of
another size than keys: those take `_attend_matmul`, which needs public operations only, and
so does everything where the private one is missing.

Knows work items, no rows. Kept true: padding repeats a token of the same item, so what a
slot holds reaches only queries that may see it.

Shapes: T queries - H query heads - K kv heads - G = H / K - D, E head dims of keys, values -
S parts - n items of a call - Q queries of an item - L tokens of an item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .plan import Integers, Item, Plan

GATHER_BYTES: Final = 2**21
"""Keys of a padded call of several items are at most this much."""
SCORE_BYTES: Final = 2**26
"""Scores that `_attend_matmul` has at once are at most this much, or one query's."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an attention kernel: n items of Q queries over L tokens each."""

    num_items: int
    queries: Tensor | slice
    """Packed queries, [n * Q]."""
    tokens: Tensor | slice
    """Slots of the keys and values, [n * L]."""
    mask: Tensor | None
    """Added to the scores: [n, 1, 1, L], or [1, 1, Q, L] where `split_heads`."""
    causal: bool
    split_heads: bool
    """Heads of a group stay apart, so that a mask may tell one query from another (n = 1)."""


class _Work(NamedTuple):
    """The calls of a step and how their parts become outputs."""

    calls: list[_Call]
    order: Tensor | None
    """Where every query has one part: its packed query [T]; None: parts are in order."""
    slots: Tensor | None
    """Else: the parts of each query, [T, W]."""


class _Shape(NamedTuple):
    scale: float
    softcap: float | None


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
    """Run the plan's items, merge where a query has several; see `ops.Operations.attention`."""
    work = _work(plan, window, key_cache)
    keys = key_cache.flatten(0, 1)
    values = value_cache.flatten(0, 1)
    shape = _Shape(scale, softcap)
    parts = [_run(call, query, keys, values, shape) for call in work.calls]
    outputs = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts])
    if work.slots is None and sinks is None:
        if work.order is None:
            return out.copy_(outputs)
        return out.index_copy_(0, work.order, outputs.to(out.dtype))
    lse = torch.cat([part for _, part in parts])
    slots = work.slots
    if slots is None:
        slots = _slots_of_order(work.order, len(outputs))
    return out.copy_(merge(outputs, lse, slots, sinks=sinks))


def merge(outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
    """Weigh parts by their LSE in float32 or wider; see `ops.Operations.merge`."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    parts = slots.clamp(min=0)
    scores = lse.to(wide)[parts].masked_fill_((slots < 0)[..., None], float("-inf"))
    total = torch.logsumexp(scores, dim=1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(wide).expand_as(total))
    weights = torch.exp(scores - total[:, None])[..., None]  # [T, W, H, 1]
    # An unused part repeats the query's first, with weight 0: part 0 may be another's NaN.
    parts = torch.where(slots < 0, parts[:, :1], parts)
    merged = outputs.index_select(0, parts[:, 0]).to(wide).mul_(weights[:, 0])
    for column in range(1, slots.shape[1]):
        merged.addcmul_(outputs.index_select(0, parts[:, column]).to(wide), weights[:, column])
    return merged


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write new keys and values to their slots; see `ops.Operations.store_kv`."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


def copy_blocks(caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copy whole blocks inside each cache; see `ops.Operations.copy_blocks`."""
    for cache in caches:
        cache.index_copy_(0, destination, cache.index_select(0, source))


# --- items to calls ----------------------------------------------------------------------


def _work(plan: Plan, window: int | None, key_cache: Tensor) -> _Work:
    """Return the calls of a layer, made once per step and kind of layer."""
    token_bytes = key_cache.shape[2] * key_cache.shape[3] * key_cache.element_size()
    key = ("cpu", plan.binding(window), token_bytes)
    if key not in plan.derived:
        max_gathered = max(1, GATHER_BYTES // token_bytes)
        plan.derived[key] = _prepare(plan.items(window), plan, max_gathered)
    work: _Work = plan.derived[key]
    return work


def _prepare(items: Sequence[Item], plan: Plan, max_gathered: int) -> _Work:
    calls: list[_Call] = []
    queries: list[Integers] = []
    singles: list[tuple[Item, Integers]] = []
    for item in items:
        tokens = item.slots(plan.block_size)
        if len(item.queries) == 1 and len(tokens) <= max_gathered // 2:
            singles.append((item, tokens))
            continue
        for call, served in _calls_of(item, tokens):
            calls.append(call)
            queries.append(served)
    for bucket in _buckets(singles, max_gathered):
        served = np.concatenate([item.queries for item, _ in bucket])
        calls.append(_padded_call(served, [tokens for _, tokens in bucket]))
        queries.append(served)
    order, slots = _parts(np.concatenate(queries), plan.num_queries)
    return _Work(calls, order, slots)


def _calls_of(item: Item, tokens: Integers) -> Iterator[tuple[_Call, Integers]]:
    """Yield the calls of one item that runs for itself, each with the queries it serves."""
    queries = _run_or_index(item.queries)
    if not item.causal:
        yield _Call(1, queries, _run_or_index(tokens), None, False, False), item.queries
        return
    num_new = len(item.queries)
    if item.window is not None:
        mask = _window_mask(num_new, len(tokens), item.window)
        yield _Call(1, queries, _run_or_index(tokens), mask, False, True), item.queries
        return
    earlier, own = tokens[:-num_new], tokens[-num_new:]
    if len(earlier):
        yield _Call(1, queries, _run_or_index(earlier), None, False, False), item.queries
    yield _Call(1, queries, _run_or_index(own), None, True, True), item.queries


def _buckets(
    singles: list[tuple[Item, Integers]], max_gathered: int
) -> Iterator[list[tuple[Item, Integers]]]:
    """Yield groups of single queries worth one padded call, longest first."""
    bucket: list[tuple[Item, Integers]] = []
    width = 0
    for single in sorted(singles, key=lambda pair: -len(pair[1])):
        length = len(single[1])
        fits = (len(bucket) + 1) * width <= max_gathered
        # A much shorter one would be mostly padding.
        if bucket and not (fits and (width <= 2 * length or width - length <= 64)):
            yield bucket
            bucket = []
        if not bucket:
            width = length
        bucket.append(single)
    if bucket:
        yield bucket


def _padded_call(queries: Integers, stretches: list[Integers]) -> _Call:
    """Return one call for single queries over stretches of different length."""
    index = _run_or_index(queries)
    width = max(len(tokens) for tokens in stretches)
    if len(stretches) == 1:
        return _Call(1, index, _run_or_index(stretches[0]), None, False, False)
    padded = np.empty((len(stretches), width), dtype=np.int64)
    mask = np.zeros((len(stretches), 1, 1, width), dtype=np.float32)
    for row, tokens in enumerate(stretches):
        padded[row, : len(tokens)] = tokens
        padded[row, len(tokens) :] = tokens[0]
        mask[row, :, :, len(tokens) :] = -np.inf
    is_padded = any(len(tokens) < width for tokens in stretches)
    return _Call(
        num_items=len(stretches),
        queries=index,
        tokens=torch.from_numpy(padded.reshape(-1)),
        mask=torch.from_numpy(mask) if is_padded else None,
        causal=False,
        split_heads=False,
    )


def _window_mask(num_new: int, num_tokens: int, window: int) -> Tensor:
    """Return the mask [1, 1, Q, L] of new tokens at the end of a stretch under a window."""
    own = torch.arange(num_tokens - num_new, num_tokens)[:, None]
    seen = torch.arange(num_tokens)[None, :]
    visible = (seen <= own) & (seen > own - window)
    mask = torch.zeros(num_new, num_tokens)
    return mask.masked_fill_(~visible, float("-inf"))[None, None]


def _parts(served: Integers, num_queries: int) -> tuple[Tensor | None, Tensor | None]:
    """Return `order` and `slots` of `_Work` from the query of each part in turn."""
    if len(served) == num_queries:
        if (served == np.arange(num_queries)).all():
            return None, None
        return torch.from_numpy(served), None
    by_query = np.argsort(served, kind="stable")
    counts = np.bincount(served, minlength=num_queries)
    column = np.arange(len(served)) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.full((num_queries, int(counts.max())), -1, dtype=np.int64)
    slots[served[by_query], column] = by_query
    return None, torch.from_numpy(slots)


def _slots_of_order(order: Tensor | None, num_parts: int) -> Tensor:
    parts = torch.arange(num_parts)
    if order is None:
        return parts[:, None]
    return torch.empty_like(parts).index_copy_(0, order, parts)[:, None]


def _run_or_index(numbers: Integers) -> Tensor | slice:
    """Return a slice where the numbers follow each other, so that nothing is gathered."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(first, last + 1)
    return torch.from_numpy(numbers)


# --- one call ----------------------------------------------------------------------------


def _run(
    call: _Call, query: Tensor, keys: Tensor, values: Tensor, shape: _Shape
) -> tuple[Tensor, Tensor]:
    """Return the parts [n * Q, H, E] and their LSE [n * Q, H] of one call."""
    picked = _pick(query, call.queries)
    total, heads, head_dim = picked.shape
    count, kv_heads = call.num_items, keys.shape[1]
    num, group = total // count, heads // kv_heads
    packed = picked.view(count, num, kv_heads, group, head_dim)
    key = _pick(keys, call.tokens).view(count, -1, kv_heads, head_dim).transpose(1, 2)
    value = _pick(values, call.tokens).view(count, -1, kv_heads, values.shape[2]).transpose(1, 2)
    attend = _attend_flash if _can_flash(query, values, shape) else _attend_matmul
    if call.split_heads:
        # [K, G, Q, D]: kv heads stand as the batch, every head of a group reads the same.
        key = key[0, :, None].expand(-1, group, -1, -1)
        value = value[0, :, None].expand(-1, group, -1, -1)
        outputs, lse = attend(packed[0].permute(1, 2, 0, 3), key, value, call, shape)
        return outputs.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)
    rows = packed.transpose(1, 2).reshape(count, kv_heads, num * group, head_dim)
    outputs, lse = attend(rows, key, value, call, shape)
    split = (count, kv_heads, num, group)
    outputs = outputs.reshape(*split, -1).transpose(1, 2)  # [n, Q, K, G, E]
    lse = lse.reshape(split).transpose(1, 2)
    return outputs.reshape(total, heads, -1), lse.reshape(total, heads)


def _pick(tensor: Tensor, index: Tensor | slice) -> Tensor:
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _can_flash(query: Tensor, values: Tensor, shape: _Shape) -> bool:
    return (
        shape.softcap is None
        and query.shape[2] == values.shape[2]
        and query.device.type == "cpu"
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, shape: _Shape
) -> tuple[Tensor, Tensor]:
    """Attend [b, h, t, D] to [b, h, L, D] by torch's private kernel; the LSE is float32."""
    mask = call.mask if call.mask is None else call.mask.to(query.dtype)
    outputs, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, call.causal, attn_mask=mask, scale=shape.scale
    )
    return outputs, lse


def _attend_matmul(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, shape: _Shape
) -> tuple[Tensor, Tensor]:
    """Attend as `_attend_flash` does, by public operations, some queries at a time."""
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    batch, heads, num, _ = query.shape
    length = key.shape[2]
    step = max(1, SCORE_BYTES // (batch * heads * length * query.element_size()))
    outputs = query.new_empty(batch, heads, num, value.shape[3])
    lse = query.new_empty(batch, heads, num)
    for begin in range(0, num, step):
        span = slice(begin, min(begin + step, num))
        scores = torch.matmul(query[:, :, span] * shape.scale, key.transpose(2, 3))
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        if call.mask is not None:
            mask = call.mask if call.mask.shape[2] == 1 else call.mask[:, :, span]
            scores = scores + mask
        if call.causal:
            hidden = torch.arange(length) > torch.arange(span.start, span.stop)[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        lse[:, :, span] = torch.logsumexp(scores, dim=-1)
        outputs[:, :, span] = torch.exp(scores - lse[:, :, span, None]) @ value
    return outputs, lse
