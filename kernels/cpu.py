"""The operations on a CPU, built from fast torch calls.

Attention is a product, a softmax and a product, over tiles of queries (`tiles`). Each piece
of a tile writes `queries x keys` into its columns of the tile's scores; one softmax goes over
all columns; each piece adds `weights x values`. So a shared stretch is read once for all its
queries and for all heads of a group, which are packed as rows, and nothing is to be merged by
log-sum-exp: the parts of a query lie side by side in one row.

This beats torch's own flash kernel for CPUs, which computes above the diagonal and spends its
time between the products: by 2 to 4 in bfloat16, and by what is not computed in float32. In
bfloat16 scores and weights are rounded between the calls, as by transformers' eager
attention; sums are in float32 inside each call.

Knows tiles, no rows. Kept true: what a query must not see has weight 0, and values that stand
behind such a weight are of the query's own row.

Shapes: T queries - H query heads - K kv heads - G = H / K - D, E head dims of keys, values -
S parts - Q queries of a tile - C columns of a tile - L keys of a piece - M slots.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .plan import Plan
from .tails import Room, Tail
from .tiles import Piece, Sizes, Tile, cut

FEW_ROWS: Final = 48
"""So few rows are multiplied as `keys x queries`, and the result is turned over: the library
reads keys from memory 3 times as fast that way. Measured: 16-bit dtypes up to 64 rows."""
FEW_WIDE_ROWS: Final = 4
"""The same for wider dtypes."""


class _Stored(NamedTuple):
    """A cache in two views."""

    heads: Tensor
    """[K, M, D]."""
    rows: Tensor | None
    """[K * M, D], where heads lie one after the other: rows are gathered faster."""
    is_stored: bool
    """Since this cache was read last exactly the new tokens of the plan were written to it."""
    is_same: bool
    """Since this cache was read last nothing was written to it."""


class Cpu:
    """The implementation. It keeps memory for scores, so it serves one thread."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._former: dict[Hashable, tuple[Plan, list[Tile]]] = {}
        """The tiles that each kind of layer had in this step or in the one before: they may
        grow as long as no step is missed."""
        self._plan: Plan | None = None
        """Of the step that runs."""
        self._room = Room()
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
        keys, values = self._stored(key_cache, plan), self._stored(value_cache, plan)
        if keys.rows is None or values.rows is None:
            keys, values = keys._replace(rows=None), values._replace(rows=None)
        for tile in self._tiles(plan, window, query, keys, with_sinks=sinks is not None):
            if isinstance(tile.queries, slice):
                picked = query[tile.queries]
            else:
                picked = query.index_select(0, tile.queries)
            scores = self._scores(tile, _rows(picked, scale, len(keys.heads)), keys, softcap, sinks)
            # Where the tile has gaps its own matrix is to hold -inf there for the next layer.
            weights = self._take(scores.shape, scores.dtype) if tile.has_gaps else scores
            torch.softmax(scores, dim=-1, out=weights)
            found = _values(tile, weights, values)
            if isinstance(tile.queries, slice):
                out[tile.queries] = found
            else:
                out.index_copy_(0, tile.queries, found)
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
        key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
        value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))

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

    def _scores(
        self, tile: Tile, rows: Tensor, keys: _Stored, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Return the scores [K, Q * G, C] of a tile from rows [K, Q * G, D]; sinks come last."""
        kv_heads, num_rows, _ = rows.shape
        group = num_rows // tile.num_queries
        shape = (kv_heads, num_rows, tile.width + (sinks is not None))
        if not tile.has_gaps:
            scores = self._take(shape, rows.dtype)
        elif tile.scores is not None:
            scores = tile.scores
        else:
            scores = tile.scores = torch.full(shape, float("-inf"), dtype=rows.dtype)
        for piece in tile.pieces:
            span = slice(piece.first * group, piece.end * group)
            target = scores[:, span, piece.column : piece.column + piece.width]
            _multiply(piece, rows[:, span], _pick(keys, piece.tokens), target)
            if softcap is not None:
                target.div_(softcap).tanh_().mul_(softcap)
            if piece.bias is not None:
                end = target[..., piece.width - piece.bias.shape[2] :]
                end.view(kv_heads, -1, group, piece.bias.shape[2]).add_(piece.bias)
        if sinks is not None:
            scores[..., -1].view(kv_heads, -1, group).copy_(sinks.view(kv_heads, 1, group))
        return scores

    def _stored(self, cache: Tensor, plan: Plan) -> _Stored:
        heads = cache.flatten(0, 1).transpose(0, 1)
        rows = heads.view(-1, heads.shape[2]) if heads.is_contiguous() else None
        address = cache.data_ptr()
        is_same = address not in self._written
        written = self._written.pop(address, None)
        is_stored = written is not None and np.array_equal(written.numpy(), plan.slots)
        return _Stored(heads, rows, is_stored, is_same)

    def _tiles(
        self, plan: Plan, window: int | None, query: Tensor, keys: _Stored, *, with_sinks: bool
    ) -> list[Tile]:
        """Return the tiles of a layer, made once per step and kind of layer, or grown."""
        heads, element = query.shape[1], query.element_size()
        kv_heads, num_slots, dim = keys.heads.shape
        sizes = Sizes(
            query.dtype,
            kv_heads,
            None if keys.rows is None else num_slots,
            score_bytes=heads * element,
            token_bytes=kv_heads * dim * element,
        )
        binding = plan.binding(window)
        key = ("cpu", binding, sizes, with_sinks)
        tiles: list[Tile] | None = plan.derived.get(key)
        if tiles is not None:
            return tiles
        if plan is not self._plan:
            self._forget(self._plan)
            self._plan = plan
        former, tiles = self._former.pop(key, (None, []))
        can_grow = former is not None and binding is None and all(t.can_grow() for t in tiles)
        if former is not None and can_grow and _goes_on(former, plan):
            # They are this step's from now on.
            former.derived.pop(key, None)
            for tile in tiles:
                tile.grow(plan.slots)
        else:
            for tile in tiles:
                tile.forget()
            tiles = cut(plan, window, sizes, self._room)
        plan.derived[key] = tiles
        self._former[key] = (plan, tiles)
        return tiles

    def _forget(self, besides: Plan | None) -> None:
        """Let go of the tiles of every step but one."""
        for key, (plan, tiles) in list(self._former.items()):
            if plan is not besides:
                del self._former[key]
                for tile in tiles:
                    tile.forget()

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for one matrix at a time: fresh memory would cost page faults."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(*shape)


def _zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Return zeros in large pages, where the system has them.

    Blocks lie all over a cache: in small pages each costs a walk through the page table.
    Fresh pages are zero, and take no memory until they are written.
    """
    memory = mmap.mmap(-1, max(1, size * dtype.itemsize))
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


def _rows(query: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Return queries [Q, H, D] as rows [K, Q * G, D], scaled."""
    num, heads, dim = query.shape
    grouped = (query * scale).reshape(num, kv_heads, heads // kv_heads, dim)
    return grouped.transpose(0, 1).reshape(kv_heads, -1, dim)


def _multiply(piece: Piece, rows: Tensor, key: Tensor, target: Tensor) -> None:
    """Write to `target` [K, R, L] the products of rows [K, R, D] and a piece's keys."""
    few = FEW_ROWS if rows.dtype.itemsize < 4 else FEW_WIDE_ROWS
    if isinstance(piece.tokens, Tail):
        rows, key = _each(piece, rows), _each(piece, key).transpose(1, 2)
        if target.is_contiguous():
            torch.bmm(rows, key, out=target.view(len(rows), -1, piece.width))
        else:
            target.copy_(torch.bmm(rows, key).view(target.shape))
    elif rows.shape[1] <= few:
        target.copy_(torch.bmm(key, rows.transpose(1, 2)).transpose(1, 2))
    else:
        torch.bmm(rows, key.transpose(1, 2), out=target)


def _values(tile: Tile, weights: Tensor, values: _Stored) -> Tensor:
    """Return the outputs [Q, H, E] of a tile from weights [K, Q * G, C]."""
    kv_heads, num_rows, _ = weights.shape
    group = num_rows // tile.num_queries
    out = weights.new_empty(kv_heads, num_rows, values.heads.shape[2])
    for piece in tile.pieces:
        target = out[:, piece.first * group : piece.end * group]
        weight = weights[
            :, piece.first * group : piece.end * group, piece.column : piece.column + piece.width
        ]
        value = _pick(values, piece.tokens)
        if isinstance(piece.tokens, Tail):
            found = torch.bmm(_each(piece, weight), _each(piece, value)).view(target.shape)
            if piece.is_first:
                target.copy_(found)
            else:
                target.add_(found)
        elif piece.is_first:
            torch.bmm(weight, value, out=target)
        else:
            target.baddbmm_(weight, value)
    split = out.view(kv_heads, tile.num_queries, group, -1).transpose(0, 1)
    return split.reshape(tile.num_queries, kv_heads * group, -1)


def _each(piece: Piece, rows: Tensor) -> Tensor:
    """Return [K, n * L, D] as [K * n, L, D], one matrix per head and query of a piece."""
    num = piece.end - piece.first
    return rows.reshape(rows.shape[0] * num, -1, rows.shape[2])


def _pick(stored: _Stored, tokens: Tensor | slice | Tail) -> Tensor:
    """Return the named slots of each head, [K, L, D], in place where they are neighbours."""
    if isinstance(tokens, slice):
        return stored.heads[:, tokens]
    if stored.rows is None:
        index = tokens.index if isinstance(tokens, Tail) else tokens
        return stored.heads.index_select(1, index)
    if isinstance(tokens, Tail):
        found = tokens.read(stored.rows, is_stored=stored.is_stored, is_same=stored.is_same)
    else:
        found = stored.rows.index_select(0, tokens)
    return found.view(len(stored.heads), -1, stored.rows.shape[1])
