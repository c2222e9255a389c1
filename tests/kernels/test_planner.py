"""A plan that continues the last one is the plan that is made of the same rows alone."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.kernels.blocktable import BlockTable
from conure.kernels.plan import Plan, build
from conure.kernels.planner import Planner

from .trees import random_rows


def described(plan: Plan) -> object:
    """Return what a plan says, the order of its items aside."""
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


Kind = Callable[[list[int]], Any]


def numbers(blocks: list[int]) -> array[int]:
    """Return a table as an array."""
    return array("i", blocks)


KINDS: tuple[Kind, ...] = (list, numbers, BlockTable)
"""The forms that tables have."""


class Steps:
    """Contexts that go on, come, go, and whose blocks are replaced."""

    def __init__(self, seed: int, block_size: int, kind: Kind) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.kind = kind
        rows = random_rows(seed, levels=3, block_size=block_size)
        self.num_new = rows.num_new
        self.lengths = rows.kv_len
        self.tables: list[Any] = [kind(table) for table in rows.tables]
        self.fresh = rows.num_blocks

    def go_on(self) -> None:
        """Make every row one token longer."""
        self.num_new = [1] * len(self.tables)
        self.lengths = [length + 1 for length in self.lengths]
        for table, length in zip(self.tables, self.lengths, strict=True):
            if len(table) * self.block_size < length:
                # Now and then two rows come to the same block: one read what the other wrote.
                table.append(self.fresh)
                self.fresh += self.rng.random() < 0.7

    def disturb(self) -> None:
        """Do what makes a plan useless."""
        row = self.rng.randrange(len(self.tables))
        table, what = self.tables[row], self.rng.randrange(5)
        if what == 0 and len(self.tables) > 1:
            del self.tables[row], self.lengths[row], self.num_new[row]
        elif what == 1:
            self.tables.insert(row, self.kind(table))
            self.lengths.insert(row, self.lengths[row])
            self.num_new.insert(row, self.num_new[row])
        elif what == 2:
            table[self.rng.randrange(len(table))] = self.fresh
            self.fresh += 1
        elif what == 3:
            self.num_new[row] = min(self.lengths[row], 3)
        else:
            other = self.rng.randrange(len(self.tables))
            shared = min(len(self.tables[other]), len(table) - 1)
            table[:shared] = self.tables[other][:shared]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 4, 16)),
    min_saved=st.sampled_from((0, 20)),
    kind=st.sampled_from(KINDS),
    calm=st.sampled_from((0.0, 0.6, 0.95)),
)
def test_a_planner_says_what_a_new_plan_says_whatever_came_before(
    seed: int, block_size: int, min_saved: int, kind: Kind, calm: float
) -> None:
    steps = Steps(seed, block_size, kind)
    planner = Planner(block_size=block_size, min_saved=min_saved)
    for _ in range(24):
        got = planner.plan(steps.num_new, steps.lengths, steps.tables)
        wanted = build(
            steps.num_new,
            steps.lengths,
            steps.tables,
            block_size=block_size,
            min_saved=min_saved,
        )
        assert described(got) == described(wanted)
        steps.go_on()
        if steps.rng.random() > calm:
            steps.disturb()


def test_rows_that_decode_on_keep_their_tree() -> None:
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_was_replaced_is_read_anew(kind: Kind) -> None:
    tables = [kind([0, 1, 2]), kind([0, 1, 3])]
    planner = Planner(block_size=16, min_saved=0)
    planner.plan([1, 1], [40, 40], tables)
    tables[1][1] = 9
    plan = planner.plan([1, 1], [41, 41], tables)
    assert plan.tables[1, :3].tolist() == [0, 9, 3]
    assert [item.blocks.tolist() for item in plan.items()] == [[0], [1, 2], [9, 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_stands_for_two_rows_is_planned_for_both(kind: Kind) -> None:
    planner, table = Planner(block_size=16, min_saved=0), kind([0, 1, 2])
    planner.plan([1], [40], [table])
    for length in (41, 42):
        plan = planner.plan([1, 1], [length] * 2, [table, table])
        assert described(plan) == described(
            build([1, 1], [length] * 2, [table, table], block_size=16, min_saved=0)
        )


def test_rows_that_join_and_leave_are_put_into_the_tree_that_is_there() -> None:
    tables = [[0, 1, 2 + row] for row in range(16)]
    lengths = [33] * 16
    planner = Planner(block_size=16, min_saved=0)
    planner.plan([1] * 16, lengths, tables)
    for step in range(12):
        del tables[step], lengths[step]
        lengths = [length + 1 for length in lengths]
        # The one that joins brings the end of its prompt.
        tables.append([0, 1, 100 + step])
        new = [1] * 15 + [4]
        lengths.append(37)
        plan = planner.plan(new, lengths, tables)
        assert len(plan.items()) == 17
        assert plan.max_block == 100 + step
    assert planner.num_built == 1


def test_rows_that_do_not_fit_are_refused_and_leave_the_planner_usable() -> None:
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


def test_tables_that_count_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("a table was compared")

    planner = Planner(block_size=16, min_saved=0)
    tables = [BlockTable([0, 1, 2 + row]) for row in range(8)]
    monkeypatch.setattr(BlockTable, "__eq__", refuse)
    planner.plan([1] * 8, [34] * 8, tables)
    planner.plan([1] * 8, [35] * 8, tables)
    del tables[3]
    planner.plan([1] * 7, [36] * 7, tables)
    assert planner.num_built == 1


def test_rows_may_change_between_tables_that_count_and_tables_that_do_not() -> None:
    planner = Planner(block_size=16, min_saved=0)
    blocks = [[0, 1, 2 + row] for row in range(3)]
    for step, kind in enumerate((list, BlockTable, BlockTable, list, list, BlockTable, list)):
        tables: list[Any] = [kind(table) for table in blocks]
        if step % 2:
            # Some count and some do not.
            tables[0] = list(tables[0])
        for length in (34 + 2 * step, 35 + 2 * step):
            for table in (*blocks, *tables):
                if len(table) * 16 < length:
                    table.append(50 + len(table))
            got = planner.plan([1] * 3, [length] * 3, tables)
            wanted = build([1] * 3, [length] * 3, tables, block_size=16, min_saved=0)
            assert described(got) == described(wanted)
