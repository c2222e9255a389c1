"""The memory oracles, compared with hand-computed results and with exhaustive search."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.oracle import (
    StepTrace,
    block_seconds,
    last_use_block_seconds,
    next_use_num_recomputed,
)


def trace_of(
    *steps: str, computed: tuple[str, ...] | None = None, held: int = 0
) -> list[StepTrace]:
    """Return steps of one second each that use the given blocks."""
    seen: set[str] = set()
    found = []
    for number, uses in enumerate(steps):
        new = frozenset(uses) - seen if computed is None else frozenset(computed[number])
        seen |= set(uses)
        found.append(StepTrace(float(number), number + 1.0, frozenset(uses), new, held))
    return found


def test_block_is_needed_until_its_last_use() -> None:
    trace = trace_of("a", "ab", "b", "a", held=2)
    assert block_seconds(trace) == 8
    assert last_use_block_seconds(trace) == 4 + 2


def test_blocks_released_between_steps_are_not_counted() -> None:
    first, second = trace_of("ab", "b", held=2)
    second = second._replace(began_s=5.0, ended_s=6.0)
    assert block_seconds([first, second]) == 2 + 8 + 2
    freed = first._replace(changes=[(1.5, 1), (2.0, 1)])
    assert block_seconds([freed, second]) == 2 + 1 + 3.5 + 2


def test_evicted_block_is_not_counted_until_recomputed() -> None:
    assert last_use_block_seconds(trace_of("a", "b", "a", computed=("a", "b", "a"))) == 3


def test_block_with_latest_next_use_is_evicted_first() -> None:
    trace = trace_of("a", "b", "c", "a", "b")
    assert next_use_num_recomputed(trace, 3) == 0
    assert next_use_num_recomputed(trace, 2) == 1  # c replaces b, and b is computed again once
    assert next_use_num_recomputed(trace, 1) == 2


def fewest(trace: list[StepTrace], capacity: int) -> int:
    """Return the fewest recomputed blocks, by trying every choice after every step."""
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


@settings(max_examples=150)
@given(st.lists(st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=2), max_size=7))
def test_next_use_recomputes_the_fewest_blocks(uses: list[frozenset[str]]) -> None:
    trace = trace_of(*("".join(sorted(each)) for each in uses))
    if trace:
        for capacity in (2, 3):
            assert next_use_num_recomputed(trace, capacity) == fewest(trace, capacity)
