"""A plan derived from the previous one equals the plan of the same rows built from scratch."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.kernels.planning.plan import Plan, build_plan
from conure.kernels.planning.planner import Planner
from tests.kernels.random_trees import TABLE_TYPES, RandomSteps, TableType


def contents(plan: Plan) -> object:
    """Return the contents of a plan, except the order of its items."""
    width = int(-(-plan.kv_len // plan.block_size).max())
    used = np.arange(width) < -(-plan.kv_len // plan.block_size)[:, None]
    arrays = (plan.num_new, plan.kv_len, plan.query_start, plan.positions, plan.slots)
    return (
        [array.tolist() for array in arrays],
        plan.tables[:, :width][used].tolist(),
        plan.max_block,
        [
            sorted(
                (
                    sorted(item.queries.tolist()),
                    item.blocks.tolist(),
                    (item.first, item.num_kv, item.causal, item.window),
                )
                for item in plan.items(window)
            )
            for window in (None, 9)
        ],
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 4, 16)),
    min_saved=st.sampled_from((0, 20)),
    table_type=st.sampled_from(TABLE_TYPES),
    calm=st.sampled_from((0.0, 0.6, 0.95)),
)
def test_plan_does_not_depend_on_earlier_steps(
    seed: int, block_size: int, min_saved: int, table_type: TableType, calm: float
) -> None:
    steps = RandomSteps(seed, block_size, table_type)
    planner = Planner(block_size=block_size, min_saved=min_saved)
    for _ in range(24):
        plan = planner.plan(steps.num_new, steps.lengths, steps.tables)
        expected = build_plan(
            steps.num_new,
            steps.lengths,
            steps.tables,
            block_size=block_size,
            min_saved=min_saved,
        )
        assert contents(plan) == contents(expected)
        steps.decode()
        if steps.rng.random() > calm:
            steps.disturb()


def test_decoding_rows_keep_their_tree() -> None:
    tables = [[0, 1, 2 + row] for row in range(4)]
    planner = Planner(block_size=16, min_saved=0)
    first = planner.plan([1] * 4, [34] * 4, tables)
    for step in range(40):
        for row, table in enumerate(tables):
            if len(table) * 16 < 35 + step:
                table.append(100 + 4 * step + row)
        plan = planner.plan([1] * 4, [35 + step] * 4, tables)
        assert plan.tree is first.tree
        assert plan.slots.tolist() == [
            table[(34 + step) // 16] * 16 + (34 + step) % 16 for table in tables
        ]
    assert planner.num_built == 1


@pytest.mark.parametrize("table_type", TABLE_TYPES)
def test_replaced_block_is_noticed(table_type: TableType) -> None:
    tables = [table_type([0, 1, 2]), table_type([0, 1, 3])]
    planner = Planner(block_size=16, min_saved=0)
    planner.plan([1, 1], [40, 40], tables)
    tables[1][1] = 9
    plan = planner.plan([1, 1], [41, 41], tables)
    assert plan.tables[1, :3].tolist() == [0, 9, 3]
    assert [item.blocks.tolist() for item in plan.items()] == [[0], [1, 2], [9, 3]]


@pytest.mark.parametrize("table_type", TABLE_TYPES)
def test_two_rows_may_have_the_same_table(table_type: TableType) -> None:
    planner, table = Planner(block_size=16, min_saved=0), table_type([0, 1, 2])
    planner.plan([1], [40], [table])
    for length in (41, 42):
        plan = planner.plan([1, 1], [length] * 2, [table, table])
        assert contents(plan) == contents(
            build_plan([1, 1], [length] * 2, [table, table], block_size=16, min_saved=0)
        )


def test_batch_that_changes_gets_a_new_plan() -> None:
    tables = [[0, 1, 2 + row] for row in range(16)]
    lengths = [33] * 16
    planner = Planner(block_size=16, min_saved=0)
    planner.plan([1] * 16, lengths, tables)
    for step in range(12):
        del tables[step], lengths[step]
        lengths = [length + 1 for length in lengths]
        # The new row has the last four tokens of its prompt.
        tables.append([0, 1, 100 + step])
        lengths.append(37)
        plan = planner.plan([1] * 15 + [4], lengths, tables)
        assert len(plan.items()) == 17
        assert plan.max_block == 100 + step
    assert planner.num_built == 13


def test_planner_is_usable_after_an_error() -> None:
    planner = Planner(block_size=16)
    tables = [[0, 1]]
    planner.plan([1], [31], tables)
    planner.plan([1], [32], tables)
    with pytest.raises(ValueError, match=r"tables\[0\]"):
        planner.plan([1], [33], tables)
    tables[0].append(-1)
    with pytest.raises(ValueError, match=r"tables\[0\]"):
        planner.plan([1], [33], tables)
    tables[0][2] = 7
    assert planner.plan([1], [33], tables).slots.tolist() == [7 * 16]


def test_types_of_tables_may_change() -> None:
    planner = Planner(block_size=16, min_saved=0)
    blocks = [[0, 1, 2 + row] for row in range(3)]
    for step in range(7):
        tables: list[Any] = [array("q", table) for table in blocks]
        if step % 2:
            tables[0] = list(tables[0])
        for length in (34 + 2 * step, 35 + 2 * step):
            for table in (*blocks, *tables):
                if len(table) * 16 < length:
                    table.append(50 + len(table))
            plan = planner.plan([1] * 3, [length] * 3, tables)
            expected = build_plan([1] * 3, [length] * 3, tables, block_size=16, min_saved=0)
            assert contents(plan) == contents(expected)
