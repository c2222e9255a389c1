"""The planner covers what each query sees exactly once and finds what rows share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.kernels.plan import Plan, build

from .trees import Rows, random_rows


def seen_slots(plan: Plan, window: int | None) -> list[Counter[int]]:
    """Return how often the items show each slot to each query."""
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


def wanted_slots(rows: Rows, block_size: int, window: int | None) -> list[Counter[int]]:
    """Return the slots that each query must see once, from the definition."""
    wanted = []
    for new, length, table in zip(rows.num_new, rows.kv_len, rows.tables, strict=True):
        for position in range(length - new, length):
            first = 0 if window is None else max(0, position - window + 1)
            wanted.append(
                Counter(
                    table[p // block_size] * block_size + p % block_size
                    for p in range(first, position + 1)
                )
            )
    return wanted


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    levels=st.integers(1, 4),
    block_size=st.sampled_from((1, 4, 16)),
    min_saved=st.sampled_from((0, 20, 10**9)),
    window=st.sampled_from((None, 1, 7, 30)),
)
def test_every_query_sees_each_of_its_positions_exactly_once(
    seed: int, levels: int, block_size: int, min_saved: int, window: int | None
) -> None:
    rows = random_rows(seed, levels=levels, block_size=block_size)
    plan = build(*rows[:3], block_size=block_size, min_saved=min_saved)
    assert seen_slots(plan, window) == wanted_slots(rows, block_size, window)


def test_a_prefix_that_all_rows_share_is_one_item_and_read_once() -> None:
    tables = [[7, 3, 5, 10 + row] for row in range(4)]
    plan = build([1] * 4, [50] * 4, tables, block_size=16, min_saved=0)
    first, *rest = plan.items()
    assert first.blocks.tolist() == [7, 3, 5]
    assert first.queries.tolist() == [0, 1, 2, 3]
    assert not first.causal
    assert [item.blocks.tolist() for item in rest] == [[10], [11], [12], [13]]
    assert [item.num_kv for item in rest] == [2] * 4


def test_a_tree_of_three_levels_is_shared_at_each_level() -> None:
    tables = [[0, 1, 10 + row // 2, 20 + row] for row in range(4)]
    plan = build([1] * 4, [4 * 8] * 4, tables, block_size=8, min_saved=0)
    stretches = {tuple(item.blocks.tolist()): item.queries.tolist() for item in plan.items()}
    assert stretches == {
        (0, 1): [0, 1, 2, 3],
        (10,): [0, 1],
        (11,): [2, 3],
        (20,): [0],
        (21,): [1],
        (22,): [2],
        (23,): [3],
    }


def test_rows_without_a_common_block_make_one_item_each() -> None:
    plan = build([1, 3], [20, 5], [[0, 1], [2]], block_size=16, min_saved=0)
    assert [item.queries.tolist() for item in plan.items()] == [[0], [1, 2, 3]]


def test_equal_blocks_behind_different_first_blocks_are_not_shared() -> None:
    plan = build([1, 1], [20, 20], [[0, 5], [1, 5]], block_size=16, min_saved=0)
    assert len(plan.items()) == 2


def test_a_stretch_that_saves_too_little_is_left_to_its_rows() -> None:
    tables = [[0, 1 + row] for row in range(2)]
    shared = build([1, 1], [20, 20], tables, block_size=16, min_saved=0)
    plain = build([1, 1], [20, 20], tables, block_size=16, min_saved=100)
    assert len(shared.items()) == 3
    assert [item.num_kv for item in plain.items()] == [20, 20]


def test_queries_past_the_ridge_gain_nothing_from_sharing() -> None:
    tables = [[*range(32), *range(100 + 4 * row, 104 + 4 * row)] for row in range(2)]
    rows = [64, 64], [36 * 16] * 2, tables
    shared = build(*rows, block_size=16, min_saved=1, part_tokens=0)
    busy = build(*rows, block_size=16, min_saved=1, part_tokens=0, ridge=32)
    assert len(shared.items()) == 3
    assert len(busy.items()) == 2


def test_a_part_that_costs_more_than_it_saves_is_not_made() -> None:
    tables = [[0, 1, 10 + row] for row in range(8)]
    rows = [1] * 8, [40] * 8, tables
    assert len(build(*rows, block_size=16, min_saved=1, part_tokens=27).items()) == 9
    assert len(build(*rows, block_size=16, min_saved=1, part_tokens=28).items()) == 8


def test_the_blocks_that_a_row_writes_are_its_own_item_though_another_row_reads_them() -> None:
    # Row 0 computes the first two blocks in this step, row 1 already reads them.
    plan = build([32, 1], [32, 33], [[0, 1], [0, 1, 2]], block_size=16, min_saved=0)
    assert [(item.num_kv, item.causal) for item in plan.items()] == [(32, True), (33, False)]


def test_slots_of_new_tokens_follow_the_block_table() -> None:
    plan = build([3, 1], [18, 1], [[4, 2], [9]], block_size=16)
    assert plan.positions.tolist() == [15, 16, 17, 0]
    assert plan.slots.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 9 * 16]


def test_items_are_made_once_for_all_layers() -> None:
    plan = build([1], [20], [[0, 1]], block_size=16)
    assert plan.items() is plan.items()
    assert plan.items(4) is plan.items(4)
    assert plan.items(20) is plan.items(), "a window that cuts nothing is no window"


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
def test_rows_that_do_not_fit_together_are_refused_by_name(
    num_new: list[int], kv_len: list[int], tables: list[list[int]], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        build(num_new, kv_len, tables, block_size=16)


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        build([1], [1], [[0]], block_size=0)


def test_a_plan_of_many_rows_reads_shared_blocks_once_in_all() -> None:
    tables = [[*range(64), *range(64 + 8 * row, 72 + 8 * row)] for row in range(256)]
    plan = build([1] * 256, [72 * 16] * 256, tables, block_size=16)
    read = sum(item.num_kv for item in plan.items())
    assert read == 64 * 16 + 256 * 8 * 16
    assert np.unique(np.concatenate([item.blocks for item in plan.items()])).size == 64 + 2048
