"""The attention kernel: tiles of queries against stretches of pages, for decode and extend.

One persistent launch runs all work items of a step (`conure.kernels.work`), each once per KV
head. An item gathers its queries by index and packs the heads of a group as rows, so that
keys and values are read once for all of them. Items come in two classes, told apart at run
time: `SMALL` rows for what few queries read, which waits for memory, and `LARGE` rows for
what many share, which keeps the tensor cores busy. Programs take items in turn, so that
both units work at the same time (PAT, ASPLOS'26, and FastTree, MLSys'25, launch them apart).

Scores live in base 2. An item is either all that its queries see: then it is normalised, sinks
included, and written to `out`. Or it is one part of several: then its normalised float32
result and its LSE go to the slots that the item names, for `merge`.

Knows pages and rows of one launch, no contexts. Kept true: slots that no item names are never
read into a result, whatever they hold; a masked key has weight 0 and its value counts as 0.

Shapes: T queries - H query heads - K kv heads - G = H / K - D, E head dims of keys, values -
M rows of a tile - N keys of a tile - S slots of parts.
"""
# Kernels are Python in looks only: a type checker cannot know what the compiler makes of them.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .. import work

NUM_ITEMS = tl.constexpr(work.Header.NUM_ITEMS.value)
ITEMS = tl.constexpr(work.Header.ITEMS.value)
ENTRY_QUERIES = tl.constexpr(work.Header.ENTRY_QUERIES.value)
ENTRY_SLOTS = tl.constexpr(work.Header.ENTRY_SLOTS.value)
PAGES = tl.constexpr(work.Header.PAGES.value)

ITEM_SIZE = tl.constexpr(work.ITEM_SIZE)
ENTRY = tl.constexpr(work.Field.ENTRY.value)
NUM_QUERIES = tl.constexpr(work.Field.NUM_QUERIES.value)
PAGE_INDEX = tl.constexpr(work.Field.PAGE.value)
OFFSET = tl.constexpr(work.Field.OFFSET.value)
NUM_KV = tl.constexpr(work.Field.NUM_KV.value)
PART = tl.constexpr(work.Field.PART.value)
LIMIT = tl.constexpr(work.Field.LIMIT.value)
FLOOR = tl.constexpr(work.Field.FLOOR.value)
IS_LARGE = tl.constexpr(work.Field.IS_LARGE.value)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SMALL: tl.constexpr,
    SMALL_TILE: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    LARGE: tl.constexpr,
    LARGE_TILE: tl.constexpr,
    LARGE_STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Run all items of a table.

    Args:
        out: [T, H, E], written where an item is all that its queries see.
        partials: [S, H, E] float32, the normalised parts of all other queries.
        lse: [S, H] float32, natural log of the sum of exponentials of each part.
        query: [T, H, D].
        keys: [M, K, D] slots of the cache, a slot and a head at free distances.
        values: [M, K, E].
        table: int32, see `conure.kernels.work`.
        sinks: [H]; read only with `HAS_SINKS`.
        scale: Scores times log2(e), or with `HAS_CAP` times 2 * log2(e) / softcap.
        cap: softcap * log2(e); read only with `HAS_CAP`.
        out_stride: Distances in elements; those of one vector are 1.
        out_head_stride: As `out_stride`.
        query_stride: As `out_stride`.
        query_head_stride: As `out_stride`.
        key_stride: From slot to slot.
        key_head_stride: From head to head.
        value_stride: From slot to slot.
        value_head_stride: From head to head.
        KV_HEADS: K.
        GROUP: G.
        DIM: D.
        VALUE_DIM: E.
        DIM_PAD: D up to a power of two.
        VALUE_PAD: E up to a power of two.
        PAGE: Tokens of a page.
        SMALL: Rows of a small item.
        SMALL_TILE: Keys that a small item takes at once.
        SMALL_STAGES: Depth of its software pipeline.
        LARGE: Rows of a large item; 0 where the table has none.
        LARGE_TILE: As `SMALL_TILE`.
        LARGE_STAGES: As `SMALL_STAGES`.
        HAS_WINDOW: Items have a floor.
        HAS_CAP: Scores are capped.
        HAS_SINKS: Heads have sinks.
        PRECISION: Of products of float32.
    """
    num_units = tl.load(table + NUM_ITEMS) * KV_HEADS
    items = table + tl.load(table + ITEMS)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        # The heads of an item are neighbours: together they read whole pages.
        item = items + unit // KV_HEADS * ITEM_SIZE
        head = unit % KV_HEADS
        if LARGE > 0:
            if tl.load(item + IS_LARGE) != 0:
                _run_item(
                    *(out, partials, lse, query, keys, values, table, sinks, scale, cap),
                    *(out_stride, out_head_stride, query_stride, query_head_stride),
                    *(key_stride, key_head_stride, value_stride, value_head_stride),
                    *(item, head, KV_HEADS, GROUP, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE),
                    *(LARGE, LARGE_TILE, LARGE_STAGES),
                    *(HAS_WINDOW, HAS_CAP, HAS_SINKS, PRECISION),
                )
            else:
                _run_item(
                    *(out, partials, lse, query, keys, values, table, sinks, scale, cap),
                    *(out_stride, out_head_stride, query_stride, query_head_stride),
                    *(key_stride, key_head_stride, value_stride, value_head_stride),
                    *(item, head, KV_HEADS, GROUP, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE),
                    *(SMALL, SMALL_TILE, SMALL_STAGES),
                    *(HAS_WINDOW, HAS_CAP, HAS_SINKS, PRECISION),
                )
        else:
            _run_item(
                *(out, partials, lse, query, keys, values, table, sinks, scale, cap),
                *(out_stride, out_head_stride, query_stride, query_head_stride),
                *(key_stride, key_head_stride, value_stride, value_head_stride),
                *(item, head, KV_HEADS, GROUP, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE),
                *(SMALL, SMALL_TILE, SMALL_STAGES),
                *(HAS_WINDOW, HAS_CAP, HAS_SINKS, PRECISION),
            )


@triton.jit
def _run_item(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    item: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attend the queries of one item, for one KV head, and write what they found."""
    entry = tl.load(item + ENTRY)
    num_queries = tl.load(item + NUM_QUERIES)
    pages = table + tl.load(table + PAGES) + tl.load(item + PAGE_INDEX)
    offset = tl.load(item + OFFSET)
    num_kv = tl.load(item + NUM_KV)
    part = tl.load(item + PART)
    limit = tl.load(item + LIMIT)
    floor = tl.load(item + FLOOR)

    rows = tl.arange(0, ROWS)
    mine = rows // GROUP  # the row's query, counted in the item
    heads = head * GROUP + rows % GROUP
    is_row = mine < num_queries
    number = tl.load(table + tl.load(table + ENTRY_QUERIES) + entry + mine, mask=is_row, other=0)
    dims = tl.arange(0, DIM_PAD)
    at = number.to(tl.int64) * query_stride + heads * query_head_stride
    if DIM == DIM_PAD:
        q = tl.load(query + at[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)
    else:
        is_dim = is_row[:, None] & (dims < DIM)[None, :]
        q = tl.load(query + at[:, None] + dims[None, :], mask=is_dim, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    keys += head.to(tl.int64) * key_head_stride
    values += head.to(tl.int64) * value_head_stride
    # Up to here every row sees every key, so nothing is masked.
    plain = 0
    if not HAS_WINDOW:
        plain = tl.maximum(tl.minimum(num_kv, limit), 0) // TILE * TILE
        for start in tl.range(0, plain, TILE, num_stages=STAGES):
            peak, total, found = _add_tile(
                *(peak, total, found, q, keys, values, pages, offset, start, num_kv),
                *(limit + mine, floor + mine, scale, cap, key_stride, value_stride),
                *(DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE, TILE),
                *(False, False, HAS_CAP, PRECISION),
            )
    for start in tl.range(plain, num_kv, TILE, num_stages=STAGES):
        peak, total, found = _add_tile(
            *(peak, total, found, q, keys, values, pages, offset, start, num_kv),
            *(limit + mine, floor + mine, scale, cap, key_stride, value_stride),
            *(DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE, TILE),
            *(True, HAS_WINDOW, HAS_CAP, PRECISION),
        )

    dims = tl.arange(0, VALUE_PAD)
    is_value = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    if part < 0:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            top = tl.maximum(peak, sink)
            found *= tl.exp2(peak - top)[:, None]
            total = total * tl.exp2(peak - top) + tl.exp2(sink - top)
        at = number.to(tl.int64) * out_stride + heads * out_head_stride
        # A row behind the last query may see nothing: it is not stored, only not divided by 0.
        found /= tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at[:, None] + dims[None, :], found.to(out.dtype.element_ty), mask=is_value)
    else:
        slots = table + tl.load(table + ENTRY_SLOTS) + entry + mine
        slot = tl.load(slots, mask=is_row, other=0) + part
        at = slot.to(tl.int64) * (KV_HEADS * GROUP) + heads
        # A part may be empty for some of its queries: its peak is -inf, and so is its LSE.
        total = tl.where(total == 0.0, 1.0, total)
        found /= total[:, None]
        tl.store(partials + at[:, None] * VALUE_DIM + dims[None, :], found, mask=is_value)
        tl.store(lse + at, (peak + tl.log2(total)) * LN_2, mask=is_row)


@triton.jit
def _add_tile(
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
        page = tl.load(pages + inside // PAGE, mask=is_key, other=0)
        slot = page.to(tl.int64) * PAGE + inside % PAGE
    else:
        slot = tl.load(pages + inside // PAGE).to(tl.int64) * PAGE + inside % PAGE

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
