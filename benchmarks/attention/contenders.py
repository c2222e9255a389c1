"""Contenders for the same attention: our implementation with and without sharing, and torch.

A contender is prepared for a case, which is not timed, and then attends layer by layer. torch
gets the keys and values of each request already gathered; a server with paged memory would have
to gather them first.

    shared        our implementation with the plan of the tree
    unshared      the same code with a plan that shares nothing: plain paged decoding
    forced        the same code with a plan that shares everything possible
    first step    as `shared`, with a new plan for each pass (CPU only)
    sdpa packed   torch's attention, with the heads of a group as rows of one product
    sdpa gqa      torch's attention with `enable_gqa`
    flex          torch's compiled FlexAttention, which needs a compiler (CUDA only)

On a CPU `shared` is a step of an unchanged batch: keys and values gathered in its first pass are
cached, as in an engine. `first step` is the first step of a new batch.

FlashInfer's contenders are in `flashinfer_contenders`, FlashAttention 3 is in
`flash_attention_contenders`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from conure.kernels import ops
from conure.kernels.planning import plan as plans
from conure.kernels.planning.prefix_tree import MIN_SAVED_TOKENS

from . import checks, flash_attention_contenders, flashinfer_contenders
from .case import CACHE_BYTES, AttentionCase

FIRST_STEP = "first step"
MIN_SAVED = {
    "shared": MIN_SAVED_TOKENS,
    FIRST_STEP: MIN_SAVED_TOKENS,
    "unshared": 10**9,
    "forced": 0,
}
"""Tokens that a shared range must save, by our contender."""
OUR_CONTENDERS = tuple(MIN_SAVED)
FLEX_REGIMES = ("unshared",)
"""Compiling takes seconds per shape, so only a few rows run it."""


class Contender(NamedTuple):
    """A contender prepared for a case."""

    name: str
    attend: Callable[[int], Tensor]
    """Computes one layer, [B, H, D]."""
    out: Tensor | None = None
    """The output tensor if it is reused; it holds the last layer after a pass."""


Factory = Callable[[AttentionCase], Callable[[int], Tensor]]


def prepare(
    case: AttentionCase, implementation: str, is_selected: Callable[[str], bool]
) -> Iterator[Contender | tuple[str, str]]:
    """Yield each selected contender, or its name and why it is skipped."""
    yield our_contender("shared", case, implementation)
    if is_selected("unshared") and case.row.regime != "unshared":
        yield our_contender("unshared", case, implementation)
    if case.row.regime == "crossover":
        yield our_contender("forced", case, implementation)
        return
    if case.device.type == "cpu" and is_selected(FIRST_STEP):
        yield our_contender(FIRST_STEP, case, implementation)
    for name, factory in _competitors(case).items():
        if not is_selected(name):
            continue
        try:
            yield Contender(name, factory(case))
        except Exception as exception:  # a competitor that fails is skipped
            yield name, checks.first_line(exception)


def our_contender(
    name: str,
    case: AttentionCase,
    implementation: str,
    operations: ops.AttentionOperations | None = None,
) -> Contender:
    """Return one of our contenders. Its output starts as NaN.

    Each contender has its own operations, because they cache the tables of one plan.
    """
    row = case.row
    if operations is None:
        operations = ops.implementation(implementation)

    def new_plan() -> plans.Plan:
        return plans.build_plan(
            [1] * row.num_requests,
            [row.kv_len] * row.num_requests,
            case.tables.tables,
            block_size=case.block_size,
            min_saved=MIN_SAVED[name],
        )

    plan = new_plan()
    out = torch.full_like(case.queries[0], math.nan)

    def attend(layer: int) -> Tensor:
        nonlocal plan
        if name == FIRST_STEP and layer == 0:
            plan = new_plan()
        return operations.attention(
            case.queries[layer],
            case.keys[layer],
            case.values[layer],
            plan,
            scale=case.scale,
            out=out,
        )

    return Contender(name, attend, out)


def _competitors(case: AttentionCase) -> Mapping[str, Factory]:
    competitors: dict[str, Factory] = {"sdpa packed": _sdpa_packed, "sdpa gqa": _sdpa_gqa}
    if case.device.type == "cuda":
        competitors.update(flashinfer_contenders.COMPETITORS)
        competitors.update(flash_attention_contenders.COMPETITORS)
        if case.row.regime in FLEX_REGIMES:
            competitors["flex"] = _flex
    return competitors


def _pairs(case: AttentionCase) -> list[tuple[Tensor, Tensor]]:
    """Gather keys and values of enough layers to exceed the caches."""
    size = case.row.unshared_bytes(case.dtype.itemsize)
    count = min(case.layers, -(-CACHE_BYTES[case.device.type] // size))
    return [
        (case.gathered(case.keys[layer]), case.gathered(case.values[layer]))
        for layer in range(count)
    ]


def _sdpa_packed(case: AttentionCase) -> Callable[[int], Tensor]:
    pairs, row = _pairs(case), case.row

    def attend(layer: int) -> Tensor:
        keys, values = pairs[layer % len(pairs)]
        query = case.queries[layer].view(row.num_requests, row.kv_heads, -1, row.head_dim)
        result = scaled_dot_product_attention(query, keys, values, scale=case.scale)
        return result.view(row.num_requests, row.heads, row.head_dim)

    return attend


def _sdpa_gqa(case: AttentionCase) -> Callable[[int], Tensor]:
    pairs = _pairs(case)

    def attend(layer: int) -> Tensor:
        keys, values = pairs[layer % len(pairs)]
        query = case.queries[layer][:, :, None]
        return scaled_dot_product_attention(query, keys, values, scale=case.scale, enable_gqa=True)[
            :, :, 0
        ]

    return attend


def _flex(case: AttentionCase) -> Callable[[int], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    pairs = _pairs(case)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(layer: int) -> Tensor:
        keys, values = pairs[layer % len(pairs)]
        query = case.queries[layer][:, :, None]
        result = compiled(query, keys, values, scale=case.scale, enable_gqa=True)
        assert isinstance(result, Tensor)
        return result[:, :, 0]

    return attend
