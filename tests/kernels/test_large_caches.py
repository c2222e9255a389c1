"""Caches and queries of more than 2**31 numbers, where 32-bit offsets would overflow.

Such a tensor takes 5 to 6 GiB of addresses here, of which only a few pages are touched.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels.planning.plan import build_plan

BLOCK, HEADS, DIM, VALUE_DIM = 16, 3, 64, 32
NUM_BLOCKS = 2**30 // (BLOCK * DIM) + 2  # the third of three heads is past 2**31, too
LAST = NUM_BLOCKS - 1
CacheFactory = Callable[[torch.device], Tensor]


@pytest.fixture(autouse=True)
def arguments_are_not_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the interpreter from copying every argument back, all 6 GiB of it."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)


@pytest.fixture(params=["block-major", "head-major"])
def cache_of(request: pytest.FixtureRequest) -> CacheFactory:
    """Creates keys [N, B, K, D] in the GPU or the CPU layout."""

    def create(device: torch.device) -> Tensor:
        if request.param == "block-major":
            return torch.empty(NUM_BLOCKS, BLOCK, HEADS, DIM, dtype=torch.bfloat16, device=device)
        shape = (HEADS, NUM_BLOCKS, BLOCK, DIM)
        return torch.empty(shape, dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3)

    return create


def test_last_block_of_a_large_cache_is_usable(
    operations: ops.AttentionOperations, device: torch.device, cache_of: CacheFactory
) -> None:
    cache = cache_of(device)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    tables = [[0, LAST], [0, LAST - 1, 1]]
    plan = build_plan([1, 1], [BLOCK + 7, 2 * BLOCK + 3], tables, block_size=BLOCK, min_saved=1)
    blocks = torch.tensor([0, 1, LAST - 1, LAST], device=device)
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=device)).view(-1)
    key = numbers(len(slots), HEADS, DIM)
    # Values are the first part of the keys, to use one allocation.
    value, values = key[..., :VALUE_DIM], cache[..., :VALUE_DIM]
    operations.store_kv(key, value, cache, values, slots)
    assert torch.equal(cache[blocks].flatten(0, 1), key)

    query = numbers(2, 6, DIM)
    expected = ops.implementation("reference").attention(query, cache, values, plan, scale=0.125)
    result = operations.attention(query, cache, values, plan, scale=0.125)
    assert (result.float() - expected.float()).abs().max() <= 3e-2, (
        "two roundings of results up to 4"
    )

    source, destination = torch.tensor([[LAST, 0], [2, LAST]], device=device)
    operations.copy_blocks([cache], source, destination)
    assert torch.equal(cache[[2, LAST]], key.view(4, BLOCK, HEADS, DIM)[[3, 0]])


def test_heads_of_queries_and_results_may_be_far_apart(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    """As in a query that was concatenated from parts of [H, T, D]. Some results are merged."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn((4, BLOCK, 1, DIM), generator=generator).to(device, torch.bfloat16)
    values = cache[..., :VALUE_DIM]
    lengths, tables = [2 * BLOCK - 3, 2 * BLOCK, 7], [[0, 1], [0, 2], [3]]
    plan = build_plan([1, 1, 1], lengths, tables, block_size=BLOCK, min_saved=1)
    dense = torch.randn((3, 6, DIM), generator=generator).to(device, torch.bfloat16)
    size = DIM + VALUE_DIM
    memory = torch.empty_strided(
        (3, 6, size), (size, 2**29, 1), dtype=torch.bfloat16, device=device
    )
    query, out = memory[..., :DIM], memory[..., DIM:]
    query.copy_(dense)
    expected = ops.implementation("reference").attention(dense, cache, values, plan, scale=0.125)
    operations.attention(query, cache, values, plan, scale=0.125, out=out)
    assert (out.float() - expected.float()).abs().max() <= 3e-2
