"""A row made real on a device: queries, paged caches of several layers, block tables.

Each layer has keys, values and queries of its own, and together they outgrow any cache. Knows
where tokens lie, and what attention over them is: `exact` computes it in float64 from the
definition, apart from all that is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conure.kernels.ops import Operations

from .rows import Row, Tables, lay_out

CACHE_BYTES = {"cuda": 200 * 2**20, "cpu": 100 * 2**20}
"""What all layers hold at least: several times the caches of any device."""
MOST_LAYERS = 48


@dataclass(frozen=True, slots=True)
class Scene:
    """One row, ready to be attended to.

    Shapes: B requests - H query heads - K kv heads - D head dim - N blocks.
    """

    row: Row
    block_size: int
    tables: Tables
    queries: list[Tensor]
    """Of each layer, [B, H, D]."""
    keys: list[Tensor]
    """Of each layer, [N, block size, K, D], in the layout that our implementation likes."""
    values: list[Tensor]

    @property
    def layers(self) -> int:
        """How many layers a pass has."""
        return len(self.queries)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.queries[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys and values."""
        return self.queries[0].dtype

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.row.head_dim**-0.5)

    def gathered(self, cache: Tensor) -> Tensor:
        """Return every request's tokens of a cache, one after the other, as [B, K, L, D]."""
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
        """Return what one request's query finds, [H, D] in float64."""
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
    row: Row,
    operations: Operations,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Scene:
    """Lay a row out and fill it with numbers of unit scale.

    Raises:
        ValueError: if the row's inner nodes do not fill blocks of this size.
    """
    tables = lay_out(row, block_size, seed=seed)
    layers = -(-CACHE_BYTES[device.type] // row.shared_bytes(dtype.itemsize))
    layers = min(MOST_LAYERS, max(2, layers))
    generator = torch.Generator(device).manual_seed(seed)

    def cache() -> Tensor:
        made = operations.new_cache(
            tables.num_blocks, block_size, row.kv_heads, row.head_dim, dtype
        ).to(device)
        return made.normal_(generator=generator)

    def query() -> Tensor:
        shape = (row.num_requests, row.heads, row.head_dim)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    return Scene(
        row,
        block_size,
        tables,
        [query() for _ in range(layers)],
        [cache() for _ in range(layers)],
        [cache() for _ in range(layers)],
    )
