"""What a tile is computed on: its matrix of scores, and a view of it for each call.

All layers of a step work on the same memory in the same shapes, and so do steps that only
lengthen rows. So views are made once and used by every layer: making them costs as much as
what is computed on them.

Knows tiles and shapes; refuses to know caches and what is computed. Kept true: columns that no
piece of a query writes hold -inf in its scores, before and after every layer.

Shapes: Q queries of a tile - K kv heads - G query heads of a group - C columns of the tile,
one more with sinks - D, E head dims of keys, values - q, L queries and keys of a piece.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from .stretch import Tail
from .tiles import Piece, Tile

FEW_PIECES: Final = 2
"""Of so many pieces a sum in 16 bits is as exact as one in float32 that is rounded at its end."""


class Part(NamedTuple):
    """A piece of a tile and what is multiplied for it.

    Where all queries read the same keys a kv head has one matrix: [K, q * G, ...]. In a tail
    each query has one of its own: [K, q, G, ...].
    """

    piece: Piece
    rows: Tensor
    """Queries, [.., D]."""
    scores: Tensor
    """Their products with keys, [.., L]."""
    last: Tensor
    """The scores that a bias is for, [K, q, G, columns of the bias]."""
    weights: Tensor
    """[.., L]."""
    found: Tensor
    """The sum of values, [.., E]."""


class Sheet:
    """The matrices of one tile."""

    def __init__(
        self,
        tile: Tile,
        shape: tuple[int, int, int],
        memory: Tensor,
        key_dim: int,
        value_dim: int,
        *,
        with_sinks: bool,
    ) -> None:
        """Lay out a tile.

        Args:
            tile: As it was cut.
            shape: [K, Q * G, C].
            memory: Numbers that are the tile's while a layer runs, K * Q * G * C or more.
            key_dim: D.
            value_dim: E.
            with_sinks: The last column is for sinks.
        """
        kv_heads, num_rows, width = shape
        by_query = (kv_heads, tile.num_queries, num_rows // tile.num_queries)
        self.tile: Final = tile
        self.weights: Final = memory[: kv_heads * num_rows * width].view(shape)
        """[K, Q * G, C]."""
        self.scores: Final = (
            torch.full_like(self.weights, float("-inf")) if tile.has_gaps else self.weights
        )
        """[K, Q * G, C]; the same memory where every column is written."""
        rows = memory.new_empty(kv_heads, num_rows, key_dim)
        wide = torch.promote_types(memory.dtype, torch.float32)
        dtype = wide if len(tile.pieces) > FEW_PIECES else memory.dtype
        found = torch.empty(kv_heads, num_rows, value_dim, dtype=dtype)
        self.queries: Final = rows.view(*by_query, key_dim).transpose(0, 1)
        """[Q, K, G, D]."""
        self.found: Final = found.view(*by_query, value_dim).transpose(0, 1)
        """[Q, K, G, E]; in float32 or wider where many pieces add up."""
        self.sinks: Final = self.scores[..., -1].view(by_query) if with_sinks else None
        """[K, Q, G]."""
        self.parts: Final = [
            _part(piece, by_query, rows, self.scores, self.weights, found) for piece in tile.pieces
        ]


def _part(
    piece: Piece,
    by_query: tuple[int, int, int],
    rows: Tensor,
    scores: Tensor,
    weights: Tensor,
    found: Tensor,
) -> Part:
    columns = slice(piece.column, piece.column + piece.width)

    def mine(matrix: Tensor, columns: slice) -> Tensor:
        return matrix.view(*by_query, -1)[:, piece.first : piece.end, :, columns]

    everything = slice(None)
    views = [
        mine(rows, everything),
        mine(scores, columns),
        mine(weights, columns),
        mine(found, everything),
    ]
    width = 0 if piece.bias is None else piece.bias.shape[2]
    last = views[1][..., piece.width - width :]
    if not isinstance(piece.tokens, Tail):
        # Queries of a head are neighbours: this is a view too.
        views = [view.flatten(1, 2) for view in views]
    return Part(piece, views[0], views[1], last, views[2], views[3])
