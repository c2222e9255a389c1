"""Order among numbered slots: sorted so that nobody stands before what it waits for.

Pure functions of numbers and edges; deterministic, linear, no recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

Behind: TypeAlias = Callable[[int], Sequence[int]]
"""The numbers that wait for a number; an edge that stands twice counts twice."""


def sort(numbers: Iterable[int], behind: Behind) -> list[int]:
    """The numbers in topological order (Kahn); those on or behind a cycle are missing.

    `numbers` must be closed: whatever waits for one of them is one of them.
    """
    waiting = dict.fromkeys(numbers, 0)
    for number in waiting:
        for later in behind(number):
            waiting[later] += 1
    order = [number for number, count in waiting.items() if count == 0]
    for number in order:  # grows while it is walked
        for later in behind(number):
            waiting[later] -= 1
            if waiting[later] == 0:
                order.append(later)
    return order


def reach(numbers: Iterable[int], behind: Behind) -> list[int]:
    """The numbers and whatever waits for them, directly or not; each once."""
    found = dict.fromkeys(numbers)
    stack = list(found)
    while stack:
        for later in behind(stack.pop()):
            if later not in found:
                found[later] = None
                stack.append(later)
    return list(found)


def find_cycle(unsorted: Iterable[int], behind: Behind) -> list[int]:
    """One cycle among the numbers that `sort` left out, its smallest first, in edge order."""
    inside = set(unsorted)
    # Each of them waits for another of them: walking backwards must come round.
    before = {
        later: number for number in sorted(inside) for later in behind(number) if later in inside
    }
    seen: dict[int, int] = {}
    number = min(inside)
    while number not in seen:
        seen[number] = len(seen)
        number = before[number]
    cycle = list(seen)[seen[number] :][::-1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]
