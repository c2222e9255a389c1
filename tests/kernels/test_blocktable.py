"""A block table counts whatever changes the blocks that it had, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from conure.kernels.blocktable import BlockTable

Change = Callable[[BlockTable, random.Random], object]
CHANGES: tuple[Change, ...] = (
    lambda table, rng: table.append(rng.randrange(5)),
    lambda table, rng: table.extend([rng.randrange(5), 3]),
    lambda table, rng: table.__iadd__([rng.randrange(5)]),
    lambda table, rng: table.__imul__(rng.randrange(3)),
    lambda table, rng: table.insert(rng.randrange(4), 7),
    lambda table, rng: table.pop(rng.randrange(len(table))) if table else None,
    lambda table, rng: table.remove(table[-1]) if table else None,
    lambda table, rng: table.clear(),
    lambda table, rng: table.reverse(),
    lambda table, rng: table.sort(reverse=rng.random() < 0.5),
    lambda table, rng: table.__setitem__(slice(0, rng.randrange(3)), [8, 9]),
    lambda table, rng: table.__setitem__(-1, 6) if table else None,
    lambda table, rng: table.__delitem__(slice(rng.randrange(4), None)),
)


@given(st.integers(0, 2**32), st.lists(st.sampled_from(CHANGES), max_size=12))
def test_a_table_that_counts_the_same_begins_as_it_was(seed: int, changes: list[Change]) -> None:
    rng, table = random.Random(seed), BlockTable([1, 2, 3])
    before, replaced = list(table), table.replaced
    for change in changes:
        change(table, rng)
        if table.replaced == replaced:
            assert table[: len(before)] == before
        before, replaced = list(table), table.replaced


def test_every_way_to_change_a_list_is_known() -> None:
    changing = {
        name
        for name in dir(list)
        if callable(getattr(list, name)) and name not in dir(tuple) and name not in {"copy"}
    }
    longer = {"append", "extend", "__iadd__", "__reversed__"}
    assert changing - longer == vars(BlockTable).keys() & changing


def test_a_table_that_only_grows_counts_nothing() -> None:
    table = BlockTable([1])
    table.append(2)
    table.extend([3, 4])
    table += [5]
    assert (table, table.replaced) == ([1, 2, 3, 4, 5], 0)
