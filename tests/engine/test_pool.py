"""Reference counts: no block is lost, none is in two states."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.engine.pool import BlockPool


def test_blocks_go_out_one_by_one_until_none_is_free() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, None]
    assert (pool.num_free, pool.num_held, pool.num_cached) == (0, 3, 0)


def test_only_the_last_reference_leaves_a_block_to_the_caller() -> None:
    pool = BlockPool(1)
    block = pool.take()
    assert block is not None
    pool.retain(block)
    assert not pool.drop(block)
    assert pool.drop(block)
    pool.put_back(block)
    assert pool.take() == block


def test_a_cached_block_is_neither_free_nor_held() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert block is not None
    pool.drop(block)
    pool.store(block)
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 0, 1)
    pool.revive(block)
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 1, 0)


def test_dropping_what_nobody_holds_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        BlockPool(1).drop(0)


OPERATIONS = st.sampled_from(["take", "retain", "drop", "store", "revive", "forget"])


@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 4))))
@settings(deadline=None, max_examples=150, database=None)
def test_counts_follow_a_dictionary_of_states(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(5)
    refs = dict.fromkeys(range(5), 0)
    cached: set[int] = set()
    for name, block in operations:
        match name:
            case "take":
                taken = pool.take()
                free = {b for b in refs if refs[b] == 0 and b not in cached}
                assert taken in free if free else taken is None
                if taken is not None:
                    refs[taken] = 1
            case "retain" if refs[block]:
                pool.retain(block)
                refs[block] += 1
            case "drop" | "store" if refs[block]:
                refs[block] -= 1
                assert pool.drop(block) == (refs[block] == 0)
                if refs[block] == 0 and name == "store":
                    pool.store(block)
                    cached.add(block)
                elif refs[block] == 0:
                    pool.put_back(block)
            case "revive" if block in cached:
                pool.revive(block)
                cached.discard(block)
                refs[block] = 1
            case "forget" if block in cached:
                pool.forget(block)
                pool.put_back(block)
                cached.discard(block)
            case _:
                continue
        pool.check()
        num_held = sum(count > 0 for count in refs.values())
        assert (pool.num_held, pool.num_cached) == (num_held, len(cached))
        assert pool.num_free == 5 - num_held - len(cached)


def test_blocks_of_one_context_follow_each_other_where_they_can() -> None:
    pool = BlockPool(16)
    taken = [pool.take() for _ in range(16)]
    for block in (1, 5, 6, 7, 9, 10):
        pool.drop(block)
        pool.put_back(block)
    assert taken == list(range(16))
    first = pool.take(wanted=3)
    assert first == 5
    assert [pool.take(behind=5), pool.take(behind=6)] == [6, 7]
    assert pool.take(behind=7) == 1, "the next is taken: the lowest that is free"
    assert pool.take(behind=15, wanted=4) == 9, "no run is so long: the lowest again"
    assert pool.take(behind=9) == 10
    assert pool.take(behind=10) is None
