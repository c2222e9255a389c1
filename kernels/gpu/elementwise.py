"""Triton kernels of the elementwise operations, one launch each.

`add_norm` assigns a row to a program, which keeps it in registers between its two passes.
`rotate_store` assigns some heads of one token to a program: queries are written in order, keys
and values directly to their slots, and each is read once. `silu_mul` is cut into tiles.

Invariants: a kernel reads only shapes and strides from the host, so a captured launch is valid
for any later contents of its tensors.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM: Final = 8
"""Heads of a token per program of `rotate_store`."""
TILE_COLUMNS: Final = 1024
"""Columns per program of `silu_mul`."""


class TritonElementwise:
    """The operations as Triton kernels; see `elementwise.ElementwiseOperations`."""

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `elementwise.ElementwiseOperations`."""
        num_tokens, width = hidden.shape
        out = torch.empty_like(hidden)
        block = 1 << max(0, width - 1).bit_length()
        if num_tokens:
            add_norm_kernel[(num_tokens,)](
                *(hidden, delta, weight, out, width, eps),
                BLOCK=block,
                num_warps=add_norm_warps(block),
            )
        return out

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
        """See `elementwise.ElementwiseOperations`."""
        keys, values = caches
        kv_heads, dim = keys.shape[2:]
        num_tokens = len(mixed)
        num_heads = mixed.shape[1] // dim - 2 * kv_heads
        query = mixed.new_empty(num_tokens, num_heads, dim)
        if num_tokens:
            grid = (num_tokens, triton.cdiv(num_heads + 2 * kv_heads, HEADS_PER_PROGRAM))
            rotate_store_kernel[grid](
                *(mixed, positions, slots, *angles),
                # Not read without a norm.
                mixed if head_norm is None else head_norm,
                *(query, keys, values),
                *(keys.stride(1), keys.stride(2), values.stride(1), values.stride(2), eps),
                NUM_HEADS=num_heads,
                KV_HEADS=kv_heads,
                HALF=dim // 2,
                BLOCK=triton.next_power_of_2(dim // 2),
                HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
                HAS_NORM=head_norm is not None,
                num_warps=4,
            )
        return query

    def silu_mul(self, mixed: Tensor) -> Tensor:
        """See `elementwise.ElementwiseOperations`."""
        num_tokens, width = len(mixed), mixed.shape[1] // 2
        out = mixed.new_empty(num_tokens, width)
        if num_tokens:
            grid = (num_tokens, triton.cdiv(width, TILE_COLUMNS))
            silu_mul_kernel[grid](mixed, out, width, TILE_COLUMNS=TILE_COLUMNS, num_warps=4)
        return out


def add_norm_warps(block: int) -> int:
    """Return the number of warps for a row of `block` columns: about 16 columns per thread."""
    return max(1, min(16, block // 512))


@triton.jit
def add_norm_kernel(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Add and norm one row [W] of `hidden` and `delta`; BLOCK is W rounded up to a power of 2."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = tl.program_id(0).to(tl.int64) * width + column
    before = tl.load(hidden + place, inside, other=0.0)
    added = tl.load(delta + place, inside, other=0.0).to(tl.float32)
    # The norm is computed of the sum as stored.
    after = (before.to(tl.float32) + added).to(before.dtype)
    tl.store(hidden + place, after, inside)
    total = after.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    weights = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + place, (total * scale * weights).to(before.dtype), inside)


@triton.jit
def rotate_store_kernel(
    mixed: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head_norm: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Rotate and store HEADS_PER_PROGRAM heads of one token.

    Args:
        mixed: [T, (H + 2 K) * D].
        positions: [T] int64.
        slots: [T] int64.
        cos: [L, D].
        sin: [L, D], negated in the first half of a head.
        head_norm: [H + K, D]; read only with `HAS_NORM`.
        query: [T, H, D], written.
        keys: [M, K, D] slots of the cache; those in `slots` are written.
        values: [M, K, D], written likewise.
        key_slot: Stride of slots, in elements.
        key_head: Stride of heads.
        value_slot: As `key_slot`.
        value_head: As `key_head`.
        eps: Epsilon of the norm.
        NUM_HEADS: H.
        KV_HEADS: K.
        HALF: D / 2.
        BLOCK: D / 2 rounded up to a power of 2.
        HEADS_PER_PROGRAM: Heads of a program; queries precede keys and values.
        HAS_NORM: Whether queries and keys are normed before the rotation.
    """
    DIM: tl.constexpr = 2 * HALF
    ROTATED: tl.constexpr = NUM_HEADS + KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_column = column < HALF
    inside = (head < ROTATED + KV_HEADS) & is_column

    source = mixed + token * ((ROTATED + KV_HEADS) * DIM) + head * DIM + column
    low_in = tl.load(source, inside, other=0.0)
    high_in = tl.load(source + HALF, inside, other=0.0)
    low = low_in.to(tl.float32)
    high = high_in.to(tl.float32)
    if HAS_NORM:
        weight = head_norm + head * DIM + column
        # Triton annotates device functions as never returning to Python.
        low, high = _rms_norm(  # pyright: ignore[reportGeneralTypeIssues]
            low, high, weight, (head < ROTATED) & is_column, eps, HALF
        )
    angle = tl.load(positions + token) * DIM + column
    low, high = _rotated(  # pyright: ignore[reportGeneralTypeIssues]
        low, high, cos + angle, sin + angle, is_column, HALF
    )
    rotated_low = low.to(low_in.dtype)
    rotated_high = high.to(low_in.dtype)

    is_query = (head < NUM_HEADS) & is_column
    target = query + token * (NUM_HEADS * DIM) + head * DIM + column
    tl.store(target, rotated_low, is_query)
    tl.store(target + HALF, rotated_high, is_query)

    slot = tl.load(slots + token).to(tl.int64)
    is_key = (head >= NUM_HEADS) & (head < ROTATED) & is_column
    target = keys + slot * key_slot + (head - NUM_HEADS).to(tl.int64) * key_head + column
    tl.store(target, rotated_low, is_key)
    tl.store(target + HALF, rotated_high, is_key)

    is_value = (head >= ROTATED) & inside
    target = values + slot * value_slot + (head - ROTATED).to(tl.int64) * value_head + column
    tl.store(target, low_in, is_value)
    tl.store(target + HALF, high_in, is_value)


@triton.jit
def _rms_norm(
    low: tl.tensor,
    high: tl.tensor,
    weight: tl.tensor,
    has_weight: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the RMS norm of heads, given and returned in halves."""
    square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
    low = low * scale * tl.load(weight, has_weight, other=0.0).to(tl.float32)
    high = high * scale * tl.load(weight + HALF, has_weight, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _rotated(
    low: tl.tensor,
    high: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    is_column: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return rotated heads as halves; `cos` and `sin` point to the angles."""
    cos_low = tl.load(cos, is_column, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + HALF, is_column, other=0.0).to(tl.float32)
    sin_low = tl.load(sin, is_column, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + HALF, is_column, other=0.0).to(tl.float32)
    return low * cos_low + high * sin_low, high * cos_high + low * sin_high


@triton.jit
def silu_mul_kernel(
    mixed: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Write `silu(gate) * up` for TILE_COLUMNS columns of one token; `width` is I."""
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < width
    token = tl.program_id(0).to(tl.int64)
    source = mixed + token * (2 * width) + column
    stored = tl.load(source, inside, other=0.0)
    gate = stored.to(tl.float32)
    up = tl.load(source + width, inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + column, result.to(stored.dtype), inside)
