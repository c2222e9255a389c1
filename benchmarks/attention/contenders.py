"""Who computes the same attention: we, with and without sharing, and torch.

A contender is prepared for a scene, outside of any clock, and then attends layer by layer. What
torch gets is each request's keys and values in one piece already, which a server with
paged memory would have to gather first; no contender is charged for that.

    shared        our implementation under the plan of the tree
    unshared      the same code under a plan that shares nothing: plain paged decoding
    forced        the same under a plan that shares whatever can be, worth it or not
    first step    as `shared`, planned anew for each pass (CPU only)
    sdpa packed   torch's attention, the heads of a group as rows of one product
    sdpa gqa      torch's attention with `enable_gqa`
    flex          torch's compiled FlexAttention, which needs a compiler (CUDA only)

On a CPU `shared` is a step of rows that decode on: what its first pass has gathered is kept, as it
is in an engine, and `first step` is what a step pays whose rows are others than those before.

FlashInfer's are in `flashinfer_contenders`. Knows scenes; times and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from conure.kernels import ops
from conure.kernels import plan as plans
from conure.kernels.tree import ITEM_TOKENS

from . import checks, flashinfer_contenders
from .scene import CACHE_BYTES, Scene

FIRST_STEP = "first step"
MIN_SAVED = {"shared": ITEM_TOKENS, FIRST_STEP: ITEM_TOKENS, "unshared": 10**9, "forced": 0}
"""Tokens that a shared stretch must save under each of our plans."""
OURS = tuple(MIN_SAVED)
FLEX_REGIMES = ("unshared",)
"""Compiling takes seconds a shape, so that few rows have it."""


class Contender(NamedTuple):
    """One that is ready to attend to a scene."""

    name: str
    attend: Callable[[int], Tensor]
    """Attends one layer, [B, H, D]."""
    out: Tensor | None = None
    """Where it always writes, if it does; it holds the last layer after a pass."""


Factory = Callable[[Scene], Callable[[int], Tensor]]


def prepare(
    scene: Scene, implementation: str, wanted: Callable[[str], bool]
) -> Iterator[Contender | tuple[str, str]]:
    """Yield each wanted contender, or its name and why it is absent."""
    yield ours("shared", scene, implementation)
    if wanted("unshared") and scene.row.regime != "unshared":
        yield ours("unshared", scene, implementation)
    if scene.row.regime == "crossover":
        yield ours("forced", scene, implementation)
        return
    if scene.device.type == "cpu" and wanted(FIRST_STEP):
        yield ours(FIRST_STEP, scene, implementation)
    for name, factory in _rivals(scene).items():
        if not wanted(name):
            continue
        try:
            yield Contender(name, factory(scene))
        except Exception as raised:  # a rival that fails is absent, whatever it raises
            yield name, checks.first_line(raised)


def ours(name: str, scene: Scene, implementation: str) -> Contender:
    """Attend under a plan made once, or for each pass, into one output that starts as NaN.

    Each has operations of its own: they keep the tables of one plan at a time.
    """
    row = scene.row
    operations = ops.implementation(implementation)

    def planned() -> plans.Plan:
        return plans.build(
            [1] * row.num_requests,
            [row.kv_len] * row.num_requests,
            scene.tables.tables,
            block_size=scene.block_size,
            min_saved=MIN_SAVED[name],
        )

    plan = planned()
    out = torch.full_like(scene.queries[0], math.nan)

    def attend(layer: int) -> Tensor:
        nonlocal plan
        if name == FIRST_STEP and layer == 0:
            plan = planned()
        return operations.attention(
            scene.queries[layer],
            scene.keys[layer],
            scene.values[layer],
            plan,
            scale=scene.scale,
            out=out,
        )

    return Contender(name, attend, out)


def _rivals(scene: Scene) -> Mapping[str, Factory]:
    rivals: dict[str, Factory] = {"sdpa packed": _sdpa_packed, "sdpa gqa": _sdpa_gqa}
    if scene.device.type == "cuda":
        rivals.update(flashinfer_contenders.RIVALS)
        if scene.row.regime in FLEX_REGIMES:
            rivals["flex"] = _flex
    return rivals


def _pairs(scene: Scene) -> list[tuple[Tensor, Tensor]]:
    """Gather keys and values of as many layers as outgrow the caches."""
    size = scene.row.unshared_bytes(scene.dtype.itemsize)
    count = min(scene.layers, -(-CACHE_BYTES[scene.device.type] // size))
    return [
        (scene.gathered(scene.keys[layer]), scene.gathered(scene.values[layer]))
        for layer in range(count)
    ]


def _sdpa_packed(scene: Scene) -> Callable[[int], Tensor]:
    pairs, row = _pairs(scene), scene.row

    def attend(layer: int) -> Tensor:
        keys, values = pairs[layer % len(pairs)]
        query = scene.queries[layer].view(row.num_requests, row.kv_heads, -1, row.head_dim)
        found = scaled_dot_product_attention(query, keys, values, scale=scene.scale)
        return found.view(row.num_requests, row.heads, row.head_dim)

    return attend


def _sdpa_gqa(scene: Scene) -> Callable[[int], Tensor]:
    pairs = _pairs(scene)

    def attend(layer: int) -> Tensor:
        keys, values = pairs[layer % len(pairs)]
        query = scene.queries[layer][:, :, None]
        return scaled_dot_product_attention(
            query, keys, values, scale=scene.scale, enable_gqa=True
        )[:, :, 0]

    return attend


def _flex(scene: Scene) -> Callable[[int], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    pairs = _pairs(scene)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(layer: int) -> Tensor:
        keys, values = pairs[layer % len(pairs)]
        query = scene.queries[layer][:, :, None]
        found = compiled(query, keys, values, scale=scene.scale, enable_gqa=True)
        assert isinstance(found, Tensor)
        return found[:, :, 0]

    return attend
