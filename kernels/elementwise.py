"""Elementwise operations between the matrix products of a decoder layer.

On an accelerator each of these operations costs a launch and a pass through memory, whatever it
computes, so neighbouring operations are fused: the residual addition and the norm after it,
everything between the projection of queries, keys and values and attention, and the gate of the
MLP.

`implementation(name)` returns one of three implementations with the same results:

    reference    plain torch, which defines the results; any device
    cpu          C++, compiled for an instruction set of the processor
    triton       one kernel per operation, for CUDA devices

All arithmetic is in float32 (float64 for float64 tensors) and rounded once, when stored.

Shapes: T tokens - W width of the hidden state - H query heads - K KV heads - D head dim, even -
B tokens of a block - N blocks - L positions - I width inside the MLP.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from .cpu import library
from .cpu.attention import NativeLibrary
from .cpu.elementwise import CpuElementwise

NAMES: Final = ("reference", "cpu", "triton")


class ElementwiseOperations(Protocol):
    """The elementwise operations of a decoder layer."""

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
        """Apply rotary embeddings to queries and keys, store keys and values, return queries.

        Args:
            mixed: [T, (H + 2 K) * D] contiguous: queries, keys, values of each token.
            positions: [T] int64 below L.
            slots: [T] int64 slot of each token's key and value: block * B + offset.
            angles: Cosines and sines, [L, D] contiguous; the sines of the first half of a
                head are negated, because the halves are swapped.
            head_norm: [H + K, D] contiguous, weights of an RMS norm of each query and key
                head before the rotation; None for no norm.
            eps: Epsilon of that norm.
            caches: Keys and values, [N, B, K, D] with evenly spaced slots, written.

        Returns:
            Queries [T, H, D] in the dtype of `mixed`.
        """
        ...

    def silu_mul(self, mixed: Tensor) -> Tensor:
        """Return `silu(gate) * up`.

        Args:
            mixed: [T, 2 * I] contiguous: gate, up of each token.

        Returns:
            [T, I] in the dtype of `mixed`.
        """
        ...


def implementation(name: str, instructions: str = library.AUTO) -> ElementwiseOperations:
    """Return the operations of one implementation; `triton` is imported on demand.

    Args:
        name: One of `NAMES`.
        instructions: Instruction set of a CPU, one of `library.NAMES`, or the fastest.

    Raises:
        ValueError: if `name` is not one of `NAMES`, or the processor lacks the instructions.
        ImportError: if `name` is "triton" and triton is not installed.
        LibraryUnavailableError: if the C++ kernels are needed and cannot be compiled.
    """
    if name == "reference":
        return ReferenceElementwise()
    if name == "cpu":
        return CpuElementwise(NativeLibrary(library.find(instructions)))
    if name == "triton":
        from .gpu.elementwise import TritonElementwise

        return TritonElementwise()
    raise ValueError(f"implementation must be one of {', '.join(NAMES)}, got {name!r}")


class ReferenceElementwise:
    """The operations in plain torch."""

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `ElementwiseOperations`."""
        hidden.copy_(_at_least_float32(hidden) + _at_least_float32(delta))
        return (_rms_norm(_at_least_float32(hidden), eps) * _at_least_float32(weight)).to(
            hidden.dtype
        )

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
        """See `ElementwiseOperations`."""
        kv_heads, dim = caches[0].shape[2:]
        heads = mixed.view(len(mixed), mixed.shape[1] // dim, dim)
        rotated = _at_least_float32(heads[:, :-kv_heads])
        if head_norm is not None:
            rotated = _rms_norm(rotated, eps) * _at_least_float32(head_norm)
        cos, sin = (
            _at_least_float32(table.index_select(0, positions))[:, None] for table in angles
        )
        rotated = (rotated * cos + rotated.roll(dim // 2, -1) * sin).to(mixed.dtype)
        for cache, new in zip(caches, (rotated[:, -kv_heads:], heads[:, -kv_heads:]), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, new)
        return rotated[:, :-kv_heads]

    def silu_mul(self, mixed: Tensor) -> Tensor:
        """See `ElementwiseOperations`."""
        gate, up = _at_least_float32(mixed).chunk(2, dim=-1)
        return (torch.sigmoid(gate) * gate * up).to(mixed.dtype)


def _rms_norm(values: Tensor, eps: float) -> Tensor:
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
