"""Accuracy checks: results of an implementation compared with float64.

`variants` runs small trees with all features of attention. `error` checks a contender's output on
a row that is about to be timed. Errors are relative: the norm of the difference divided by the
norm of the exact result. An output that was not written is NaN, which fails the check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels.planning import plan as plans

from .case import AttentionCase
from .rows import BenchmarkRow, lay_out

BOUNDS: Final = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2.7e-3}
"""Maximum relative error of our kernels. In 16 bits, rounding the output costs 1.7e-3 in bfloat16
and 2.1e-4 in float16; the rest is for 16-bit weights. Interpreted kernels reach 2.2e-3."""
SAMPLED_REQUESTS = 6


class AccuracyCheck(NamedTuple):
    """The relative error of one output."""

    name: str
    error: float
    """Relative error, or NaN if the output was not computed or not fully written."""
    bound: float
    reason: str = ""
    """The exception, if one was raised."""

    @property
    def is_accurate(self) -> bool:
        """Whether the error is within its bound; NaN is not."""
        return self.error <= self.bound


class CheckedVariant(NamedTuple):
    """A combination of shapes and features to check."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    value_dim: int = 128
    num_new: int = 1
    """New tokens of every other request; the others have one."""
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    num_requests: int = 18


VARIANTS: Final = (
    CheckedVariant("decode"),
    CheckedVariant("many short rows", num_requests=216),
    CheckedVariant("decode, fp16", dtype=torch.float16),
    CheckedVariant("decode, fp32", dtype=torch.float32),
    CheckedVariant("blocks of 64", block_size=64),
    CheckedVariant("heads of 64", head_dim=64, value_dim=64),
    CheckedVariant("heads of 256", head_dim=256, value_dim=256),
    CheckedVariant("keys 192, values 128", head_dim=192),
    CheckedVariant("one head a group", heads=4, kv_heads=4),
    CheckedVariant("several new tokens", num_new=21),
    CheckedVariant("window", window=40, num_new=5),
    CheckedVariant("soft cap", softcap=20.0),
    CheckedVariant("sinks", with_sinks=True),
)


def variants(operations: ops.AttentionOperations, device: torch.device) -> Iterator[AccuracyCheck]:
    """Check small trees in every variant."""
    for variant in VARIANTS:
        bound = BOUNDS[variant.dtype]
        try:
            yield AccuracyCheck(variant.name, variant_error(variant, operations, device), bound)
        except Exception as exception:  # check the other variants
            yield AccuracyCheck(variant.name, math.nan, bound, first_line(exception))


def error(case: AttentionCase, layer: int, result: Tensor) -> float:
    """Return the relative error of a layer's output on some of its requests."""
    last = case.row.num_requests - 1
    sampled = sorted({last * i // (SAMPLED_REQUESTS - 1) for i in range(SAMPLED_REQUESTS)})
    expected = torch.stack([case.exact(layer, request) for request in sampled])
    if bool(result.isnan().any()):
        return math.nan
    return _relative(result[sampled], expected)


def first_line(error: Exception) -> str:
    """Return the first line of an exception."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def variant_error(
    variant: CheckedVariant, operations: ops.AttentionOperations, device: torch.device
) -> float:
    """Return the relative error on a tree of three levels with odd lengths."""
    row = BenchmarkRow(variant.name, "tree", (1, 3, variant.num_requests), (256, 64, 150))
    generator = torch.Generator().manual_seed(1)
    shorter = torch.randint(128, (row.num_requests,), generator=generator).tolist()
    tables = lay_out(row, variant.block_size)
    num_new = [variant.num_new if i % 2 else 1 for i in range(row.num_requests)]
    lengths = [row.kv_len - tokens for tokens in shorter]
    plan = plans.build_plan(num_new, lengths, tables.tables, block_size=variant.block_size)

    def random_tensor(*shape: int) -> Tensor:
        created = torch.randn(shape, generator=generator, dtype=torch.float64)
        return created.to(variant.dtype)

    query = random_tensor(plan.num_queries, variant.heads, variant.head_dim)
    shape = (tables.num_blocks, variant.block_size, variant.kv_heads)
    keys, values = random_tensor(*shape, variant.head_dim), random_tensor(*shape, variant.value_dim)
    sinks = random_tensor(variant.heads) if variant.with_sinks else None
    options: dict[str, Any] = {"window": variant.window, "softcap": variant.softcap}
    scale = variant.head_dim**-0.5
    expected = ops.implementation("reference").attention(
        query.double(),
        keys.double(),
        values.double(),
        plan,
        scale=scale,
        sinks=None if sinks is None else sinks.double(),
        **options,
    )

    def stored(cache: Tensor) -> Tensor:
        created = operations.new_cache(*shape, cache.shape[3], variant.dtype).to(device)
        return created.copy_(cache)

    out = torch.full(expected.shape, math.nan, dtype=variant.dtype, device=device)
    result = operations.attention(
        query.to(device),
        stored(keys),
        stored(values),
        plan,
        scale=scale,
        sinks=None if sinks is None else sinks.to(device),
        out=out,
        **options,
    )
    return _relative(result.cpu(), expected)


def _relative(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())
