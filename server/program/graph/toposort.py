"""Topological order of numbered slots: pure functions, deterministic, linear, not recursive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

Successors: TypeAlias = Callable[[int], Sequence[int]]
"""The numbers that wait for a number; a repeated edge counts twice."""


def sort(numbers: Iterable[int], successors: Successors) -> list[int]:
    """Return the numbers in topological order (Kahn), without those on or after a cycle.

    `numbers` must contain all successors of its members.
    """
    num_waiting_for = dict.fromkeys(numbers, 0)
    for number in num_waiting_for:
        for later in successors(number):
            num_waiting_for[later] += 1
    order = [number for number, count in num_waiting_for.items() if count == 0]
    for number in order:  # grows during the loop
        for later in successors(number):
            num_waiting_for[later] -= 1
            if num_waiting_for[later] == 0:
                order.append(later)
    return order


def reachable(numbers: Iterable[int], successors: Successors) -> list[int]:
    """Return the numbers and their direct and indirect successors; each once."""
    reached = dict.fromkeys(numbers)
    stack = list(reached)
    while stack:
        for later in successors(stack.pop()):
            if later not in reached:
                reached[later] = None
                stack.append(later)
    return list(reached)


def find_cycle(unsorted: Iterable[int], successors: Successors) -> list[int]:
    """Return a cycle among the numbers that `sort` omitted, in edge order, smallest first."""
    members = set(unsorted)
    # Each member waits for another member, so that walking backwards ends in a cycle.
    predecessor = {
        later: number
        for number in sorted(members)
        for later in successors(number)
        if later in members
    }
    visited: dict[int, int] = {}
    number = min(members)
    while number not in visited:
        visited[number] = len(visited)
        number = predecessor[number]
    cycle = list(visited)[visited[number] :][::-1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]
