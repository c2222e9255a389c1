"""A plan covers the positions of each query exactly once and finds what rows share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.kernels.planning.plan import Plan, build_plan
from tests.kernels.random_trees import expected_slots, random_rows


def seen_slots(plan: Plan, window: int | None) -> list[Counter[int]]:
    """Return how often the items of each query cover each slot."""
    seen: list[Counter[int]] = [Counter() for _ in range(plan.num_queries)]
    for item in plan.items(window):
        slots = item.slots(plan.block_size)
        for index, query in enumerate(item.queries.tolist()):
            begin, end = 0, len(slots)
            if item.causal:
                end -= len(item.queries) - 1 - index
            if item.window is not None:
                begin = max(0, end - item.window)
            seen[query].update(slots[begin:end].tolist())
    return seen


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    levels=st.integers(1, 4),
    block_size=st.sampled_from((1, 4, 16)),
    min_saved=st.sampled_from((0, 20, 10**9)),
    window=st.sampled_from((None, 1, 7, 30)),
)
def test_each_position_is_covered_exactly_once(
    seed: int, levels: int, block_size: int, min_saved: int, window: int | None
) -> None:
    rows = random_rows(seed, levels=levels, block_size=block_size)
    plan = build_plan(*rows[:3], block_size=block_size, min_saved=min_saved)
    assert seen_slots(plan, window) == expected_slots(rows, block_size, window)


def test_prefix_of_all_rows_is_one_item() -> None:
    tables = [[7, 3, 5, 10 + row] for row in range(4)]
    plan = build_plan([1] * 4, [50] * 4, tables, block_size=16, min_saved=0)
    first, *rest = plan.items()
    assert first.blocks.tolist() == [7, 3, 5]
    assert first.queries.tolist() == [0, 1, 2, 3]
    assert not first.causal
    assert [item.blocks.tolist() for item in rest] == [[10], [11], [12], [13]]
    assert [item.num_kv for item in rest] == [2] * 4


def test_each_level_of_a_tree_is_shared() -> None:
    tables = [[0, 1, 10 + row // 2, 20 + row] for row in range(4)]
    plan = build_plan([1] * 4, [4 * 8] * 4, tables, block_size=8, min_saved=0)
    ranges = {tuple(item.blocks.tolist()): item.queries.tolist() for item in plan.items()}
    assert ranges == {
        (0, 1): [0, 1, 2, 3],
        (10,): [0, 1],
        (11,): [2, 3],
        (20,): [0],
        (21,): [1],
        (22,): [2],
        (23,): [3],
    }


def test_rows_without_common_blocks_are_one_item_each() -> None:
    plan = build_plan([1, 3], [20, 5], [[0, 1], [2]], block_size=16, min_saved=0)
    assert [item.queries.tolist() for item in plan.items()] == [[0], [1, 2, 3]]


def test_blocks_after_different_prefixes_are_not_shared() -> None:
    plan = build_plan([1, 1], [20, 20], [[0, 5], [1, 5]], block_size=16, min_saved=0)
    assert len(plan.items()) == 2


def test_range_that_saves_too_little_is_not_shared() -> None:
    tables = [[0, 1 + row] for row in range(2)]
    shared = build_plan([1, 1], [20, 20], tables, block_size=16, min_saved=0)
    plain = build_plan([1, 1], [20, 20], tables, block_size=16, min_saved=100)
    assert len(shared.items()) == 3
    assert [item.num_kv for item in plain.items()] == [20, 20]


def test_compute_bound_queries_do_not_share() -> None:
    tables = [[*range(32), *range(100 + 4 * row, 104 + 4 * row)] for row in range(2)]
    rows = [64, 64], [36 * 16] * 2, tables
    shared = build_plan(*rows, block_size=16, min_saved=1, partial_tokens=0)
    busy = build_plan(*rows, block_size=16, min_saved=1, partial_tokens=0, ridge=32)
    assert len(shared.items()) == 3
    assert len(busy.items()) == 2


def test_compute_bound_queries_share_wherever_possible() -> None:
    tables = [[0, 1, 10 + row] for row in range(5)]
    plan = build_plan([4] * 5, [40] * 5, tables, block_size=16, min_saved=0, ridge=3)
    assert len(plan.items()) == 6


def test_partials_count_as_cost() -> None:
    tables = [[0, 1, 10 + row] for row in range(8)]
    rows = [1] * 8, [40] * 8, tables
    assert len(build_plan(*rows, block_size=16, min_saved=1, partial_tokens=27).items()) == 9
    assert len(build_plan(*rows, block_size=16, min_saved=1, partial_tokens=28).items()) == 8


def test_blocks_written_in_the_step_are_not_shared() -> None:
    # Row 0 writes the first two blocks in this step, row 1 reads them.
    plan = build_plan([32, 1], [32, 33], [[0, 1], [0, 1, 2]], block_size=16, min_saved=0)
    assert [(item.num_kv, item.causal) for item in plan.items()] == [(32, True), (33, False)]


def test_slots_follow_the_block_table() -> None:
    plan = build_plan([3, 1], [18, 1], [[4, 2], [9]], block_size=16)
    assert plan.positions.tolist() == [15, 16, 17, 0]
    assert plan.slots.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 9 * 16]


def test_items_are_computed_once_per_step() -> None:
    plan = build_plan([1], [20], [[0, 1]], block_size=16)
    assert plan.items() is plan.items()
    assert plan.items(4) is plan.items(4)
    assert plan.items(20) is plan.items(), "no row exceeds the window"


@pytest.mark.parametrize(
    ("num_new", "kv_len", "tables", "named"),
    [
        ([], [], [], "at least one row"),
        ([1], [1, 2], [[0]], "one entry per row"),
        ([0], [4], [[0]], "num_new"),
        ([5], [4], [[0]], "num_new"),
        ([1], [17], [[0]], r"tables\[0\]"),
        ([1], [4], [[-1]], r"tables\[0\]"),
    ],
)
def test_invalid_rows_raise_an_error(
    num_new: list[int], kv_len: list[int], tables: list[list[int]], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        build_plan(num_new, kv_len, tables, block_size=16)


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_size"):
        build_plan([1], [1], [[0]], block_size=0)


def test_many_rows_read_shared_blocks_once() -> None:
    tables = [[*range(64), *range(64 + 8 * row, 72 + 8 * row)] for row in range(256)]
    plan = build_plan([1] * 256, [72 * 16] * 256, tables, block_size=16)
    read = sum(item.num_kv for item in plan.items())
    assert read == 64 * 16 + 256 * 8 * 16
    assert np.unique(np.concatenate([item.blocks for item in plan.items()])).size == 64 + 2048
