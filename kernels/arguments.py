"""What operations demand of their arguments: shapes, strides, dtypes, devices, ranges.

Each check raises `ValueError` that names the argument, before anything is read or written. Sizes
are known without a look at the tensors; numbers in a tensor are looked at on a CPU alone, for
a GPU would have to be waited for, and a captured launch cannot be.

Knows tensors and plans, no implementation.

Shapes: as in `ops`.
"""

from __future__ import annotations

import math

from torch import Tensor

from .plan import Plan


def check_layout(name: str, cache: Tensor) -> None:
    """Demand that slots have one distance in memory and that a vector is one stretch."""
    if cache.dim() != 4:
        raise ValueError(f"{name}_cache must be [N, B, K, D], got {list(cache.shape)}")
    strides = cache.stride()
    if strides[0] != cache.shape[1] * strides[1] or strides[3] != 1:
        raise ValueError(f"{name}_cache must have slots at one distance, got strides {strides}")


def check_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Plan) -> None:
    """Demand a query, caches and a plan that fit each other."""
    if query.dim() != 3:
        raise ValueError(f"query must be [T, H, D], got {list(query.shape)}")
    if query.stride(2) != 1:
        raise ValueError(f"query must have vectors in one stretch, got strides {query.stride()}")
    if query.shape[0] < plan.num_queries:
        raise ValueError(f"query has {query.shape[0]} tokens, the plan {plan.num_queries}")
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
        raise ValueError(f"key_cache has blocks of {block_size}, the plan of {plan.block_size}")
    if plan.max_block >= num_blocks:
        raise ValueError(f"plan reads block {plan.max_block}, key_cache has {num_blocks}")
    if query.shape[2] != head_dim:
        raise ValueError(f"query has head size {query.shape[2]}, key_cache {head_dim}")
    if query.shape[1] % kv_heads or not query.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads, no multiple of {kv_heads} kv heads")
    check_floats("query", query)
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"query, key_cache and value_cache must have one dtype,"
            f" got {query.dtype}, {key_cache.dtype} and {value_cache.dtype}"
        )


def check_one_device(**tensors: Tensor | None) -> None:
    """Demand that all tensors are where the first is."""
    (first, leader), *others = tensors.items()
    assert leader is not None
    for name, tensor in others:
        if tensor is not None and tensor.device != leader.device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {leader.device}")


def check_floats(name: str, tensor: Tensor) -> None:
    """Demand a floating point."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be of floating point, got {tensor.dtype}")


def check_range(name: str, numbers: Tensor, least: int, end: int) -> None:
    """Demand numbers below `end`; what a GPU holds is not waited for."""
    if numbers.device.type != "cpu" or not numbers.numel():
        return
    found = numbers.numpy()  # a call of torch for each bound would cost a layer more
    low, high = int(found.min()), int(found.max())
    if low < least or high >= end:
        raise ValueError(f"{name} must be from {least} to {end - 1}, got {low} to {high}")


def check_window(window: int | None) -> None:
    """Demand that a query sees itself at least."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Demand one sink a head."""
    if sinks is None:
        return
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], got {list(sinks.shape)}")
    check_floats("sinks", sinks)


def check_variants(
    query: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Demand what scores can be made of."""
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    check_window(window)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, got {softcap}")
    check_sinks(sinks, query.shape[1])
