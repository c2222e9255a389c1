"""The merge kernel: combine the partials of each query by their log-sum-exp.

Any number of partials is merged in one pass in float32. The error does not grow with the depth
of the tree, as it does if pairs are merged one after the other (the cascades of Hydragen and
FlashInfer). Queries with a single partial are not merged: attention writes their output.

Invariants: a slot that no query names is not read.

Shapes: T queries - H query heads - E value head dim - S slots of partials - W partials of a
query.
"""
# Triton compiles kernels itself; type checkers do not implement its rules.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    table: tl.tensor,
    sinks: tl.tensor,
    num_queries: tl.tensor,
    width: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_INDEXED: tl.constexpr,
    LOG2_E: tl.constexpr = 1.4426950408889634,
) -> None:
    """Merge the queries of a table.

    Args:
        out: [T, H, E], written for these queries.
        partials: [S, H, E], normalised.
        lse: [S, H] natural log of the sum of exponentials of each partial.
        table: int32: merges of `work_table.builder`, or with `IS_INDEXED` [T, W] int64 slots
            of each query, where -1 is none.
        sinks: [H]; read only with `HAS_SINKS`.
        num_queries: Merges, or places of them.
        width: W; read only with `IS_INDEXED`.
        out_stride: Stride of queries.
        out_head_stride: Stride of heads.
        HEADS: H.
        HEAD_TILE: Heads that a program processes at once.
        VALUE_DIM: E.
        VALUE_PAD: E rounded up to a power of 2.
        HAS_SINKS: Whether heads have sinks.
        IS_INDEXED: Whether slots are listed one by one.
        LOG2_E: log2(e).
    """
    tiles: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    dims = tl.arange(0, VALUE_PAD)
    for unit in range(tl.program_id(0), num_queries * tiles, tl.num_programs(0)):
        heads = unit % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        is_head = heads < HEADS
        number = unit // tiles
        first = 0
        count = width
        if not IS_INDEXED:
            row = _merge(table, number)
            number = tl.load(row)
            first = tl.load(row + 1)
            count = tl.load(row + 2)

        peak = tl.full([HEAD_TILE], float("-inf"), tl.float32)
        if HAS_SINKS:
            peak = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        # A sink is a score of each head without a value.
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        result = tl.zeros([HEAD_TILE, VALUE_PAD], tl.float32)
        for begin in tl.range(0, count, 4, num_stages=1):
            # All loads are issued before the first one has arrived. Partials are separate tensors:
            # with one of three dimensions, Triton 3.6 adds them up through shared memory.
            slot_0 = _slot(table, number, first, begin, count, width, IS_INDEXED)
            slot_1 = _slot(table, number, first, begin + 1, count, width, IS_INDEXED)
            slot_2 = _slot(table, number, first, begin + 2, count, width, IS_INDEXED)
            slot_3 = _slot(table, number, first, begin + 3, count, width, IS_INDEXED)
            weight_0, value_0 = _partial(partials, lse, slot_0, heads, dims, HEADS, VALUE_DIM)
            weight_1, value_1 = _partial(partials, lse, slot_1, heads, dims, HEADS, VALUE_DIM)
            weight_2, value_2 = _partial(partials, lse, slot_2, heads, dims, HEADS, VALUE_DIM)
            weight_3, value_3 = _partial(partials, lse, slot_3, heads, dims, HEADS, VALUE_DIM)
            new_peak = tl.maximum(
                tl.maximum(peak, tl.maximum(weight_0, weight_1)), tl.maximum(weight_2, weight_3)
            )
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2_E
            decay = tl.exp2(peak * LOG2_E - base)
            weight_0 = tl.exp2(weight_0 * LOG2_E - base)
            weight_1 = tl.exp2(weight_1 * LOG2_E - base)
            weight_2 = tl.exp2(weight_2 * LOG2_E - base)
            weight_3 = tl.exp2(weight_3 * LOG2_E - base)
            result = result * decay[:, None] + weight_0[:, None] * value_0
            result += weight_1[:, None] * value_1
            result += weight_2[:, None] * value_2
            result += weight_3[:, None] * value_3
            total = total * decay + weight_0 + weight_1 + weight_2 + weight_3
            peak = new_peak
        # Padding heads, and places without a merge, have no result; avoid a division by 0.
        total = tl.where(is_head & (count > 0), total, 1.0)
        at = number.to(tl.int64) * out_stride + heads.to(tl.int64) * out_head_stride
        tl.store(
            out + at[:, None] + dims[None, :],
            (result / total[:, None]).to(out.dtype.element_ty),
            mask=is_head[:, None] & (dims < VALUE_DIM)[None, :] & (count > 0),
        )


@triton.jit
def _slot(
    table: tl.tensor,
    number: tl.tensor,
    first: tl.tensor,
    index: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    IS_INDEXED: tl.constexpr,
) -> tl.tensor:
    """Return the slot of a partial, or -1."""
    if IS_INDEXED:
        slot = tl.load(table + number * width + index, mask=index < count, other=-1).to(tl.int32)
    else:
        slot = tl.where(index < count, first + index, -1)
    return slot


@triton.jit
def _partial(
    partials: tl.tensor,
    lse: tl.tensor,
    slot: tl.tensor,
    heads: tl.tensor,
    dims: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return LSE and result of some heads; -inf and 0 for a slot of -1."""
    is_used = (slot >= 0) & (heads < HEADS)
    at = slot.to(tl.int64) * HEADS + heads
    weight = tl.load(lse + at, mask=is_used, other=float("-inf")).to(tl.float32)
    value = tl.load(
        partials + at[:, None] * VALUE_DIM + dims[None, :],
        mask=is_used[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    return weight, value


@triton.jit
def _merge(table: tl.tensor, number: tl.tensor, MERGE_SIZE: tl.constexpr = 4) -> tl.tensor:
    return table + number * MERGE_SIZE
