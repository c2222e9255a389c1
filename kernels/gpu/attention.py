"""The attention kernel: tiles of queries against ranges of pages, for decode and prefill.

A launch computes all work items of one size of a step (`work_table.builder`), each once per KV
head. An item gathers its queries by index and packs the heads of a group as rows, so that keys
and values are read once for all of them. Items have one of two sizes: few rows for ranges with
few queries, which are bound by memory, and many rows for ranges with many queries, which use the
tensor cores. A large item needs most registers of a processor and a small one a third, so each
size has its own launch. Small items start while large ones still run, on processors without a large
item (programmatic dependent launch). Their launch ends after that of the large ones.

A unit of work is one item for one KV head. Units are in order of decreasing cost. A program begins
with the unit of its own number and then takes the next unit that no program has begun, by a ticket
that it draws from a counter. It draws the ticket for its next unit when it starts one, so that the
number has arrived when the unit is done. The load is balanced whatever a unit costs on a device.
Each unit draws one ticket, so the program that draws the last one leaves the counter at 0 for the
next launch. Exact float32 has no register for a ticket; its units are dealt in turn.

Scores are in base 2. If an item is everything that its queries see, its result is normalised,
including sinks, and written to `out`. Otherwise its normalised float32 result and its LSE are
written to the slots of the item, for `merge`.

With `MERGES` the program that writes the last partial of a query merges them all. It counts the
partials of each row with an atomic addition and leaves the count at 0 for the next launch.

Constants are parameters with defaults and not module globals: Triton compares each global that a
kernel reads at each launch, in 0.6 us. `test_work_table` compares them with `work_table.table`.

Invariants: cache slots that no item reads do not affect a result, whatever they hold. A key after
the end of the item has weight 0, and its value counts as 0. A value that only causality or a window
hides is multiplied by 0, so it must be finite.

Shapes: T queries - H query heads - K KV heads - G = H / K - D, E head dims of keys, values -
M rows of a tile - N keys of a tile - S slots of partials.
"""
# Triton compiles kernels itself; type checkers do not implement its rules.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    first_item: tl.tensor,
    counters: tl.tensor,
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
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_LARGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MERGES: tl.constexpr,
    LEADS: tl.constexpr,
    FOLLOWS: tl.constexpr,
    THREADS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute all items of one size in a table.

    Args:
        out: [T, H, E], written for queries with a single partial.
        partials: [S, H, E] float32, the normalised partials of all other queries.
        lse: [S, H] float32, natural log of the sum of exponentials of each partial.
        query: [T, H, D].
        keys: [M, K, D] slots of the cache, with any strides of slots and heads.
        values: [M, K, E].
        table: int32, see `work_table.builder`.
        first_item: Index of the first item.
        counters: [TICKET_WORDS + T * H] int32 zeros, left as zeros: the tickets, and with `MERGES`
            the partials of each query and head.
        sinks: [H]; read only with `HAS_SINKS`.
        scale: Factor of the products: the layer's scale times log2(e), or with `HAS_CAP` times
            2 * log2(e) / softcap. Positive.
        cap: softcap * log2(e); read only with `HAS_CAP`.
        out_stride: Stride of queries, in elements; vectors are contiguous.
        out_head_stride: Stride of heads.
        query_stride: Stride of queries.
        query_head_stride: Stride of heads.
        key_stride: Stride of slots.
        key_head_stride: Stride of heads.
        value_stride: Stride of slots.
        value_head_stride: Stride of heads.
        KV_HEADS: K.
        GROUP: G.
        DIM: D.
        VALUE_DIM: E.
        DIM_PAD: D rounded up to a power of 2.
        VALUE_PAD: E rounded up to a power of 2.
        PAGE: Tokens of a page.
        ROWS: Rows of an item.
        TILE: Keys that are processed at once.
        STAGES: Depth of the software pipeline.
        IS_LARGE: Whether the launch computes the large items, or the small ones.
        HAS_WINDOW: Whether items have a floor.
        HAS_CAP: Whether scores are capped.
        HAS_SINKS: Whether heads have sinks.
        MERGES: Whether the last program of a query merges its partials.
        LEADS: Whether the next launch may begin when all programs of this one have.
        FOLLOWS: Whether the launch began while the previous one ran.
        THREADS: Threads of a program.
        PRECISION: Precision of float32 products.
    """
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    SIZE: tl.constexpr = 1 if IS_LARGE else 0
    unit = tl.program_id(0)
    items = table + first_item
    num_units = _num_items(_item(items, unit // KV_HEADS, SIZE)) * KV_HEADS
    while unit < num_units:
        if PRECISION != "ieee":
            ticket = _draw_ticket(counters + SIZE, THREADS)
        # The heads of an item are consecutive units: together they read whole pages.
        _run_item(
            *(out, partials, lse, query, keys, values, table, counters, sinks, scale, cap),
            *(out_stride, out_head_stride, query_stride, query_head_stride),
            *(key_stride, key_head_stride, value_stride, value_head_stride),
            *(_item(items, unit // KV_HEADS, SIZE), unit % KV_HEADS),
            *(KV_HEADS, GROUP, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE),
            *(ROWS, TILE, STAGES, IS_LARGE),
            *(HAS_WINDOW, HAS_CAP, HAS_SINKS, MERGES, PRECISION),
        )
        if PRECISION != "ieee":
            unit = _next_unit(counters + SIZE, ticket, num_units, THREADS)
        else:  # the registers do not suffice: units are dealt in turn
            unit += tl.num_programs(0)
    if FOLLOWS:
        # What is launched next must find the results of the previous launch, too.
        tl.extra.cuda.gdc_wait()


@triton.jit
def _draw_ticket(counters: tl.tensor, THREADS: tl.constexpr) -> tl.tensor:
    """Return the next ticket in element 0 of a vector of one element per thread.

    A scalar result would be sent to all threads at once, so they would wait for it here.
    """
    lanes = tl.arange(0, THREADS)
    return tl.atomic_add(counters + lanes * 0, 1, mask=lanes == 0, sem="relaxed", scope="gpu")


@triton.jit
def _next_unit(
    counters: tl.tensor, ticket: tl.tensor, num_units: tl.tensor, THREADS: tl.constexpr
) -> tl.tensor:
    """Return the unit of a ticket. The last ticket of a launch resets their counter."""
    number = tl.sum(tl.where(tl.arange(0, THREADS) == 0, ticket, 0), 0)
    if number == num_units - 1:
        tl.store(counters, 0)
    return tl.num_programs(0) + number


@triton.jit
def _num_items(item: tl.tensor, NUM_ITEMS: tl.constexpr = 9) -> tl.tensor:
    return tl.load(item + NUM_ITEMS)


@triton.jit
def _item(
    items: tl.tensor,
    index: tl.tensor,
    SIZE: tl.constexpr,
    SIZES: tl.constexpr = 2,
    ITEM_SIZE: tl.constexpr = 16,
) -> tl.tensor:
    """Return the place of an item; small and large ones alternate."""
    return items + (index * SIZES + SIZE) * ITEM_SIZE


@triton.jit
def _run_item(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    counters: tl.tensor,
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
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MERGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTRY: tl.constexpr = 0,
    NUM_QUERIES: tl.constexpr = 1,
    PAGE_INDEX: tl.constexpr = 2,
    OFFSET: tl.constexpr = 3,
    NUM_KV: tl.constexpr = 4,
    CHUNK: tl.constexpr = 5,
    LIMIT: tl.constexpr = 6,
    FLOOR: tl.constexpr = 7,
    SLOTS: tl.constexpr = 10,
    LOG2_E: tl.constexpr = 1.4426950408889634,
    LN_2: tl.constexpr = 0.6931471805599453,
) -> None:
    """Compute one item for one KV head and write its result.

    With `IS_SPLIT` a loop without masks precedes the masked one. It saves arithmetic and costs
    a second start of the pipeline, so items that are bound by memory do without it.
    """
    entry = tl.load(item + ENTRY)
    num_queries = tl.load(item + NUM_QUERIES)
    pages = table + tl.load(item + PAGE_INDEX)
    offset = tl.load(item + OFFSET)
    num_kv = tl.load(item + NUM_KV)
    chunk = tl.load(item + CHUNK)
    limit = tl.load(item + LIMIT)
    floor = tl.load(item + FLOOR)

    rows = tl.arange(0, ROWS)
    query_index = rows // GROUP  # the row's query, as an index into the item
    heads = head * GROUP + rows % GROUP
    is_row = query_index < num_queries
    number = tl.load(table + entry + query_index, mask=is_row, other=0)
    slot = number
    if not IS_SPLIT:  # read here, so that it has arrived when the result of a short item is written
        slots = table + tl.load(item + SLOTS) + query_index
        slot = tl.load(slots, mask=is_row & (chunk >= 0), other=0)
    dims = tl.arange(0, DIM_PAD)
    at = number.to(tl.int64) * query_stride + heads.to(tl.int64) * query_head_stride
    if DIM == DIM_PAD:
        q = tl.load(query + at[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)
    else:
        is_dim = is_row[:, None] & (dims < DIM)[None, :]
        q = tl.load(query + at[:, None] + dims[None, :], mask=is_dim, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    keys += head.to(tl.int64) * key_head_stride
    values += head.to(tl.int64) * value_head_stride
    # Every row sees every key before `unmasked_end`.
    unmasked_end = 0
    if IS_SPLIT and not HAS_WINDOW:
        unmasked_end = tl.maximum(tl.minimum(num_kv, limit), 0) // TILE * TILE
        for start in tl.range(0, unmasked_end, TILE, num_stages=STAGES):
            peak, total, result = _add_tile(
                *(peak, total, result, q, keys, values, pages, offset, start, num_kv),
                *(limit + query_index, floor + query_index, scale, cap, key_stride, value_stride),
                *(DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE, TILE),
                *(False, False, HAS_CAP, PRECISION),
            )
    for start in tl.range(unmasked_end, num_kv, TILE, num_stages=STAGES):
        peak, total, result = _add_tile(
            *(peak, total, result, q, keys, values, pages, offset, start, num_kv),
            *(limit + query_index, floor + query_index, scale, cap, key_stride, value_stride),
            *(DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, PAGE, TILE),
            *(True, HAS_WINDOW, HAS_CAP, PRECISION),
        )

    dims = tl.arange(0, VALUE_PAD)
    is_value = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    if chunk < 0:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            top = tl.maximum(peak, sink)
            result *= tl.exp2(peak - top)[:, None]
            total = total * tl.exp2(peak - top) + tl.exp2(sink - top)
        at = number.to(tl.int64) * out_stride + heads.to(tl.int64) * out_head_stride
        # Padding rows may have a total of 0; they are not stored.
        result /= tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_value)
    else:
        if IS_SPLIT:
            slots = table + tl.load(item + SLOTS) + query_index
            slot = tl.load(slots, mask=is_row, other=0)
        at = (slot + chunk).to(tl.int64) * (KV_HEADS * GROUP) + heads
        # A chunk may be empty for some of its queries: their peak and LSE are -inf.
        total = tl.where(total == 0.0, 1.0, total)
        result /= total[:, None]
        tl.store(partials + at[:, None] * VALUE_DIM + dims[None, :], result, mask=is_value)
        tl.store(lse + at, (peak + tl.log2(total)) * LN_2, mask=is_row)
        if MERGES:
            _merge_rows(
                *(out, partials, lse, table, item, counters, sinks, number, heads, is_row),
                *(out_stride, out_head_stride),
                *(KV_HEADS * GROUP, VALUE_DIM, VALUE_PAD, ROWS, HAS_SINKS),
            )


@triton.jit
def _merge_rows(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    table: tl.tensor,
    item: tl.tensor,
    counters: tl.tensor,
    sinks: tl.tensor,
    number: tl.tensor,
    heads: tl.tensor,
    is_row: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUERY_PARTIALS: tl.constexpr = 11,
    TICKET_WORDS: tl.constexpr = 16,
    LOG2_E: tl.constexpr = 1.4426950408889634,
) -> None:
    """Merge the partials of the rows [M] whose last partial this program has written.

    The partials are read in their order, so the result does not depend on which program is last.
    """
    counter = counters + TICKET_WORDS + number.to(tl.int64) * HEADS + heads
    # All threads have written before one of them counts.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, mask=is_row, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    about = table + tl.load(item + QUERY_PARTIALS) + number * 2
    count = tl.load(about + 1, mask=is_row, other=0)
    is_last = is_row & (arrived == count - 1)
    count = tl.where(is_last, count, 0)
    most = tl.max(count, 0)
    if most > 0:
        first = tl.load(about, mask=is_last, other=0)
        dims = tl.arange(0, VALUE_PAD)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        if HAS_SINKS:
            peak = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        # A sink is a score of each head without a value.
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        result = tl.zeros([ROWS, VALUE_PAD], tl.float32)
        for index in range(most):
            is_used = index < count
            at = (first + index).to(tl.int64) * HEADS + heads
            weight = tl.load(lse + at, mask=is_used, other=float("-inf"), cache_modifier=".cg")
            new_peak = tl.maximum(peak, weight)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay = tl.exp2((peak - base) * LOG2_E)
            weight = tl.exp2((weight - base) * LOG2_E)
            value = tl.load(
                partials + at[:, None] * VALUE_DIM + dims[None, :],
                mask=is_used[:, None] & (dims < VALUE_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            result = result * decay[:, None] + weight[:, None] * value
            total = total * decay + weight
            peak = new_peak
        result /= tl.where(is_last, total, 1.0)[:, None]
        at = number.to(tl.int64) * out_stride + heads.to(tl.int64) * out_head_stride
        tl.store(
            out + at[:, None] + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=is_last[:, None] & (dims < VALUE_DIM)[None, :],
        )
        tl.store(counter, 0, mask=is_last)


@triton.jit
def _slots(
    pages: tl.tensor,
    offset: tl.tensor,
    start: tl.tensor,
    num_kv: tl.tensor,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Return the slots [N] of the tile of keys at `start`, with few loads of pages."""
    columns = start + tl.arange(0, TILE)
    inside = offset + columns
    if PAGE % TILE == 0:
        # Items begin at a multiple of TILE, so all keys are in one page.
        page = tl.load(pages + (offset + start) // PAGE)
        slot = page.to(tl.int64) * PAGE + inside % PAGE
    elif TILE % PAGE == 0:
        # Tiles begin at a page boundary, so one lookup serves all keys of a page.
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


@triton.jit
def _add_tile(
    peak: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
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
    """Add the tile of keys at `start` to the running softmax of all rows (FlashAttention)."""
    columns = start + tl.arange(0, TILE)
    is_key = columns < num_kv
    slot = _slots(pages, offset, start, num_kv, PAGE, TILE, IS_MASKED)

    dims = tl.arange(0, DIM_PAD)
    at = keys + (slot * key_stride)[None, :] + dims[:, None]
    if DIM != DIM_PAD:
        k = tl.load(at, mask=is_key[None, :] & (dims < DIM)[:, None], other=0.0)
    elif IS_MASKED:
        k = tl.load(at, mask=is_key[None, :], other=0.0)
    else:
        k = tl.load(at)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if HAS_CAP:
        # cap * tanh(x) with one exponential; its factor is part of `scale`.
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
        scale = 1.0
    if IS_MASKED:
        sees = is_key[None, :] & (columns[None, :] < limit[:, None])
        if HAS_WINDOW:
            sees &= columns[None, :] >= floor[:, None]
        scores = tl.where(sees, scores, float("-inf"))
    # The scale is positive, so the largest score is that of the largest product. Scaling it alone
    # saves a multiplication per score: the one below is part of the subtraction.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = new_peak
    if IS_MASKED:
        # Rows that have seen no key yet: exp2(-inf - -inf) would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale - base[:, None])
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
    result = tl.dot(weights.to(v.dtype), v, result * decay[:, None], input_precision=PRECISION)
    return new_peak, total, result
