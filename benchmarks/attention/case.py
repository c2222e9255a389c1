"""One benchmark row on a device: queries, paged caches of several layers, block tables.

Each layer has its own keys, values and queries, and together they exceed any cache. `exact`
computes the attention of a request in float64 from the definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conure.kernels.ops import AttentionOperations

from .rows import BenchmarkRow, RequestTables, lay_out

CACHE_BYTES = {"cuda": 200 * 2**20, "cpu": 100 * 2**20}
"""Minimum size of all layers together: several times the caches of any device."""
MAX_LAYERS = 48


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The tensors of one row.

    Shapes: B requests - H query heads - K kv heads - D head dim - N blocks.
    """

    row: BenchmarkRow
    block_size: int
    tables: RequestTables
    queries: list[Tensor]
    """Queries of each layer, [B, H, D]."""
    keys: list[Tensor]
    """Keys of each layer, [N, block size, K, D], in the layout of our implementation."""
    values: list[Tensor]

    @property
    def layers(self) -> int:
        """Number of layers of a pass."""
        return len(self.queries)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.queries[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of queries, keys and values."""
        return self.queries[0].dtype

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.row.head_dim**-0.5)

    def gathered(self, cache: Tensor) -> Tensor:
        """Return the tokens of every request, gathered from a cache, [B, K, L, D]."""
        row = self.row
        blocks = torch.tensor(self.tables.tables, device=self.device)
        picked = torch.empty(
            (row.num_requests, row.kv_heads, row.kv_len, row.head_dim),
            dtype=self.dtype,
            device=self.device,
        )
        for request in range(row.num_requests):
            tokens = cache[blocks[request]].flatten(0, 1)[: row.kv_len]
            picked[request] = tokens.transpose(0, 1)
        return picked

    def exact(self, layer: int, request: int) -> Tensor:
        """Return the exact attention of one request, [H, D] in float64."""
        row = self.row
        blocks = torch.tensor(self.tables.tables[request], device=self.device)
        keys, values = (
            cache[layer][blocks].flatten(0, 1)[: row.kv_len].double()
            for cache in (self.keys, self.values)
        )
        query = self.queries[layer][request].double().view(row.kv_heads, -1, row.head_dim)
        scores = torch.einsum("kgd,lkd->kgl", query, keys) * self.scale
        return torch.einsum("kgl,lkd->kgd", scores.softmax(-1), values).flatten(0, 1)


def make(
    row: BenchmarkRow,
    operations: AttentionOperations,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> AttentionCase:
    """Create the tensors of a row, with numbers of unit scale.

    Raises:
        ValueError: if the row's inner nodes do not fill blocks of this size.
    """
    tables = lay_out(row, block_size, seed=seed)
    layers = -(-CACHE_BYTES[device.type] // row.shared_bytes(dtype.itemsize))
    layers = min(MAX_LAYERS, max(2, layers))
    generator = torch.Generator(device).manual_seed(seed)

    def cache() -> Tensor:
        created = operations.new_cache(
            tables.num_blocks, block_size, row.kv_heads, row.head_dim, dtype
        ).to(device)
        return created.normal_(generator=generator)

    def query() -> Tensor:
        shape = (row.num_requests, row.heads, row.head_dim)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    return AttentionCase(
        row,
        block_size,
        tables,
        [query() for _ in range(layers)],
        [cache() for _ in range(layers)],
        [cache() for _ in range(layers)],
    )
