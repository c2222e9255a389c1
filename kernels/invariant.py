"""Attention on a CPU whose result for a query depends on nothing but what the query sees.

In 16 bits the order of additions shows. `cpu` sums in whatever order is fastest for the step:
with a prefix shared or not, beside few queries or many. Here the sums of a query run over
tiles of `TILE_TOKENS` positions, counted from position 0 of its context, one tile after the
other: the same alone, in a batch, behind a shared prefix, and in a prompt cut anywhere. What
a tile holds beyond the query's own position has weight 0, and adding it changes no bit.

Nothing is shared between rows, so each row reads its whole context.

Kept true, where the matrix library computes an element of a product the same way whatever
else is in the product, as oneDNN does in bfloat16: a query's output is the same bit for bit
in every plan that shows it the same keys and values. Nobody promises that of a library, so
whoever relies on it tries it first.

Shapes: T queries - R rows - n queries of each - H query heads - K kv heads - G = H / K -
D, E head dims of keys, values - N tiles - C tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu import Cpu
from .plan import Integers, Plan
from .stretch import pick

TILE_TOKENS: Final = 128
MOST_QUERIES: Final = 128
"""Queries of a row that are attended at once."""
MOST_SCORES: Final = 2**20
"""Scores of a head that are made at once, or one query's."""
MOST_SLOTS: Final = 2**16
"""Tokens that are gathered at once for several rows."""


class Group(NamedTuple):
    """Rows, or parts of a row, whose queries see as many tiles."""

    queries: Tensor
    """Packed queries, [R * n]."""
    slots: Tensor
    """Where the tokens of the tiles lie, [R * N * C]; what is beyond a row repeats its first."""
    bias: Tensor
    """0 where a query sees a token, else -inf: [R, n, N * C], float32."""
    num_rows: int
    num_tiles: int


class Invariant(Cpu):
    """The implementation; all but attention is that of `Cpu`."""

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
        """Attend group by group; see `ops.Operations.attention`."""
        window = plan.binding(window)
        key = ("invariant", window)
        groups: list[Group] | None = plan.derived.get(key)
        if groups is None:
            groups = plan.derived[key] = list(_groups(plan, window))
        keys, values = (cache.flatten(0, 1).transpose(0, 1) for cache in (key_cache, value_cache))
        for group in groups:
            rows = query.index_select(0, group.queries) * scale
            found = _attend(group, rows, keys, values, softcap, sinks)
            out.index_copy_(0, group.queries, found.to(out.dtype))
        return out


def _attend(
    group: Group,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [R * n, H, E] for queries [R * n, H, D], scaled, and caches [K, slots, D or E]."""
    num_rows, num_tiles = group.num_rows, group.num_tiles
    kv_heads = len(keys)
    num = len(query) // num_rows
    grouped = query.view(num_rows, num, kv_heads, -1, query.shape[2]).permute(2, 0, 1, 3, 4)
    size = grouped.shape[3]
    flat = grouped.reshape(kv_heads * num_rows, num * size, -1)
    key = pick(keys, group.slots).view(kv_heads * num_rows, -1, flat.shape[2])
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.bmm(flat, key.transpose(1, 2)).to(wide)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(kv_heads, num_rows, num, size, num_tiles * TILE_TOKENS)
    scores += group.bias[None, :, :, None]
    most = scores.amax(dim=-1, keepdim=True)
    sink = None if sinks is None else sinks.to(wide).view(kv_heads, 1, 1, size, 1)
    if sink is not None:
        most = torch.maximum(most, sink)
    weights = scores.sub_(most).exp_().view(*scores.shape[:-1], num_tiles, TILE_TOKENS)
    # One tile after the other, never in a tree whose shape would tell how many there are.
    parts = weights.sum(dim=-1)
    total = parts[..., 0].clone()
    for tile in range(1, num_tiles):
        total += parts[..., tile]
    if sink is not None:
        total += torch.exp(sink - most)[..., 0]
    value = pick(values, group.slots)
    products = torch.bmm(
        weights.to(query.dtype).permute(0, 1, 4, 2, 3, 5).reshape(-1, num * size, TILE_TOKENS),
        value.view(kv_heads * num_rows * num_tiles, TILE_TOKENS, -1),
    ).view(kv_heads, num_rows, num_tiles, num, size, -1)
    found = products[:, :, 0].to(wide)
    for tile in range(1, num_tiles):
        found += products[:, :, tile]
    found /= total[..., None]
    return found.permute(1, 2, 0, 3, 4).reshape(len(query), kv_heads * size, -1)


def _groups(plan: Plan, window: int | None) -> Iterator[Group]:
    """Cut a step: decoding rows with as many tiles together, a prompt in parts of its own."""
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, (count, length) in enumerate(
        zip(plan.num_new.tolist(), plan.kv_len.tolist(), strict=True)
    ):
        most = max(1, min(MOST_QUERIES, MOST_SCORES // length))
        for first in range(0, count, most):
            end = min(count, first + most)
            position = length - count + first
            begin = 0 if window is None else max(0, position - window + 1) // TILE_TOKENS
            tiles = -(-(length - count + end) // TILE_TOKENS) - begin
            if count == 1:
                alike.setdefault((begin, tiles), []).append((row, position))
            else:
                yield _group(plan, window, [(row, position)], end - first, begin, tiles)
    for (begin, tiles), rows in alike.items():
        most = max(1, MOST_SLOTS // (tiles * TILE_TOKENS))
        for at in range(0, len(rows), most):
            yield _group(plan, window, rows[at : at + most], 1, begin, tiles)


def _group(
    plan: Plan,
    window: int | None,
    parts: list[tuple[int, int]],
    num: int,
    begin: int,
    num_tiles: int,
) -> Group:
    """Return a group of rows by number and the position of their first of `num` queries."""
    size = plan.block_size
    rows, firsts = np.array(parts, dtype=np.int64).T
    seen = begin * TILE_TOKENS + np.arange(num_tiles * TILE_TOKENS)
    # Beyond its end a row reads its first token of the stretch again.
    inside = np.where(seen < (firsts + num)[:, None], seen, begin * TILE_TOKENS)
    slots = plan.tables[rows[:, None], inside // size] * size + inside % size
    own = firsts[:, None] + np.arange(num)
    visible = seen <= own[:, :, None]
    if window is not None:
        visible &= seen > own[:, :, None] - window
    starts = plan.kv_len[rows] - plan.num_new[rows]
    queries: Integers = (plan.query_start[rows] + firsts - starts)[:, None] + np.arange(num)
    return Group(
        torch.from_numpy(queries.reshape(-1)),
        torch.from_numpy(slots.reshape(-1)),
        torch.from_numpy(np.where(visible, np.float32(0), np.float32("-inf"))),
        len(parts),
        num_tiles,
    )
