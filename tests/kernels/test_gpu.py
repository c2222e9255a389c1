"""What a captured launch relies on: one table for all layers, the same launch from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels.gpu import caching
from conure.kernels.gpu.configuration import configurations
from conure.kernels.planner import Planner

TABLES = [[0, 1, 2, 3, 4 + row] for row in range(5)]


def caches(num_blocks: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, num_blocks, 16, 1, 32, generator=generator)
    return keys, values


def test_a_prepared_step_is_launched_as_the_one_before_and_with_its_own_table() -> None:
    operations, planner = ops.implementation("triton"), Planner(block_size=16, min_saved=0)
    keys, values = caches()
    query = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(1))
    tables = [list(table) for table in TABLES]
    launches = set()
    for step in range(20):
        for row, table in enumerate(tables):
            if len(table) * 16 < 66 + step:
                table.append(10 + row)
        plan = planner.plan([1] * 5, [66 + step] * 5, tables)
        # Three places of the batch are padding.
        launches.add(operations.prepare(query, keys, values, plan))
        got = operations.attention(query[:5], keys, values, plan, scale=0.2)
        wanted = ops.implementation("reference").attention(query[:5], keys, values, plan, scale=0.2)
        assert (got - wanted).abs().max().item() <= 5e-6
    assert len(launches) == 1


def test_another_launch_is_needed_where_another_tile_or_a_window_comes_in() -> None:
    operations = ops.implementation("triton")
    keys, values = caches()
    query = torch.randn(5, 4, 32)
    planner = Planner(block_size=16, min_saved=0)
    shared = planner.plan([1] * 5, [66] * 5, TABLES)
    alone = planner.plan([1], [66], TABLES[:1])
    launches = {
        operations.prepare(query, keys, values, shared),
        operations.prepare(query, keys, values, shared, window=20),
        operations.prepare(query, keys, values, alone),
    }
    assert len(launches) == 3
    assert operations.prepare(query, keys, values, shared, window=66) == operations.prepare(
        query, keys, values, shared
    )


def test_a_batch_smaller_than_the_plan_is_refused(operations: ops.Operations) -> None:
    keys, values = caches()
    plan = Planner(block_size=16).plan([1] * 5, [66] * 5, TABLES)
    with pytest.raises(ValueError, match="query has 4 tokens, the plan 5"):
        operations.prepare(torch.zeros(4, 4, 32), keys, values, plan)


def test_layers_of_a_step_share_one_table_and_the_memory_for_parts() -> None:
    operations: Any = ops.implementation("triton")
    keys, values = caches()
    query = torch.randn(5, 4, 32)
    plan = Planner(block_size=16, min_saved=0).plan([1] * 5, [66] * 5, TABLES)
    first = operations.prepare(query, keys, values, plan)
    for _ in range(3):
        operations.attention(query, keys, values, plan, scale=0.2)
    assert operations.prepare(query, keys, values, plan) == first
    assert len(operations._kernels._layers) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 7], ids=["whole-words", "odd"])
def test_blocks_of_many_caches_are_copied_at_once(dtype: torch.dtype, size: int) -> None:
    operations = ops.implementation("triton")
    many = [torch.randn(6, 3, 1, size).to(dtype) for _ in range(3)]
    many.append(torch.randn(6, 3, 2, size).to(dtype))
    many.append(torch.randn(6, 2, 3, size).to(dtype).transpose(1, 2))
    before = [cache.clone() for cache in many]
    operations.copy_blocks(many, torch.tensor([0, 1, 5]), torch.tensor([1, 2, 3]))
    for cache, old in zip(many, before, strict=True):
        wanted = old[[0, 0, 1, 5, 4, 5]]
        assert torch.equal(cache, wanted)


def test_what_lies_outside_of_a_cache_is_not_touched_by_a_kernel() -> None:
    """On a GPU the host does not see the numbers, so the kernels themselves are asked."""
    kernels: Any = ops.implementation("triton")
    kernels = kernels._kernels
    # The cache in the middle of others: what is written beside it is seen.
    room = torch.zeros(6, 4, 1, 16)
    keys, values = room[2:4], torch.zeros(2, 4, 1, 16)
    key = torch.arange(1.0, 6.0)[:, None, None].expand(5, 1, 16)
    kernels.store_kv(key, key, keys, values, torch.tensor([-1, 8, 7, -4, 2**33]))
    assert room[:, :, 0, 0].nonzero().tolist() == [[3, 3]]
    assert values[:, :, 0, 0].nonzero().tolist() == [[1, 3]]
    before = keys.clone()
    kernels.copy_blocks([keys], torch.tensor([1, 2, -1]), torch.tensor([2, 0, 1]))
    assert torch.equal(keys, before)
    assert room[:, :, 0, 0].nonzero().tolist() == [[3, 3]]


def test_every_configuration_names_all_arguments_of_its_kernel() -> None:
    listed = configurations()
    assert len({each.name for each in listed}) == len(listed)
    assert {each.kernel for each in listed} >= {caching.store, caching.move}
    for each in listed:
        assert list(each.signature) == each.kernel.arg_names
        constants = {name for name, kind in each.signature.items() if kind == "constexpr"}
        assert constants == set(each.constants)
        assert set(each.aligned) <= set(each.signature) - constants
