"""What lies between the matrix products of a decoder layer: few passes over small tensors.

On an accelerator these operations cost a launch and a pass through memory each, whatever
they compute, so neighbours are one operation here: the residual addition and the norm behind
it, everything between the projection of queries, keys and values and attention, and the gate
of the MLP.

`implementation(name)` picks who computes. Both mean the same:

    reference    plain torch, which defines it; any device, nothing that asks it for a number
    triton       one kernel each, for CUDA devices

All arithmetic is in float32 (float64 where the tensors are) and rounded once, when stored.

Shapes: T tokens - W width of the hidden state - H query heads - K kv heads - D head dim, even -
B tokens of a block - N blocks - L positions - I width inside the MLP.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

NAMES: Final = ("reference", "triton")


class Fused(Protocol):
    """The operations."""

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` in place and return the RMS norm of the sum.

        Args:
            hidden: [T, W] contiguous, overwritten.
            delta: [T, W] contiguous.
            weight: [W].
            eps: Added to the mean square.

        Returns:
            [T, W] in the dtype of `hidden`.
        """
        ...

    def rotate_store(
        self,
        mixed: Tensor,
        positions: Tensor,
        slots: Tensor,
        angles: tuple[Tensor, Tensor],
        head_norm: Tensor | None,
        eps: float,
        caches: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Turn queries and keys to their positions, store keys and values, return queries.

        Args:
            mixed: [T, (H + 2 K) * D] contiguous: queries, keys, values of each token.
            positions: [T] int64 below L.
            slots: [T] int64, where each token's key and value go: block * B + offset.
            angles: Cosines and sines, [L, D] contiguous; the sines of the first half of a
                head are negated, as the halves change places.
            head_norm: [H + K, D] contiguous, weights of an RMS norm of each query and key
                head before it is turned; None for none.
            eps: Of that norm.
            caches: Keys and values, [N, B, K, D] with slots at one distance, written.

        Returns:
            Queries [T, H, D] in the dtype of `mixed`.
        """
        ...

    def gate(self, mixed: Tensor) -> Tensor:
        """Return `silu(gate) * up`.

        Args:
            mixed: [T, 2 * I] contiguous: gate, up of each token.

        Returns:
            [T, I] in the dtype of `mixed`.
        """
        ...


def implementation(name: str) -> Fused:
    """Return the operations of one implementation; `triton` is imported when asked for.

    Raises:
        ValueError: if `name` is not one of `NAMES`.
        ImportError: if triton is not installed and asked for.
    """
    if name == "reference":
        return Reference()
    if name == "triton":
        from .gpu.fused import Triton

        return Triton()
    raise ValueError(f"implementation must be one of {', '.join(NAMES)}, got {name!r}")


class Reference:
    """The definition."""

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Fused`."""
        hidden.copy_(_wide(hidden) + _wide(delta))
        return (_normed(_wide(hidden), eps) * _wide(weight)).to(hidden.dtype)

    def rotate_store(
        self,
        mixed: Tensor,
        positions: Tensor,
        slots: Tensor,
        angles: tuple[Tensor, Tensor],
        head_norm: Tensor | None,
        eps: float,
        caches: tuple[Tensor, Tensor],
    ) -> Tensor:
        """See `Fused`."""
        kv_heads, dim = caches[0].shape[2:]
        heads = mixed.view(len(mixed), mixed.shape[1] // dim, dim)
        turned = _wide(heads[:, :-kv_heads])
        if head_norm is not None:
            turned = _normed(turned, eps) * _wide(head_norm)
        cos, sin = (_wide(table.index_select(0, positions))[:, None] for table in angles)
        turned = (turned * cos + turned.roll(dim // 2, -1) * sin).to(mixed.dtype)
        for cache, new in zip(caches, (turned[:, -kv_heads:], heads[:, -kv_heads:]), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, new)
        return turned[:, :-kv_heads]

    def gate(self, mixed: Tensor) -> Tensor:
        """See `Fused`."""
        gate, up = _wide(mixed).chunk(2, dim=-1)
        return (torch.sigmoid(gate) * gate * up).to(mixed.dtype)


def _normed(values: Tensor, eps: float) -> Tensor:
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
