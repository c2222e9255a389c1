"""The work table of a step covers the positions of each query exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conure.kernels.gpu.work_table.builder import LayerGroup, WorkTableBuilder
from conure.kernels.gpu.work_table.table import (
    ITEM_SIZE,
    MERGE_PLACES,
    MERGE_SIZE,
    SIZES,
    ItemField,
)
from conure.kernels.planning.plan import Plan, build_plan
from conure.kernels.planning.planner import Planner
from tests.kernels.random_trees import RandomSteps, Rows, as_array, expected_slots, random_rows


def layer_group(
    *, group: int = 4, window: int | None = None, large: int = 128, processors: int = 32
) -> LayerGroup:
    small = max(16, 1 << (group - 1).bit_length())
    large = large if large > small else 0
    return LayerGroup(2, group, window, small, large, processors, programs=(3, 2, 1))


def items_of(work: WorkTableBuilder) -> list[dict[ItemField, int]]:
    """Return the items of both sizes, the large ones first, as programs find them."""
    items: list[dict[ItemField, int]] = []
    for size in (1, 0):
        begin = work.first_item + size * ITEM_SIZE
        for _ in range(work.words[begin + ItemField.NUM_ITEMS]):
            words = work.words[begin : begin + ITEM_SIZE]
            items.append({field: int(words[field]) for field in ItemField})
            assert items[-1][ItemField.IS_LARGE] == size
            begin += SIZES * ITEM_SIZE
    return items


def read_table(work: WorkTableBuilder, plan: Plan) -> tuple[list[Counter[int]], list[list[int]]]:
    """Return the slots that each query reads and the partials it writes, as the kernel would."""
    table, window = work.words.tolist(), work.layers.window
    seen: list[Counter[int]] = [Counter() for _ in range(plan.num_queries)]
    written: list[list[int]] = [[] for _ in range(plan.num_queries)]
    for item in items_of(work):
        large = work.large if item[ItemField.IS_LARGE] else work.layers.small
        assert 1 <= item[ItemField.NUM_QUERIES] <= large // work.layers.group
        assert 0 <= item[ItemField.OFFSET] < plan.block_size
        assert item[ItemField.NUM_KV] >= 1
        for j in range(item[ItemField.NUM_QUERIES]):
            entry = item[ItemField.ENTRY] + j
            query = table[entry]
            slot = table[item[ItemField.SLOTS] + j]
            assert (slot < 0) == (item[ItemField.CHUNK] < 0)
            written[query].append(slot + item[ItemField.CHUNK] if slot >= 0 else -1)
            for column in range(item[ItemField.NUM_KV]):
                if column >= item[ItemField.LIMIT] + j:
                    break
                if window is not None and column < item[ItemField.FLOOR] + j:
                    continue
                place = item[ItemField.OFFSET] + column
                page = table[item[ItemField.PAGE] + place // plan.block_size]
                seen[query][page * plan.block_size + place % plan.block_size] += 1
    return seen, written


def check(work: WorkTableBuilder, plan: Plan, rows: Rows) -> None:
    seen, written = read_table(work, plan)
    assert seen == expected_slots(rows, plan.block_size, work.layers.window)
    table = work.words.tolist()
    merges = {}
    for begin in range(0, work.first_item, MERGE_SIZE):
        query, first, count = table[begin : begin + MERGE_SIZE][:3]
        if count:
            merges[query] = list(range(first, first + count))
    assert len(merges) == work.num_merges
    for query, slots in enumerate(written):
        if slots == [-1]:
            assert query not in merges
        else:
            assert sorted(slots) == merges[query]
    used = [slot for slots in merges.values() for slot in slots]
    assert len(set(used)) == len(used) <= work.num_partials
    assert max(used, default=-1) < work.num_partials


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    levels=st.integers(1, 5),
    block_size=st.sampled_from((1, 4, 16, 64)),
    min_saved=st.sampled_from((0, 20, 10**9)),
    window=st.sampled_from((None, 1, 7, 30)),
    group=st.sampled_from((1, 4, 5, 16, 71)),
    processors=st.sampled_from((1, 32, 132)),
)
def test_each_position_is_covered_exactly_once(
    seed: int,
    levels: int,
    block_size: int,
    min_saved: int,
    window: int | None,
    group: int,
    processors: int,
) -> None:
    rows = random_rows(seed, levels=levels, block_size=block_size, max_new=40)
    plan = build_plan(*rows[:3], block_size=block_size, min_saved=min_saved)
    work = WorkTableBuilder(layer_group(group=group, window=window, processors=processors))
    work.update(plan)
    check(work, plan, rows)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 4, 16)),
    window=st.sampled_from((None, 7, 30)),
    calm=st.sampled_from((0.5, 1.0)),
    processors=st.sampled_from((1, 32)),
)
def test_extended_table_covers_each_position_once(
    seed: int, block_size: int, window: int | None, calm: float, processors: int
) -> None:
    steps = RandomSteps(seed, block_size, as_array)
    planner = Planner(block_size=block_size, min_saved=0)
    work = WorkTableBuilder(layer_group(window=window, processors=processors))
    for _ in range(12):
        plan = planner.plan(steps.num_new, steps.lengths, steps.tables)
        work.update(plan)
        tables = [list(table) for table in steps.tables]
        check(work, plan, Rows(steps.num_new, steps.lengths, tables, 0))
        steps.decode()
        if steps.rng.random() > calm:
            steps.disturb()


def flat(num_rows: int, prefix: int, own: int) -> tuple[list[int], list[int], list[list[int]]]:
    shared = range(prefix // 16)
    each = own // 16 + 1
    tables = [
        [*shared, *range(10000 + row * each, 10000 + (row + 1) * each)] for row in range(num_rows)
    ]
    return [1] * num_rows, [prefix + own] * num_rows, tables


def test_decode_steps_extend_the_table() -> None:
    new, lengths, tables = flat(16, 1024, 1)
    planner, work = Planner(block_size=16), WorkTableBuilder(layer_group())
    for step in range(130):
        for row, table in enumerate(tables):
            if len(table) * 16 < lengths[row]:
                table.append(20000 + step * 16 + row)
        work.update(planner.plan(new, lengths, tables))
        lengths = [length + 1 for length in lengths]
    assert planner.num_trees == 1
    assert work.num_built == 2


def test_long_row_gives_all_programs_work() -> None:
    plan = build_plan(*flat(1, 0, 32768), block_size=16)
    work = WorkTableBuilder(layer_group(processors=132))
    work.update(plan)
    programs = work.num_programs(0)
    assert programs == 3 * 132
    num_units = 2 * len(items_of(work))
    assert 0.8 * programs <= num_units <= programs, "one round, as full as possible"
    lengths = [item[ItemField.NUM_KV] for item in items_of(work)]
    assert max(lengths) <= 2 * min(lengths) + 64


def test_four_items_for_each_program_give_equal_work() -> None:
    plan = build_plan(*flat(256, 8192, 256), block_size=16)
    work = WorkTableBuilder(layer_group(processors=132)._replace(max_items_per_program=4))
    work.update(plan)
    for large in (0, 128):
        cost = [
            item[ItemField.NUM_KV]
            for item in items_of(work)
            if item[ItemField.IS_LARGE] == (large > 0)
        ]
        load = finish(cost, work.num_programs(large))
        assert load.max() <= 1.25 * load.mean()


def test_large_items_precede_small_ones() -> None:
    plan = build_plan(*flat(64, 2048, 640), block_size=16)
    work = WorkTableBuilder(layer_group(processors=32))
    work.update(plan)
    sizes = [item[ItemField.IS_LARGE] for item in items_of(work)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) > 0
    for large in (True, False):
        of_size = [each for each in items_of(work) if each[ItemField.IS_LARGE] == large]
        lengths = [item[ItemField.NUM_KV] for item in of_size]
        assert lengths == sorted(lengths, reverse=True)


def test_items_begin_at_the_same_place_in_all_steps_that_are_recorded() -> None:
    for rows in ((1, 0, 100), (64, 2048, 64), (256, 2048, 64)):
        work = WorkTableBuilder(layer_group())
        work.update(build_plan(*flat(*rows), block_size=16))
        assert work.first_item == MERGE_PLACES * MERGE_SIZE


def test_programs_without_an_item_find_the_number_of_items() -> None:
    work = WorkTableBuilder(layer_group(processors=132))
    work.update(build_plan(*flat(8, 2048, 64), block_size=16))
    for size, large in ((0, 0), (1, work.large)):
        last = (work.num_programs(large) - 1) // work.layers.kv_heads
        begin = work.first_item + (last * SIZES + size) * ITEM_SIZE
        num = int(work.words[begin + ItemField.NUM_ITEMS])
        assert 0 < num <= last


def finish(cost: list[int] | list[float], programs: int) -> NDArray[np.float64]:
    """Return the load of each program if a free program takes the next unit of two heads."""
    load = np.zeros(programs)
    for each in cost:
        for _ in range(2):
            load[load.argmin()] += each
    return load


def test_enough_unshared_rows_are_not_cut() -> None:
    plan = build_plan(*flat(256, 0, 1000), block_size=16)
    work = WorkTableBuilder(layer_group(processors=32))
    work.update(plan)
    assert len(items_of(work)) == 256
    assert work.num_merges == 0
    assert work.large == 0


def test_large_tiles_fit_the_number_of_rows() -> None:
    # 17 queries of 4 heads need two tiles of 64 rows, as fast as one of 128.
    for num_rows, large in ((4, 0), (5, 64), (16, 64), (17, 128), (32, 128), (33, 64), (64, 128)):
        work = WorkTableBuilder(layer_group())
        work.update(build_plan(*flat(num_rows, 1024, 17), block_size=16))
        assert work.large == large, num_rows


def test_many_ranges_of_few_rows_have_small_tiles() -> None:
    tree = lay_out_tree((1, 8, 64), (512, 512, 16))
    work = WorkTableBuilder(layer_group())
    work.update(build_plan(*tree, block_size=16))
    assert work.large == 64


def lay_out_tree(
    nodes: tuple[int, ...], tokens: tuple[int, ...]
) -> tuple[list[int], list[int], list[list[int]]]:
    """Return decoding rows of a tree of whole blocks."""
    blocks = iter(range(1 << 20))
    tables: list[list[int]] = [[]]
    for num, length in zip(nodes, tokens, strict=True):
        fan_out = num // len(tables)
        tables = [
            [*table, *(next(blocks) for _ in range(length // 16))]
            for table in tables
            for _ in range(fan_out)
        ]
    return [1] * len(tables), [16 * len(table) for table in tables], tables
