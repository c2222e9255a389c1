"""One tile of keys: where it lies, and what it adds to the running softmax of all rows.

The inner loop of `attention`. Scores live in base 2. A tile is masked where some row may not
see all of it; elsewhere nothing is compared.

Knows pages and rows, no items. Kept true: a masked key has weight 0 and its value counts as 0.

Shapes: M rows - N keys of a tile - D, E head dims of keys, values.
"""
# Kernels are Python in looks only: a type checker cannot know what the compiler makes of them.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_tile(
    peak: tl.tensor,
    total: tl.tensor,
    found: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    start: tl.tensor,
    num_kv: tl.tensor,
    limit: tl.tensor,
    floor: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys from `start` on to the running softmax of all rows (FlashAttention)."""
    columns = start + tl.arange(0, TILE)
    is_key = columns < num_kv
    slot = _slots_of(pages, offset, start, num_kv, PAGE, TILE, IS_MASKED)

    dims = tl.arange(0, DIM_PAD)
    at = keys + (slot * key_stride)[None, :] + dims[:, None]
    if DIM != DIM_PAD:
        k = tl.load(at, mask=is_key[None, :] & (dims < DIM)[:, None], other=0.0)
    elif IS_MASKED:
        k = tl.load(at, mask=is_key[None, :], other=0.0)
    else:
        k = tl.load(at)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if HAS_CAP:
        # cap * tanh(x) by one exponential, which came with the scale.
        scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
    if IS_MASKED:
        sees = is_key[None, :] & (columns[None, :] < limit[:, None])
        if HAS_WINDOW:
            sees &= columns[None, :] >= floor[:, None]
        scores = tl.where(sees, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = new_peak
    if IS_MASKED:
        # Rows that have seen nothing yet: exp2(-inf - -inf) would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)

    dims = tl.arange(0, VALUE_PAD)
    at = values + (slot * value_stride)[:, None] + dims[None, :]
    if VALUE_DIM != VALUE_PAD:
        v = tl.load(at, mask=is_key[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
    elif IS_MASKED:
        v = tl.load(at, mask=is_key[:, None], other=0.0)
    else:
        v = tl.load(at)
    total = total * decay + tl.sum(weights, 1)
    found = tl.dot(weights.to(v.dtype), v, found * decay[:, None], input_precision=PRECISION)
    return new_peak, total, found


@triton.jit
def _slots_of(
    pages: tl.tensor,
    offset: tl.tensor,
    start: tl.tensor,
    num_kv: tl.tensor,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Return where the keys from `start` on lie, [N] int64, with one look-up a page."""
    columns = start + tl.arange(0, TILE)
    inside = offset + columns
    if PAGE % TILE == 0:
        # Items begin at a multiple of the tile: all keys lie in one page.
        page = tl.load(pages + (offset + start) // PAGE)
        slot = page.to(tl.int64) * PAGE + inside % PAGE
    elif TILE % PAGE == 0:
        # Nor do they begin inside of a page: one look-up serves all its keys.
        several = tl.arange(0, TILE // PAGE)
        is_page = start + several * PAGE < num_kv
        page = tl.load(pages + (offset + start) // PAGE + several, mask=is_page, other=0)
        slot = page[:, None].to(tl.int64) * PAGE + tl.arange(0, PAGE)[None, :]
        slot = tl.reshape(slot, [TILE])
    elif IS_MASKED:
        page = tl.load(pages + inside // PAGE, mask=columns < num_kv, other=0)
        slot = page.to(tl.int64) * PAGE + inside % PAGE
    else:
        slot = tl.load(pages + inside // PAGE).to(tl.int64) * PAGE + inside % PAGE
    return slot
