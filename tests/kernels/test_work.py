"""The table of a step covers what each query sees exactly once, also when it was patched."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.kernels.plan import Plan, build
from conure.kernels.planner import Planner
from conure.kernels.work import ITEM_SIZE, MERGE_SIZE, Field, Header, Kind, Work

from .test_plan import wanted_slots
from .test_planner import Steps
from .trees import Rows, random_rows


def kind(
    *, group: int = 4, window: int | None = None, large: int = 128, processors: int = 32
) -> Kind:
    small = max(16, 1 << (group - 1).bit_length())
    return Kind(2, group, window, small, large if large > small else 0, processors)


def items_of(work: Work) -> list[dict[Field, int]]:
    begin = int(work.table[Header.ITEMS])
    words = work.table[begin : begin + int(work.table[Header.NUM_ITEMS]) * ITEM_SIZE]
    return [{field: int(item[field]) for field in Field} for item in words.reshape(-1, ITEM_SIZE)]


def read_table(work: Work, plan: Plan) -> tuple[list[Counter[int]], list[list[int]]]:
    """Do what the kernel does with numbers alone: what each query sees, where its parts go."""
    table, window = work.table.tolist(), work.kind.window
    seen: list[Counter[int]] = [Counter() for _ in range(plan.num_queries)]
    written: list[list[int]] = [[] for _ in range(plan.num_queries)]
    for item in items_of(work):
        large = work.large if item[Field.IS_LARGE] else work.kind.small
        assert 1 <= item[Field.NUM_QUERIES] <= large // work.kind.group
        assert 0 <= item[Field.OFFSET] < plan.block_size
        assert item[Field.NUM_KV] >= 1
        for j in range(item[Field.NUM_QUERIES]):
            entry = item[Field.ENTRY] + j
            query = table[table[Header.ENTRY_QUERIES] + entry]
            slot = table[table[Header.ENTRY_SLOTS] + entry]
            assert (slot < 0) == (item[Field.PART] < 0)
            written[query].append(slot + item[Field.PART] if slot >= 0 else -1)
            for column in range(item[Field.NUM_KV]):
                if column >= item[Field.LIMIT] + j:
                    break
                if window is not None and column < item[Field.FLOOR] + j:
                    continue
                place = item[Field.OFFSET] + column
                page = table[table[Header.PAGES] + item[Field.PAGE] + place // plan.block_size]
                seen[query][page * plan.block_size + place % plan.block_size] += 1
    return seen, written


def check(work: Work, plan: Plan, rows: Rows) -> None:
    seen, written = read_table(work, plan)
    assert seen == wanted_slots(rows, plan.block_size, work.kind.window)
    table = work.table.tolist()
    begin = table[Header.MERGES]
    merges = {}
    for number in range(table[Header.NUM_MERGES]):
        query, first, count = table[begin + number * MERGE_SIZE : begin + (number + 1) * MERGE_SIZE]
        merges[query] = list(range(first, first + count))
    for query, slots in enumerate(written):
        if slots == [-1]:
            assert query not in merges
        else:
            assert sorted(slots) == merges[query]
    used = [slot for slots in merges.values() for slot in slots]
    assert len(set(used)) == len(used) <= work.num_parts
    assert max(used, default=-1) < work.num_parts


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    levels=st.integers(1, 5),
    block_size=st.sampled_from((1, 4, 16, 64)),
    min_saved=st.sampled_from((0, 20, 10**9)),
    window=st.sampled_from((None, 1, 7, 30)),
    group=st.sampled_from((1, 4, 5, 16, 71)),
    processors=st.sampled_from((1, 32, 132)),
)
def test_a_table_shows_each_query_each_of_its_positions_exactly_once(
    seed: int,
    levels: int,
    block_size: int,
    min_saved: int,
    window: int | None,
    group: int,
    processors: int,
) -> None:
    rows = random_rows(seed, levels=levels, block_size=block_size, max_new=40)
    plan = build(*rows[:3], block_size=block_size, min_saved=min_saved)
    work = Work(kind(group=group, window=window, processors=processors))
    work.update(plan)
    check(work, plan, rows)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 4, 16)),
    window=st.sampled_from((None, 7, 30)),
    calm=st.sampled_from((0.5, 1.0)),
)
def test_a_patched_table_is_as_good_as_a_new_one(
    seed: int, block_size: int, window: int | None, calm: float
) -> None:
    steps = Steps(seed, block_size, list)
    planner = Planner(block_size=block_size, min_saved=0)
    work = Work(kind(window=window))
    for _ in range(12):
        plan = planner.plan(steps.num_new, steps.lengths, steps.tables)
        work.update(plan)
        tables = [list(table) for table in steps.tables]
        check(work, plan, Rows(steps.num_new, steps.lengths, tables, 0))
        steps.go_on()
        if steps.rng.random() > calm:
            steps.disturb()


def flat(num_rows: int, prefix: int, own: int) -> tuple[list[int], list[int], list[list[int]]]:
    shared = range(prefix // 16)
    each = own // 16 + 1
    tables = [
        [*shared, *range(10000 + row * each, 10000 + (row + 1) * each)] for row in range(num_rows)
    ]
    return [1] * num_rows, [prefix + own] * num_rows, tables


def test_steps_that_decode_on_are_patched_until_their_room_is_used_up() -> None:
    new, lengths, tables = flat(16, 1024, 1)
    planner, work = Planner(block_size=16), Work(kind())
    for step in range(130):
        for row, table in enumerate(tables):
            if len(table) * 16 < lengths[row]:
                table.append(20000 + step * 16 + row)
        work.update(planner.plan(new, lengths, tables))
        lengths = [length + 1 for length in lengths]
    assert planner.num_built == 1
    assert work.num_built == 2


class Crowd:
    """Rows behind prefixes of several levels that decode on, while a few come and go."""

    def __init__(self, seed: int, *, num_rows: int, block_size: int, prompt: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.prompt = prompt
        self.fresh = itertools.count()
        trunk = list(itertools.islice(self.fresh, 5))
        self.prefixes = [trunk] + [
            [*trunk, *itertools.islice(self.fresh, self.rng.randrange(1, 40))] for _ in range(3)
        ]
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.num_new: list[int] = []
        for _ in range(num_rows):
            self.join()
        self.num_new = [1] * num_rows

    def join(self) -> None:
        """Put a row anywhere that brings the end of its prompt or one token."""
        prefix = self.rng.choice(self.prefixes)
        own = self.rng.choice((1, 3, 30))
        length = (len(prefix) + own) * self.block_size - self.rng.randrange(self.block_size)
        at = self.rng.randrange(len(self.tables) + 1)
        self.tables.insert(at, [*prefix, *itertools.islice(self.fresh, own)])
        self.lengths.insert(at, length)
        room = length - len(prefix) * self.block_size
        self.num_new.insert(at, self.rng.randrange(1, min(self.prompt, room) + 1))

    def leave(self) -> None:
        """Take any row away."""
        at = self.rng.randrange(len(self.tables))
        del self.tables[at], self.lengths[at], self.num_new[at]

    def go_on(self, changes: int) -> None:
        """Make all rows one token longer; so many come or go."""
        self.num_new = [1] * len(self.tables)
        self.lengths = [length + 1 for length in self.lengths]
        for table, length in zip(self.tables, self.lengths, strict=True):
            if len(table) * self.block_size < length:
                table.append(next(self.fresh))
        for _ in range(changes):
            self.rng.choice((self.join, self.leave))()

    def rows(self) -> Rows:
        """Return the rows of the step."""
        return Rows(self.num_new, self.lengths, [list(table) for table in self.tables], 0)


def longest(work: Work) -> float:
    """Return what the program with most work has to do, in tokens of reading."""
    load = np.zeros(work.programs)
    items = items_of(work)
    for number in range(work.kind.kv_heads * len(items)):
        item = items[number // work.kind.kv_heads]
        large = work.large / 96 if item[Field.IS_LARGE] else 1.0
        load[number % work.programs] += max(1.0, large) * (item[Field.NUM_KV] + 32)
    return float(load.max())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.sampled_from((2, 20, 50)),
    block_size=st.sampled_from((1, 4, 16)),
    min_saved=st.sampled_from((0, 20)),
    prompt=st.sampled_from((1, 1, 5)),
    processors=st.sampled_from((1, 32)),
)
def test_a_table_that_rows_join_and_leave_is_as_good_as_a_new_one(
    seed: int, num_rows: int, block_size: int, min_saved: int, prompt: int, processors: int
) -> None:
    crowd = Crowd(seed, num_rows=num_rows, block_size=block_size, prompt=prompt)
    planner = Planner(block_size=block_size, min_saved=min_saved)
    work = Work(kind(processors=processors))
    for _ in range(10):
        plan = planner.plan(crowd.num_new, crowd.lengths, crowd.tables)
        work.update(plan)
        check(work, plan, crowd.rows())
        new = Work(work.kind)
        new.update(build(*crowd.rows()[:3], block_size=block_size, min_saved=min_saved))
        assert (work.large, work.programs) == (new.large, new.programs)
        assert longest(work) <= 1.5 * longest(new) + 64
        crowd.go_on(crowd.rng.randrange(3) if len(crowd.tables) > 2 else 0)


def test_rows_that_join_and_leave_are_put_into_the_table_that_is_there() -> None:
    new, lengths, tables = flat(64, 1024, 100)
    planner, work = Planner(block_size=16), Work(kind())
    for step in range(6):
        plan = planner.plan(new, lengths, tables)
        work.update(plan)
        check(work, plan, Rows(new, lengths, [list(table) for table in tables], 0))
        del tables[5 * step], lengths[5 * step]
        lengths = [*(length + 1 for length in lengths), 1100]
        tables.append([*range(64), *range(30000 + 10 * step, 30010 + 10 * step)])
        for row, table in enumerate(tables):
            if len(table) * 16 < lengths[row]:
                table.append(40000 + 100 * step + row)
    assert planner.num_built == 1
    assert work.num_built == 1


def test_one_long_row_is_cut_so_that_all_programs_have_work() -> None:
    plan = build(*flat(1, 0, 32768), block_size=16)
    work = Work(kind(processors=132))
    work.update(plan)
    assert work.programs == 3 * 132
    assert work.programs <= int(work.table[Header.NUM_ITEMS]) * 2 <= work.programs * 6
    lengths = [item[Field.NUM_KV] for item in items_of(work)]
    assert max(lengths) <= 2 * min(lengths) + 64


def test_the_work_of_programs_differs_little() -> None:
    plan = build(*flat(256, 8192, 256), block_size=16)
    work = Work(kind(processors=132))
    work.update(plan)
    load = np.zeros(work.programs)
    cost = [
        item[Field.NUM_KV] * (128 / 96 if item[Field.IS_LARGE] else 1) for item in items_of(work)
    ]
    for number in range(2 * len(cost)):
        load[number % work.programs] += cost[number // 2]
    assert load.max() <= 1.25 * load.mean()


def test_rows_that_share_nothing_are_not_cut_where_there_are_enough() -> None:
    plan = build(*flat(256, 0, 1000), block_size=16)
    work = Work(kind(processors=32))
    work.update(plan)
    assert int(work.table[Header.NUM_ITEMS]) == 256
    assert work.num_merges == 0
    assert work.large == 0


def test_large_tiles_are_no_larger_than_there_are_rows_to_fill_them() -> None:
    for num_rows, large in ((4, 0), (5, 64), (16, 64), (17, 128), (64, 128)):
        work = Work(kind())
        work.update(build(*flat(num_rows, 1024, 17), block_size=16))
        assert work.large == large
