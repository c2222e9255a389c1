"""Kernels that write KV caches: new keys and values to slots, and blocks to other blocks.

Invariants: only the given slots and blocks are written.

Shapes: T new tokens - K KV heads - D, E head dims of keys, values - C pairs of blocks.
"""
# Triton compiles kernels itself; type checkers do not implement its rules.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kv_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    num_slots: tl.tensor,
    key_from: tl.tensor,
    key_head_from: tl.tensor,
    value_from: tl.tensor,
    value_head_from: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
) -> None:
    """Write one new token per program into both caches.

    Args:
        key: [T, K, D] of any dtype.
        value: [T, K, E].
        key_cache: [M, K, D].
        value_cache: [M, K, E].
        slots: [T] int64; a token whose slot is outside the cache is not written.
        num_slots: M.
        key_from: Stride of new tokens; strides are in elements.
        key_head_from: Stride of heads.
        value_from: As `key_from`.
        value_head_from: As `key_head_from`.
        key_stride: Stride of slots of the cache.
        key_head_stride: Stride of heads.
        value_stride: As `key_stride`.
        value_head_stride: As `key_head_stride`.
        KV_HEADS: K.
        HEADS_PAD: K rounded up to a power of 2.
        DIM: D.
        DIM_PAD: D rounded up to a power of 2.
        VALUE_DIM: E.
        VALUE_PAD: E rounded up to a power of 2.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    is_slot = (slot >= 0) & (slot < num_slots)
    # In some layouts heads are a whole matrix of slots apart, so offsets of heads need 64 bits.
    heads = tl.arange(0, HEADS_PAD)[:, None].to(tl.int64)
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = is_slot & (heads < KV_HEADS) & (dims < DIM)
    new = tl.load(key + token * key_from + heads * key_head_from + dims, mask=mask)
    at = slot * key_stride + heads * key_head_stride + dims
    tl.store(key_cache + at, new.to(key_cache.dtype.element_ty), mask=mask)
    dims = tl.arange(0, VALUE_PAD)[None, :]
    mask = is_slot & (heads < KV_HEADS) & (dims < VALUE_DIM)
    new = tl.load(value + token * value_from + heads * value_head_from + dims, mask=mask)
    at = slot * value_stride + heads * value_head_stride + dims
    tl.store(value_cache + at, new.to(value_cache.dtype.element_ty), mask=mask)


# Otherwise Triton would compile variants for 1, for multiples of 16 and for others while serving.
@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def move_blocks_kernel(
    addresses: tl.tensor,
    scratch: tl.tensor,
    source: tl.tensor,
    destination: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    size: tl.tensor,
    TO_SCRATCH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copy whole blocks of many caches to scratch memory, or from there to other blocks.

    Two launches ensure that all sources are read before any destination is written,
    whatever the order of programs. The grid is [C, tiles of a block, caches]: only
    the first may exceed 65,535.

    Args:
        addresses: [caches] int64 address of each cache, a multiple of 16; blocks are
            contiguous.
        scratch: [caches, C, size] int32.
        source: [C] int64 blocks. A pair is skipped if one of its blocks is outside the caches.
        destination: [C] int64 blocks.
        num_pairs: C.
        num_blocks: Blocks of each cache.
        size: int32 words of a block.
        TO_SCRATCH: True to copy blocks to scratch memory, False to copy them from it.
        TILE: Words per program.
    """
    pair = tl.program_id(0)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    cache = tl.program_id(2)
    read = tl.load(source + pair)
    written = tl.load(destination + pair)
    is_pair = (read >= 0) & (read < num_blocks) & (written >= 0) & (written < num_blocks)
    mask = is_pair & (words < size)
    begin = tl.multiple_of(tl.load(addresses + cache).to(tl.pointer_type(tl.int32)), 16)
    buffered = scratch + (cache.to(tl.int64) * num_pairs + pair) * size + words
    if TO_SCRATCH:
        tl.store(buffered, tl.load(begin + read * size + words, mask=mask), mask=mask)
    else:
        tl.store(begin + written * size + words, tl.load(buffered, mask=mask), mask=mask)
