"""Argument checks of the operations: shapes, strides, dtypes, devices, ranges.

Each check raises a `ValueError` that names the argument, before anything is read or written.
`UnsupportedShapeError` is the one for arguments that fit each other, but not an implementation.
Values are checked on the CPU only: on a GPU the host would have to wait for them, which a
captured launch cannot do.

Shapes: as in `ops`.
"""

from __future__ import annotations

import math

from torch import Tensor

from .planning.plan import Plan


class UnsupportedShapeError(ValueError):
    """An implementation does not support the shape of an argument."""


def check_layout(name: str, cache: Tensor) -> None:
    """Check that the vectors are contiguous, and evenly spaced over the tokens of all blocks."""
    if cache.dim() != 4:
        raise ValueError(f"{name}_cache must be [N, B, K, D], got {list(cache.shape)}")
    strides = cache.stride()
    if strides[0] != cache.shape[1] * strides[1] or strides[3] != 1:
        raise ValueError(
            f"{name}_cache must have evenly spaced slots of contiguous vectors, got {strides}"
        )


def check_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Plan) -> None:
    """Check that the query, the caches and the plan fit each other."""
    if query.dim() != 3:
        raise ValueError(f"query must be [T, H, D], got {list(query.shape)}")
    if query.stride(2) != 1:
        raise ValueError(f"query must have contiguous vectors, got strides {query.stride()}")
    if query.shape[0] < plan.num_queries:
        raise ValueError(f"query has {query.shape[0]} tokens, the plan has {plan.num_queries}")
    check_layout("key", key_cache)
    num_blocks, block_size, kv_heads, head_dim = key_cache.shape
    if value_cache.dim() != 4 or value_cache.shape[:3] != key_cache.shape[:3]:
        raise ValueError(
            f"value_cache must be [{num_blocks}, {block_size}, {kv_heads}, E],"
            f" got {list(value_cache.shape)}"
        )
    check_layout("value", value_cache)
    if not kv_heads or not head_dim or not value_cache.shape[3]:
        raise ValueError(
            f"key_cache and value_cache must have heads, got {list(key_cache.shape)}"
            f" and {list(value_cache.shape)}"
        )
    if block_size != plan.block_size:
        raise ValueError(f"key_cache has blocks of {block_size} tokens, the plan {plan.block_size}")
    if plan.max_block >= num_blocks:
        raise ValueError(f"plan reads block {plan.max_block}, key_cache has {num_blocks}")
    if query.shape[2] != head_dim:
        raise ValueError(f"query has head size {query.shape[2]}, key_cache has {head_dim}")
    if query.shape[1] % kv_heads or not query.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, which is not a multiple of {kv_heads} KV heads"
        )
    check_floats("query", query)
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"query, key_cache and value_cache must have one dtype,"
            f" got {query.dtype}, {key_cache.dtype} and {value_cache.dtype}"
        )


def check_one_device(**tensors: Tensor | None) -> None:
    """Check that all tensors are on the device of the first one."""
    (first, reference), *others = tensors.items()
    assert reference is not None
    for name, tensor in others:
        if tensor is not None and tensor.device != reference.device:
            raise ValueError(f"{name} is on {tensor.device}, but {first} is on {reference.device}")


def check_floats(name: str, tensor: Tensor) -> None:
    """Check for a floating point dtype."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating point dtype, got {tensor.dtype}")


def check_range(name: str, numbers: Tensor, start: int, end: int) -> None:
    """Check that all numbers are in [start, end); tensors on a GPU are not checked."""
    if numbers.device.type != "cpu" or not numbers.numel():
        return
    values = numbers.numpy()  # faster than one torch call per bound, and called per layer
    low, high = int(values.min()), int(values.max())
    if low < start or high >= end:
        raise ValueError(f"{name} must be from {start} to {end - 1}, got {low} to {high}")


def check_window(window: int | None) -> None:
    """Check that a query sees at least itself."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Check that there is one sink per head."""
    if sinks is None:
        return
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], got {list(sinks.shape)}")
    check_floats("sinks", sinks)


def check_score_parameters(
    query: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Check the parameters that change the attention scores: scale, window, softcap, sinks."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be above 0 and finite, got {scale}")
    check_window(window)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, got {softcap}")
    check_sinks(sinks, query.shape[1])
