"""Accuracy of every attention configuration that common models compile.

Each configuration of `kernels.gpu.configuration` gets a tree of three levels in which its tile
size occurs, with odd ends, rows of one and of several new tokens, and NaN in every slot that no
row owns. The variants of `checks` are features on one shape; these are all shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels.gpu.configuration import (
    AttentionShape,
    AttentionVariant,
    KernelConfiguration,
    configurations,
    small_rows,
)
from conure.kernels.planning.plan import Plan, build_plan

from . import checks

WINDOW: Final = 70
SOFTCAP: Final = 20.0
NO_SHARING: Final = 10**9


class ConfiguredRows(NamedTuple):
    """The rows of a step in which a configuration is used."""

    plan: Plan
    tables: Sequence[Sequence[int]]
    lengths: Sequence[int]
    num_blocks: int


def attention_configurations() -> list[tuple[KernelConfiguration, AttentionShape]]:
    """Return the configurations of the attention kernel, and their shapes."""
    return [(each, each.shape) for each in configurations() if each.shape is not None]


def rows_for(configuration: KernelConfiguration, shape: AttentionShape) -> ConfiguredRows:
    """Return rows whose widest range needs the configuration's large items, or none."""
    constants = configuration.constants
    large, group, page = configuration.large, shape.group, shape.page
    # Queries of the widest range: more than a small tile has, or two full tiles of 128 rows, whose
    # halves are the queries of a branch.
    num_queries = {0: 1, 64: small_rows(group) // group + 1, 128: 2 * (128 // group)}[large]
    blocks = count(1)
    root = [next(blocks) for _ in range(-(-192 // page))]
    tables, lengths = [], []
    for child in range(2):
        branch = [*root, *(next(blocks) for _ in range(-(-128 // page)))]
        for row in range(max(1, -(-num_queries // 2))):
            length = len(branch) * page + 5 + 37 * (row + 11 * child) % 150
            width = -(-length // page) - len(branch)
            tables.append([*branch, *(next(blocks) for _ in range(width))])
            lengths.append(length)
    num_new = [1] * len(tables)
    if constants["HAS_WINDOW"] and large:
        num_new[0] = num_queries  # under a window rows share nothing
    min_saved = 0 if large and not constants["HAS_WINDOW"] else NO_SHARING
    plan = build_plan(num_new, lengths, tables, block_size=page, min_saved=min_saved)
    return ConfiguredRows(plan, tables, lengths, next(blocks))


def check_configurations(device: torch.device) -> Iterator[checks.AccuracyCheck]:
    """Run each configuration on the device and compare it with float64."""
    for configuration, shape in attention_configurations():
        bound = checks.BOUNDS[shape.dtype]
        try:
            error = configuration_error(configuration, shape, device)
            yield checks.AccuracyCheck(configuration.name, error, bound)
        except Exception as exception:  # check the other configurations
            reason = checks.first_line(exception)
            yield checks.AccuracyCheck(configuration.name, math.nan, bound, reason)


def configuration_error(
    configuration: KernelConfiguration, shape: AttentionShape, device: torch.device
) -> float:
    """Return the relative error of one configuration; NaN if an output was not written."""
    rows, constants = rows_for(configuration, shape), configuration.constants
    variant = AttentionVariant(
        constants["HAS_WINDOW"], constants["HAS_CAP"], constants["HAS_SINKS"]
    )
    heads = shape.kv_heads * shape.group
    generator = torch.Generator().manual_seed(3)

    def random_tensor(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    used = torch.zeros(rows.num_blocks, shape.page, dtype=torch.bool)
    for table, length in zip(rows.tables, rows.lengths, strict=True):
        used[table] = True
        used[table[-1], (length - 1) % shape.page + 1 :] = False
    keys, values = (
        random_tensor(rows.num_blocks, shape.page, shape.kv_heads, dim)
        .masked_fill_(~used[:, :, None, None], math.nan)
        .to(device, shape.dtype)
        for dim in (shape.dim, shape.value_dim)
    )
    # Three queries are padding.
    query = random_tensor(rows.plan.num_queries + 3, heads, shape.dim).to(device, shape.dtype)
    sinks = random_tensor(heads).to(device, torch.float32) if variant.has_sinks else None
    window = WINDOW if variant.has_window else None
    softcap = SOFTCAP if variant.has_cap else None
    out = query.new_full((len(query), heads, shape.value_dim), math.nan)
    result = (
        ops.implementation("triton")
        .attention(
            query,
            keys,
            values,
            rows.plan,
            scale=shape.dim**-0.5,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
        )[: rows.plan.num_queries]
        .double()
    )
    expected = ops.implementation("reference").attention(
        query[: rows.plan.num_queries].double(),
        keys.double().nan_to_num(),
        values.double().nan_to_num(),
        rows.plan,
        scale=shape.dim**-0.5,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    return float((result - expected).norm() / expected.norm())
