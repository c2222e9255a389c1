"""Tickets and partials that the attention kernel counts, and the constants that kernels share."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import language as tl

from conure.kernels import ops
from conure.kernels.gpu import attention, elementwise, kv_cache, launcher, merge, sampling
from conure.kernels.gpu.configuration import DEFAULT_TUNING
from conure.kernels.gpu.launcher import TritonKernels
from conure.kernels.gpu.work_table import table
from conure.kernels.planning.plan import build_plan
from tests.kernels.random_trees import device_of, random_caches, random_rows

MERGING = DEFAULT_TUNING._replace(merges_in_attention=True)
BLOCK = 16


@pytest.mark.parametrize("num_processors", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"softcap": 20.0, "has_sinks": True}],
    ids=["plain", "window", "cap and sinks"],
)
def test_last_program_of_a_query_merges_its_partials(
    num_processors: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of programs decides which one is last."""
    monkeypatch.setattr(launcher, "INTERPRETED_PROCESSORS", num_processors)
    kernels = TritonKernels(MERGING)
    operations = ops.AttentionOperations("triton", kernels)
    device = device_of(operations)
    reference = ops.implementation("reference")
    heads = 4
    sinks = torch.linspace(-1.0, 2.0, heads) if options.get("has_sinks") else None
    window, softcap = options.get("window"), options.get("softcap")
    num_merged = 0
    for seed in range(3):
        rows = random_rows(seed, levels=3, block_size=BLOCK)
        plan = build_plan(*rows[:3], block_size=BLOCK, min_saved=0)
        generator = torch.Generator().manual_seed(seed)
        caches = random_caches(seed, rows, block_size=BLOCK, kv_heads=2, head_dim=16, value_dim=16)
        query = torch.randn(plan.num_queries, heads, 16, generator=generator)
        keys, values = (cache.float() for cache in caches)
        expected = reference.attention(
            query, keys, values, plan, scale=0.3, window=window, softcap=softcap, sinks=sinks
        )
        for _ in range(2):  # the second call fails unless the first one resets its counters
            found = operations.attention(
                query.to(device),
                keys.to(device),
                values.to(device),
                plan,
                scale=0.3,
                window=window,
                softcap=softcap,
                sinks=None if sinks is None else sinks.to(device),
            )
            assert (found.cpu() - expected).abs().max().item() <= 5e-6
        (device_table,) = (each for each in kernels._tables.values() if each.plan is plan)
        num_merged += device_table.work.num_merges
        assert not device_table.work.is_merged
        assert not device_table.current.counters.any()
    # Under a window nothing is shared, and these ranges fit into one chunk.
    assert (num_merged > 0) == (window is None)


def test_constants_of_kernels_equal_the_work_table() -> None:
    sizes = {
        "ITEM_SIZE": table.ITEM_SIZE,
        "SIZES": table.SIZES,
        "MERGE_SIZE": table.MERGE_SIZE,
        "TICKET_WORDS": table.TICKET_WORDS,
        "PAGE_INDEX": table.ItemField.PAGE,
        "LOG2_E": launcher.LOG2_E,
        "LN_2": 1 / launcher.LOG2_E,
    }
    fields = table.ItemField.__members__
    num_compared = 0
    for module in (attention, merge):
        for function in kernel_functions(module):
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.default is not inspect.Parameter.empty:
                    assert parameter.default == {**fields, **sizes}[name], name
                    num_compared += 1
    assert num_compared > 15


@pytest.mark.parametrize(
    "module", [attention, elementwise, kv_cache, merge, sampling], ids=lambda each: each.__name__
)
def test_kernels_read_no_global_constant(module: ModuleType) -> None:
    """Triton compares each global constant at every launch."""
    for function in kernel_functions(module):
        found = inspect.getclosurevars(function).globals
        assert not [name for name, value in found.items() if isinstance(value, tl.constexpr)]


def kernel_functions(module: ModuleType) -> list[Any]:
    """Return the Python functions of a module that Triton compiles."""
    found = [
        value.fn
        for value in vars(module).values()
        if hasattr(value, "fn") and value.fn.__module__ == module.__name__
    ]
    assert found
    return found
