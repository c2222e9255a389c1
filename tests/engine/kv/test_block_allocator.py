"""The block allocator: no block is lost or in two states."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.engine.kv.block_allocator import BlockAllocator


def test_blocks_are_allocated_until_none_is_free() -> None:
    pool = BlockAllocator(3)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    assert (pool.num_free, pool.num_held, pool.num_cached) == (0, 3, 0)


def test_only_the_last_release_returns_true() -> None:
    pool = BlockAllocator(1)
    block = pool.allocate()
    assert block is not None
    pool.retain(block)
    assert not pool.release(block)
    assert pool.release(block)
    pool.free(block)
    assert pool.allocate() == block


def test_cached_block_is_neither_free_nor_held() -> None:
    pool = BlockAllocator(2)
    block = pool.allocate()
    assert block is not None
    pool.release(block)
    pool.mark_cached(block)
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 0, 1)
    pool.revive(block)
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 1, 0)


def test_releasing_an_unreferenced_block_raises() -> None:
    with pytest.raises(AssertionError):
        BlockAllocator(1).release(0)


OPERATIONS = st.sampled_from(["take", "retain", "drop", "store", "revive", "forget"])


@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 4))))
@settings(max_examples=150)
def test_counts_match_a_model(operations: list[tuple[str, int]]) -> None:
    pool = BlockAllocator(5)
    refs = dict.fromkeys(range(5), 0)
    cached: set[int] = set()
    for name, block in operations:
        match name:
            case "take":
                taken = pool.allocate()
                free = {b for b in refs if refs[b] == 0 and b not in cached}
                assert taken in free if free else taken is None
                if taken is not None:
                    refs[taken] = 1
            case "retain" if refs[block]:
                pool.retain(block)
                refs[block] += 1
            case "drop" | "store" if refs[block]:
                refs[block] -= 1
                assert pool.release(block) == (refs[block] == 0)
                if refs[block] == 0 and name == "store":
                    pool.mark_cached(block)
                    cached.add(block)
                elif refs[block] == 0:
                    pool.free(block)
            case "revive" if block in cached:
                pool.revive(block)
                cached.discard(block)
                refs[block] = 1
            case "forget" if block in cached:
                pool.uncache(block)
                pool.free(block)
                cached.discard(block)
            case _:
                continue
        pool.check()
        num_held = sum(count > 0 for count in refs.values())
        assert (pool.num_held, pool.num_cached) == (num_held, len(cached))
        assert pool.num_free == 5 - num_held - len(cached)


def test_blocks_of_a_context_are_adjacent() -> None:
    pool = BlockAllocator(16)
    taken = [pool.allocate() for _ in range(16)]
    for block in (1, 5, 6, 7, 9, 10):
        pool.release(block)
        pool.free(block)
    assert taken == list(range(16))
    first = pool.allocate(num_wanted=3)
    assert first == 5
    assert [pool.allocate(after=5), pool.allocate(after=6)] == [6, 7]
    assert pool.allocate(after=7) == 1, "the next block is taken: the lowest free block"
    assert pool.allocate(after=15, num_wanted=4) == 9, "no run is long enough: the lowest block"
    assert pool.allocate(after=9) == 10
    assert pool.allocate(after=10) is None
