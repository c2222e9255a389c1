"""The block allocator: no block is lost or in two states."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.engine.kv.block_allocator import BlockAllocator


def test_blocks_are_allocated_while_any_is_free() -> None:
    allocator = BlockAllocator(3)
    assert [allocator.allocate() for _ in range(4)] == [0, 1, 2, None]
    assert (allocator.num_free, allocator.num_held, allocator.num_cached) == (0, 3, 0)


def test_only_the_last_release_returns_true() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    assert block is not None
    allocator.retain(block)
    assert not allocator.release(block)
    assert allocator.release(block)
    allocator.free(block)
    assert allocator.allocate() == block


def test_cached_block_is_neither_free_nor_held() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    assert block is not None
    allocator.release(block)
    allocator.mark_cached(block)
    assert (allocator.num_free, allocator.num_held, allocator.num_cached) == (1, 0, 1)
    allocator.retain_cached(block)
    assert (allocator.num_free, allocator.num_held, allocator.num_cached) == (1, 1, 0)


def test_releasing_an_unreferenced_block_raises() -> None:
    with pytest.raises(AssertionError):
        BlockAllocator(1).release(0)


OPERATIONS = st.sampled_from(
    ["allocate", "retain", "release", "release to cache", "retain cached", "uncache"]
)


@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 4))))
@settings(max_examples=150)
def test_counts_match_a_model(operations: list[tuple[str, int]]) -> None:
    allocator = BlockAllocator(5)
    refs = dict.fromkeys(range(5), 0)
    cached: set[int] = set()
    for name, block in operations:
        match name:
            case "allocate":
                taken = allocator.allocate()
                free = {b for b in refs if refs[b] == 0 and b not in cached}
                assert taken in free if free else taken is None
                if taken is not None:
                    refs[taken] = 1
            case "retain" if refs[block]:
                allocator.retain(block)
                refs[block] += 1
            case "release" | "release to cache" if refs[block]:
                refs[block] -= 1
                assert allocator.release(block) == (refs[block] == 0)
                if refs[block] == 0 and name == "release to cache":
                    allocator.mark_cached(block)
                    cached.add(block)
                elif refs[block] == 0:
                    allocator.free(block)
            case "retain cached" if block in cached:
                allocator.retain_cached(block)
                cached.discard(block)
                refs[block] = 1
            case "uncache" if block in cached:
                allocator.uncache(block)
                allocator.free(block)
                cached.discard(block)
            case _:
                continue
        allocator.check()
        num_held = sum(count > 0 for count in refs.values())
        assert (allocator.num_held, allocator.num_cached) == (num_held, len(cached))
        assert allocator.num_free == 5 - num_held - len(cached)


def test_blocks_of_a_context_are_adjacent() -> None:
    allocator = BlockAllocator(16)
    taken = [allocator.allocate() for _ in range(16)]
    for block in (1, 5, 6, 7, 9, 10):
        allocator.release(block)
        allocator.free(block)
    assert taken == list(range(16))
    first = allocator.allocate(num_wanted=3)
    assert first == 5
    assert [allocator.allocate(after=5), allocator.allocate(after=6)] == [6, 7]
    assert allocator.allocate(after=7) == 1, "the next block is held: the lowest free block"
    assert allocator.allocate(after=15, num_wanted=4) == 9, (
        "no run is long enough: the lowest block"
    )
    assert allocator.allocate(after=9) == 10
    assert allocator.allocate(after=10) is None
