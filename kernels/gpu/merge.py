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
    PARTIALS: tl.constexpr,
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
        PARTIALS: Partials that are read at the same time.
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
            # A place without a merge has no partials.
            number = tl.load(row)
            first = tl.load(row + 1)
            count = tl.load(row + 2)

        peak = tl.full([HEAD_TILE], float("-inf"), tl.float32)
        if HAS_SINKS:
            peak = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        # A sink is a score of each head without a value.
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        result = tl.zeros([HEAD_TILE, VALUE_PAD], tl.float32)
        for begin in tl.range(0, count, PARTIALS, num_stages=1):
            partial_index = begin + tl.arange(0, PARTIALS)
            is_partial = partial_index < count
            if IS_INDEXED:
                slots = tl.load(table + number * width + partial_index, mask=is_partial, other=-1)
                is_partial &= slots >= 0
            else:
                slots = first + partial_index
            at = slots.to(tl.int64)[:, None] * HEADS + heads[None, :]
            is_used = is_partial[:, None] & is_head[None, :]
            # Before the weights: all loads are issued at once.
            value = tl.load(
                partials + at[:, :, None] * VALUE_DIM + dims[None, None, :],
                mask=is_used[:, :, None] & (dims < VALUE_DIM)[None, None, :],
                other=0.0,
            ).to(tl.float32)
            weight = tl.load(lse + at, mask=is_used, other=float("-inf")).to(tl.float32)
            new_peak = tl.maximum(peak, tl.max(weight, 0))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay = tl.exp2((peak - base) * LOG2_E)
            weight = tl.exp2((weight - base[None, :]) * LOG2_E)
            result = result * decay[:, None] + tl.sum(weight[:, :, None] * value, 0)
            total = total * decay + tl.sum(weight, 0)
            peak = new_peak
        # Padding heads have no result; avoid a division by 0.
        total = tl.where(is_head & (count > 0), total, 1.0)
        at = number.to(tl.int64) * out_stride + heads * out_head_stride
        tl.store(
            out + at[:, None] + dims[None, :],
            (result / total[:, None]).to(out.dtype.element_ty),
            mask=is_head[:, None] & (dims < VALUE_DIM)[None, :] & (count > 0),
        )


@triton.jit
def _merge(table: tl.tensor, number: tl.tensor, MERGE_SIZE: tl.constexpr = 4) -> tl.tensor:
    return table + number * MERGE_SIZE
