"""Memory of the caches on a CPU."""

from __future__ import annotations

import resource
import sys
from collections import Counter

import pytest
import torch

from conure.kernels import ops
from conure.kernels.cpu.cache_memory import ALIGNMENT, HUGE_PAGE

BLOCK, HEADS, DIM = 16, 2, 64
BLOCK_BYTES = BLOCK * DIM * 4
"""Of one head in float32."""
NUM_BINS = 16


@pytest.mark.parametrize("num_blocks", [512, 613, 1000, 1024])
@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 9, 25, 28, 32])
@pytest.mark.parametrize("num_caches", [8, 24])
def test_heads_reach_their_next_huge_pages_in_different_steps(
    num_caches: int, heads: int, num_blocks: int
) -> None:
    operations = ops.implementation("cpu")
    caches = [
        operations.new_cache(num_blocks, BLOCK, heads, DIM, torch.float32)
        for _ in range(num_caches)
    ]
    starts = [cache[:, :, head].data_ptr() for cache in caches for head in range(heads)]
    assert all(start % ALIGNMENT == 0 for start in starts)
    bins = Counter(start % HUGE_PAGE * NUM_BINS // HUGE_PAGE for start in starts)
    assert max(bins.values()) <= 2 * -(-len(starts) // NUM_BINS)


@pytest.mark.parametrize("num_blocks", [1, 511, 512, 513, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_caches_are_zero_and_independent(num_blocks: int, dtype: torch.dtype) -> None:
    operations = ops.implementation("cpu")
    caches = [operations.new_cache(num_blocks, BLOCK, HEADS, DIM, dtype) for _ in range(3)]
    for cache in caches:
        assert cache.shape == (num_blocks, BLOCK, HEADS, DIM)
        assert not cache.any()
        for head in range(HEADS):
            assert cache[:, :, head].is_contiguous()
            cache[:, :, head] = head + 1
        assert all((cache[:, :, head] == head + 1).all() for head in range(HEADS))


@pytest.mark.skipif(
    sys.platform != "linux" or resource.getpagesize() != 4096, reason="needs /proc and small pages"
)
def test_a_cache_takes_memory_only_where_it_is_written() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    num_blocks = 64 * HUGE_PAGE // BLOCK_BYTES
    cache = ops.implementation("cpu").new_cache(num_blocks, BLOCK, HEADS, DIM, torch.float32)
    before = resident_bytes()
    cache[:8] = 1
    assert resident_bytes() - before <= (HEADS + 2) * HUGE_PAGE
