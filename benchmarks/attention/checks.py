"""Correctness before speed: what an implementation computes, against float64.

`variants` runs small trees through everything that attention can do besides the plain case;
`error` looks at a contender's answer on the row that is about to be timed. Errors are
relative: the norm of the difference by the norm of what is right.

Knows no clock. An output that was not written is NaN, and NaN is no error that passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels import plan as plans

from .rows import Row, lay_out
from .scene import Scene

BOUNDS: Final = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2.5e-3}
"""Largest relative error of our kernels. 16 bit: the output's own rounding is 1.7e-3 in
bfloat16 and 2.1e-4 in float16; what is above it comes from 16-bit weights."""
CPU_BOUNDS: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""On a CPU scores are rounded to 16 bit between two library calls."""
SAMPLED_REQUESTS = 6


class Check(NamedTuple):
    """One answer held against what is right."""

    name: str
    error: float
    """NaN where there is none, because something was not written or not computed at all."""
    bound: float
    reason: str = ""
    """What was raised."""

    @property
    def is_right(self) -> bool:
        """Say whether the error is within its bound; NaN is not."""
        return self.error <= self.bound


class Variant(NamedTuple):
    """One thing that attention can do."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    value_dim: int = 128
    num_new: int = 1
    """New tokens of every other request; the rest have one."""
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False


VARIANTS: Final = (
    Variant("decode"),
    Variant("decode, fp16", dtype=torch.float16),
    Variant("decode, fp32", dtype=torch.float32),
    Variant("blocks of 64", block_size=64),
    Variant("heads of 64", head_dim=64, value_dim=64),
    Variant("heads of 256", head_dim=256, value_dim=256),
    Variant("keys 192, values 128", head_dim=192),
    Variant("one head a group", heads=4, kv_heads=4),
    Variant("several new tokens", num_new=21),
    Variant("window", window=40, num_new=5),
    Variant("soft cap", softcap=20.0),
    Variant("sinks", with_sinks=True),
)


def bounds(device: torch.device) -> dict[torch.dtype, float]:
    """Return the largest relative errors that pass on a device."""
    return CPU_BOUNDS if device.type == "cpu" else BOUNDS


def variants(operations: ops.Operations, device: torch.device) -> Iterator[Check]:
    """Check small trees in every variant that the device has bounds for."""
    for variant in VARIANTS:
        bound = bounds(device).get(variant.dtype)
        if bound is None:
            continue
        try:
            yield Check(variant.name, _variant_error(variant, operations, device), bound)
        except Exception as raised:  # the others are still worth knowing
            yield Check(variant.name, math.nan, bound, first_line(raised))


def error(scene: Scene, layer: int, found: Tensor) -> float:
    """Return the relative error of what was found in a layer, on some of its requests."""
    last = scene.row.num_requests - 1
    sampled = sorted({last * i // (SAMPLED_REQUESTS - 1) for i in range(SAMPLED_REQUESTS)})
    wanted = torch.stack([scene.exact(layer, request) for request in sampled])
    if bool(found.isnan().any()):
        return math.nan
    return _relative(found[sampled], wanted)


def first_line(raised: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(raised).__name__}: {raised}".partition("\n")[0][:200]


def _variant_error(variant: Variant, operations: ops.Operations, device: torch.device) -> float:
    """Attend in a tree of three levels with odd ends, and to the same in float64."""
    row = Row(variant.name, "tree", (1, 3, 18), (256, 64, 150))
    generator = torch.Generator().manual_seed(1)
    shorter = torch.randint(128, (row.num_requests,), generator=generator).tolist()
    tables = lay_out(row, variant.block_size)
    num_new = [variant.num_new if i % 2 else 1 for i in range(row.num_requests)]
    lengths = [row.kv_len - tokens for tokens in shorter]
    plan = plans.build(num_new, lengths, tables.tables, block_size=variant.block_size)

    def numbers(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        return made.to(variant.dtype)

    query = numbers(plan.num_queries, variant.heads, variant.head_dim)
    shape = (tables.num_blocks, variant.block_size, variant.kv_heads)
    keys, values = numbers(*shape, variant.head_dim), numbers(*shape, variant.value_dim)
    sinks = numbers(variant.heads) if variant.with_sinks else None
    options: dict[str, Any] = {"window": variant.window, "softcap": variant.softcap}
    scale = variant.head_dim**-0.5
    wanted = ops.implementation("reference").attention(
        query.double(),
        keys.double(),
        values.double(),
        plan,
        scale=scale,
        sinks=None if sinks is None else sinks.double(),
        **options,
    )

    def stored(cache: Tensor) -> Tensor:
        made = operations.new_cache(*shape, cache.shape[3], variant.dtype).to(device)
        return made.copy_(cache)

    out = torch.full(wanted.shape, math.nan, dtype=variant.dtype, device=device)
    found = operations.attention(
        query.to(device),
        stored(keys),
        stored(values),
        plan,
        scale=scale,
        sinks=None if sinks is None else sinks.to(device),
        out=out,
        **options,
    )
    return _relative(found.cpu(), wanted)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())
