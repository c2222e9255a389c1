"""The operations on a CPU, built from fast torch calls.

Attention is a product, a softmax and a product, over tiles of queries (`tiles`). Each piece
of a tile writes `queries x keys` into its columns of the tile's scores; one softmax goes over
all columns; each piece adds `weights x values`. So a shared stretch is read once for all its
queries and for all heads of a group, which are packed as rows, and nothing is to be merged by
log-sum-exp: the parts of a query lie side by side in one row. All layers of a step share the
views that these calls need (`sheet`): between small products a layer's time is that of the
calls. What a decoding row reads alone is multiplied as sums of bags (`bags`), where its rows
are few.

This beats torch's own flash kernel for CPUs, which computes above the diagonal and spends its
time between the products: by 2 to 4 in bfloat16, and by what is not computed in float32. In
bfloat16 scores and weights are rounded between the calls, as by transformers' eager
attention: the library has no product of them that leaves float32. Sums are in float32 inside
each call, and between the calls too where a query has more than two pieces.

Knows tiles, no rows. Kept true: what a query must not see has weight 0, and values that stand
behind such a weight are of the query's own row.

Shapes: T queries - H query heads - K kv heads - G = H / K - D, E head dims of keys, values -
S parts - Q queries of a tile - C columns of a tile - L keys of a piece - M slots.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .bags import add_up, can_bag
from .plan import Plan
from .sheet import Part, Sheet
from .stretch import KEPT_BYTES, Room, Stored, Tail
from .tiles import RUN_TOKENS, Sizes, cut

FEW_ROWS: Final = 48
"""So few rows of a 16-bit dtype are multiplied as `keys x queries` with keys that are read in
place, and the result is turned over: torch copies such keys before it multiplies by their
transpose. Measured: 180 us instead of 270 for 1,488 keys and 32 rows of 4 heads of 64."""
FEW_WIDE_ROWS: Final = 4
"""The same for wider dtypes, whose keys the library then reads up to twice as fast."""


RUN_BYTES: Final = 2**18
"""So many keys of a decoding query alone are read in place, if those of all layers cannot be
kept: else bags read them faster."""


class Cpu:
    """The implementation. It keeps memory for scores, so it serves one thread."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._former: dict[Hashable, tuple[Plan, list[Sheet]]] = {}
        """What each kind of layer had in this step or in the one before: its tiles may grow
        as long as no step is missed."""
        self._plan: Plan | None = None
        """Of the step that runs."""
        self._room = Room()
        self._caches: set[int] = set()
        """Caches of keys that were ever read, by address."""
        self._written: dict[int, Tensor | None] = {}
        """Slots written to a cache since it was last read, by address; None: several times."""

    def attention(
        self,
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
        """Run the plan's tiles; see `ops.Operations.attention`."""
        self._caches.add(key_cache.data_ptr())
        keys, values = self._stored(key_cache, plan), self._stored(value_cache, plan)
        if key_cache.data_ptr() == value_cache.data_ptr():
            # Values that are a part of the keys were written with them.
            values = values._replace(is_stored=keys.is_stored, is_same=keys.is_same)
        if keys.rows is None or values.rows is None:
            keys, values = keys._replace(rows=None), values._replace(rows=None)
        factor = scale if softcap is None else scale / softcap
        for sheet in self._sheets(plan, window, query, keys, values, with_sinks=sinks is not None):
            queries = sheet.tile.queries
            if isinstance(queries, slice):
                picked = query[queries]
            else:
                picked = query.index_select(0, queries)
            torch.mul(picked.view(sheet.queries.shape), factor, out=sheet.queries)
            _score(sheet, keys, softcap, sinks)
            torch.softmax(sheet.scores, dim=-1, out=sheet.weights)
            found = _weigh(sheet, values)
            if isinstance(queries, slice):
                out[queries].view(found.shape).copy_(found)
            else:
                found = found.reshape(len(queries), *out.shape[1:])
                out.index_copy_(0, queries, found.to(out.dtype))
        return out

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
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
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Write new keys and values to their slots; see `ops.Operations.store_kv`."""
        for address in (key_cache.data_ptr(), value_cache.data_ptr()):
            self._written[address] = None if address in self._written else slots
        for new, cache in ((key, key_cache), (value, value_cache)):
            heads = cache.flatten(0, 1).transpose(0, 1)
            heads.index_copy_(1, slots, new.to(cache.dtype).transpose(0, 1))

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks inside each cache; see `ops.Operations.copy_blocks`."""
        self._forget(None)
        for cache in caches:
            cache.index_copy_(0, destination, cache.index_select(0, source))

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a cache whose heads lie apart: a stretch of one head is one matrix."""
        stored = _zeros(heads * num_blocks * block_size * dim, dtype)
        return stored.view(heads, num_blocks, block_size, dim).permute(1, 2, 0, 3)

    def _stored(self, cache: Tensor, plan: Plan) -> Stored:
        heads = cache.flatten(0, 1).transpose(0, 1)
        rows = heads.view(-1, heads.shape[2]) if heads.is_contiguous() else None
        address = cache.data_ptr()
        is_same = address not in self._written
        written = self._written.pop(address, None)
        is_stored = written is not None and np.array_equal(written.numpy(), plan.slots)
        return Stored(heads, rows, is_stored, is_same)

    def _sheets(
        self,
        plan: Plan,
        window: int | None,
        query: Tensor,
        keys: Stored,
        values: Stored,
        *,
        with_sinks: bool,
    ) -> list[Sheet]:
        """Return what a layer works on, made once per step and kind of layer, or grown."""
        heads, element = query.shape[1], query.element_size()
        kv_heads, num_slots, dim = keys.heads.shape
        value_dim = values.heads.shape[2]
        binding = plan.binding(window)
        shape = (kv_heads, num_slots, dim, value_dim, keys.rows is None)
        key = ("cpu", binding, query.dtype, heads, shape, with_sinks)
        if plan is not self._plan:
            self._forget(self._plan)
            self._plan = plan
        former, sheets = self._former.get(key, (None, []))
        if former is plan:
            return sheets
        can_grow = former is not None and binding is None and all(s.tile.can_grow() for s in sheets)
        if former is not None and can_grow and _goes_on(former, plan):
            # They are this step's from now on.
            for sheet in sheets:
                sheet.tile.grow(plan.slots)
        else:
            self._former.pop(key, None)
            for sheet in sheets:
                sheet.tile.forget()
            token_bytes = kv_heads * dim * element
            is_kept = binding is None and can_bag(query[:, : heads // kv_heads])
            is_kept = is_kept and self._can_keep(plan, token_bytes)
            run_tokens = sys.maxsize if is_kept else max(RUN_TOKENS, RUN_BYTES // token_bytes)
            sizes = Sizes(query.dtype, heads * element, token_bytes, run_tokens)
            tiles = cut(plan, window, sizes, self._room)
            group = heads // kv_heads
            shapes = [(kv_heads, t.num_queries * group, t.width + with_sinks) for t in tiles]
            memory = self._take(max(map(math.prod, shapes)) * element).view(query.dtype)
            sheets = [
                Sheet(tile, shape, memory, dim, value_dim, with_sinks=with_sinks)
                for tile, shape in zip(tiles, shapes, strict=True)
            ]
        self._former[key] = (plan, sheets)
        return sheets

    def _can_keep(self, plan: Plan, token_bytes: int) -> bool:
        """Say whether there is room for what rows read alone, all layers together."""
        own = int((plan.kv_len - plan.tree.own * plan.block_size).sum())
        is_decoding = plan.num_queries == plan.num_rows
        return is_decoding and own * token_bytes * len(self._caches) <= KEPT_BYTES

    def _forget(self, besides: Plan | None) -> None:
        """Let go of the tiles of every step but one."""
        for key, (plan, sheets) in list(self._former.items()):
            if plan is not besides:
                del self._former[key]
                for sheet in sheets:
                    sheet.tile.forget()

    def _take(self, size: int) -> Tensor:
        """Return memory for one matrix at a time: fresh memory would cost page faults."""
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]


def _zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Return zeros in large pages, where the system has them.

    Blocks lie all over a cache: in small pages each costs a walk through the page table.
    Fresh pages are zero, and take no memory until they are written.
    """
    # Of its own: pages that could be shared with other processes are always small.
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, size * dtype.itemsize), flags=kind)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=size)


def _goes_on(former: Plan, plan: Plan) -> bool:
    """Say whether every row is one of the former step with one token more, and no other."""
    if plan.num_rows != former.num_rows or plan.num_queries != plan.num_rows:
        return False
    if former.num_queries != plan.num_queries or (plan.kv_len != former.kv_len + 1).any():
        return False
    width = former.tables.shape[1]
    if plan.block_size != former.block_size or plan.tables.shape[1] < width:
        return False
    same = (plan.tables[:, :width] == former.tables) | (former.tables < 0)
    return bool(same.all())


def _score(sheet: Sheet, keys: Stored, softcap: float | None, sinks: Tensor | None) -> None:
    """Write the scores of a tile, -inf for what a query must not see; sinks come last."""
    for part in sheet.parts:
        tokens, bias = part.piece.tokens, part.piece.bias
        if isinstance(tokens, Tail):
            assert bias is not None, "tails are padded"
            products = _tail_scores(part.rows, tokens, keys)
            if softcap is not None:
                products.tanh_().mul_(softcap)
            torch.add(products, bias, out=part.scores)
            continue
        _multiply(part, tokens.read(keys))
        if softcap is not None:
            part.scores.tanh_().mul_(softcap)
        if bias is not None:
            part.last.add_(bias)
    if sheet.sinks is not None:
        assert sinks is not None, "a sheet has a column for sinks where there are some"
        sheet.sinks.copy_(sinks.view(len(sheet.sinks), 1, -1))


def _multiply(part: Part, key: Tensor) -> None:
    """Write the products of a part's rows with keys [K, L, D]."""
    rows, target = part.rows, part.scores
    is_wide = rows.dtype.itemsize >= 4
    if (
        rows.shape[1] <= FEW_WIDE_ROWS
        if is_wide
        else rows.shape[1] <= FEW_ROWS and not key.is_contiguous()
    ):
        target.copy_(torch.bmm(key, rows.transpose(1, 2)).transpose(1, 2))
    else:
        torch.bmm(rows, key.transpose(1, 2), out=target)


def _weigh(sheet: Sheet, values: Stored) -> Tensor:
    """Return what the queries of a tile find, [Q, K, G, E]: the sum of values by weights."""
    for part in sheet.parts:
        tokens, weights, found = part.piece.tokens, part.weights, part.found
        if isinstance(tokens, Tail) or found.dtype != weights.dtype:
            if isinstance(tokens, Tail):
                products = _tail_sums(weights, tokens, values)
                if len(sheet.parts) == 1:
                    return products.transpose(0, 1)
            else:
                products = torch.matmul(weights, tokens.read(values))
            if part.piece.is_first:
                found.copy_(products)
            else:
                found.add_(products)
        elif part.piece.is_first:
            torch.bmm(weights, tokens.read(values), out=found)
        else:
            found.baddbmm_(weights, tokens.read(values))
    return sheet.found


def _tail_scores(rows: Tensor, tail: Tail, keys: Stored) -> Tensor:
    """Return the products of rows [K, n, G, D] with keys of each query's own, [K, n, G, W]."""
    is_bagged = can_bag(rows)
    turned = tail.read(keys, is_turned=is_bagged).transpose(2, 3)
    if not is_bagged or not turned.is_contiguous():
        return torch.matmul(rows, turned)
    kv_heads, _, group, dim = rows.shape
    bags = tail.turned(kv_heads, group, dim)
    return add_up(turned.reshape(-1, turned.shape[3]), bags, rows)


def _tail_sums(weights: Tensor, tail: Tail, values: Stored) -> Tensor:
    """Return the sums of each query's own values by weights [K, n, G, W], [K, n, G, E]."""
    if values.rows is None or not can_bag(weights):
        return torch.matmul(weights, tail.read(values))
    return add_up(values.rows, tail.places(values, weights.shape[2]), weights)
