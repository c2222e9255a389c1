"""The clairvoyant's memory: by hand, and against every other way to evict."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from oracle import (  # type: ignore[import-not-found,unused-ignore]  # a script's neighbour
    StepTrace,
    block_seconds,
    last_use_block_seconds,
    next_use_num_refilled,
)


def trace_of(
    *steps: str, computed: tuple[str, ...] | None = None, held: int = 0
) -> list[StepTrace]:
    """Steps of one second each, which use the blocks that they are written with."""
    seen: set[str] = set()
    found = []
    for number, uses in enumerate(steps):
        new = frozenset(uses) - seen if computed is None else frozenset(computed[number])
        seen |= set(uses)
        found.append(StepTrace(float(number), number + 1.0, frozenset(uses), new, held))
    return found


def test_a_block_is_held_to_its_last_use() -> None:
    trace = trace_of("a", "ab", "b", "a", held=2)
    assert block_seconds(trace) == 8
    assert last_use_block_seconds(trace) == 4 + 2


def test_what_is_given_up_between_two_steps_is_held_no_longer() -> None:
    first, second = trace_of("ab", "b", held=2)
    second = second._replace(began_s=5.0, ended_s=6.0)
    assert block_seconds([first, second]) == 2 + 8 + 2
    freed = first._replace(changes=[(1.5, 1), (2.0, 1)])
    assert block_seconds([freed, second]) == 2 + 1 + 3.5 + 2


def test_nobody_holds_a_block_between_its_eviction_and_its_refill() -> None:
    assert last_use_block_seconds(trace_of("a", "b", "a", computed=("a", "b", "a"))) == 3


def test_who_is_used_last_goes_first() -> None:
    trace = trace_of("a", "b", "c", "a", "b")
    assert next_use_num_refilled(trace, 3) == 0
    assert next_use_num_refilled(trace, 2) == 1  # b goes for c, and comes back once
    assert next_use_num_refilled(trace, 1) == 2


def fewest(trace: list[StepTrace], capacity: int) -> int:
    """By trying all there is to keep after every step."""
    states: dict[frozenset[object], int] = {frozenset(): 0}
    seen: set[object] = set()
    for step in trace:
        found: dict[frozenset[object], int] = {}
        for resident, cost in states.items():
            more = cost + len((step.uses & seen) - resident)
            others = resident - step.uses
            room = capacity - len(step.uses)
            for size in range(min(room, len(others)) + 1):
                for kept in combinations(sorted(others, key=str), size):
                    state = frozenset(kept) | step.uses
                    found[state] = min(found.get(state, more), more)
        seen |= step.uses
        states = found
    return min(states.values())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=2), max_size=7))
def test_no_other_way_refills_less(uses: list[frozenset[str]]) -> None:
    trace = trace_of(*("".join(sorted(each)) for each in uses))
    if trace:
        for capacity in (2, 3):
            assert next_use_num_refilled(trace, capacity) == fewest(trace, capacity)
