"""Each planner's plan of a step equals the plan of the same rows built from scratch."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conure.kernels.cpu import library
from conure.kernels.cpu.attention import NativeLibrary
from conure.kernels.cpu.planner import NativePlanner
from conure.kernels.planning.plan import Plan, build_plan
from conure.kernels.planning.planner import Planner
from tests.kernels.random_trees import TABLE_TYPES, RandomSteps, TableType

MakePlanner: TypeAlias = Callable[..., Planner]


def native(instructions: library.InstructionSet, **options: Any) -> Planner:
    return NativePlanner(NativeLibrary(instructions), **options)


@pytest.fixture(
    params=[None, *library.supported()], ids=lambda each: each.name if each else "python"
)
def make_planner(request: pytest.FixtureRequest) -> MakePlanner:
    """The planner in Python, and the one in C++ for every instruction set of this processor."""
    return Planner if request.param is None else partial(native, request.param)


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


def numbers(plan: Plan) -> object:
    """Return the numbers of a plan in their order, and its tree."""
    arrays = [plan.num_new, plan.kv_len, plan.query_start, plan.positions, plan.slots]
    arrays += [getattr(plan.tree, field.name) for field in fields(plan.tree)]
    assert all(array.dtype == np.int64 for array in arrays)
    return [array.tolist() for array in arrays]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 4, 16)),
    cost=st.sampled_from(((0, 4.0), (20, 4.0), (20, 0.3), (2**62, 4.0))),
    ridge=st.sampled_from((float("inf"), 0.5, 3.0)),
    table_type=st.sampled_from(TABLE_TYPES),
    calm=st.sampled_from((0.0, 0.6, 0.95)),
)
@pytest.mark.parametrize("instructions", library.supported(), ids=lambda each: each.name)
def test_planners_are_equal(
    instructions: library.InstructionSet,
    seed: int,
    block_size: int,
    cost: tuple[int, float],
    ridge: float,
    table_type: TableType,
    calm: float,
) -> None:
    steps = RandomSteps(seed, block_size, table_type)
    options: dict[str, Any] = {"block_size": block_size, "ridge": ridge}
    options |= {"min_saved": cost[0], "partial_tokens": cost[1]}
    planner, expected = native(instructions, **options), Planner(**options)
    for _ in range(24):
        step = steps.num_new, steps.lengths, steps.tables
        assert numbers(planner.plan(*step)) == numbers(expected.plan(*step))
        assert planner.num_trees == expected.num_trees
        steps.decode()
        if steps.rng.random() > calm:
            steps.disturb()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 4, 16)),
    min_saved=st.sampled_from((0, 20)),
    table_type=st.sampled_from(TABLE_TYPES),
    calm=st.sampled_from((0.0, 0.6, 0.95)),
)
def test_plan_does_not_depend_on_earlier_steps(
    make_planner: MakePlanner,
    seed: int,
    block_size: int,
    min_saved: int,
    table_type: TableType,
    calm: float,
) -> None:
    steps = RandomSteps(seed, block_size, table_type)
    planner = make_planner(block_size=block_size, min_saved=min_saved)
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


def test_decoding_rows_keep_their_tree(make_planner: MakePlanner) -> None:
    tables = [[0, 1, 2 + row] for row in range(4)]
    planner = make_planner(block_size=16, min_saved=0)
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
    assert planner.num_trees == 1


@pytest.mark.parametrize("table_type", TABLE_TYPES)
def test_replaced_block_is_noticed(make_planner: MakePlanner, table_type: TableType) -> None:
    tables = [table_type([0, 1, 2]), table_type([0, 1, 3])]
    planner = make_planner(block_size=16, min_saved=0)
    planner.plan([1, 1], [40, 40], tables)
    tables[1][1] = 9
    plan = planner.plan([1, 1], [41, 41], tables)
    assert plan.tables[1, :3].tolist() == [0, 9, 3]
    assert [item.blocks.tolist() for item in plan.items()] == [[0], [1, 2], [9, 3]]


@pytest.mark.parametrize("table_type", TABLE_TYPES)
def test_two_rows_may_have_the_same_table(make_planner: MakePlanner, table_type: TableType) -> None:
    planner, table = make_planner(block_size=16, min_saved=0), table_type([0, 1, 2])
    planner.plan([1], [40], [table])
    for length in (41, 42):
        plan = planner.plan([1, 1], [length] * 2, [table, table])
        assert contents(plan) == contents(
            build_plan([1, 1], [length] * 2, [table, table], block_size=16, min_saved=0)
        )


def test_batch_that_changes_gets_a_new_plan(make_planner: MakePlanner) -> None:
    tables = [[0, 1, 2 + row] for row in range(16)]
    lengths = [33] * 16
    planner = make_planner(block_size=16, min_saved=0)
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
    assert planner.num_trees == 13


def test_a_range_that_saves_nothing_but_for_rounding_is_shared(make_planner: MakePlanner) -> None:
    """Ten times 1.1 reads add up to less than the 11 of a shared range."""
    planner = make_planner(block_size=16, min_saved=0, ridge=10.0)
    plan = planner.plan([11] * 10, [27] * 10, [[0, 1 + row] for row in range(10)])
    assert plan.tree.end.tolist() == [10]


def test_planner_is_usable_after_an_error(make_planner: MakePlanner) -> None:
    planner = make_planner(block_size=16)
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


def test_types_of_tables_may_change(make_planner: MakePlanner) -> None:
    planner = make_planner(block_size=16, min_saved=0)
    blocks = [[0, 1, 2 + row] for row in range(3)]
    for step in range(7):
        tables: list[Any] = [array("i", table) for table in blocks]
        if step % 2:
            tables[0] = list(tables[0])
        for length in (34 + 2 * step, 35 + 2 * step):
            for table in (*blocks, *tables):
                if len(table) * 16 < length:
                    table.append(50 + len(table))
            plan = planner.plan([1] * 3, [length] * 3, tables)
            expected = build_plan([1] * 3, [length] * 3, tables, block_size=16, min_saved=0)
            assert contents(plan) == contents(expected)


def test_batches_of_any_size_may_follow_each_other(make_planner: MakePlanner) -> None:
    planner = make_planner(block_size=4, min_saved=0)
    for num_rows, width in ((2, 3), (40, 5), (3, 300), (41, 301), (1, 1), (41, 301)):
        tables = [[*range(width - 1), 1000 + row] for row in range(num_rows)]
        step = [1] * num_rows, [4 * width] * num_rows, tables
        assert contents(planner.plan(*step)) == contents(
            build_plan(*step, block_size=4, min_saved=0)
        )
    assert planner.num_trees == 6
