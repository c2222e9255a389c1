"""What a program's author waits for, carried back to every call (OSDI'24, section 5.2).

Knows the graph and the objectives of its outputs. Refuses to know engines, queues and
time: what a scheduler does with a call's performance is its own business.

The paper's rule, on generate nodes; all others are transparent, a call reaches through them:

    throughput  every call that an output needs, directly or not
    latency     the calls that write such an output, and going backwards stage by stage the
                calls before them; the stage of a call is its longest distance to such an
                output. Calls of one stage that the next stage waits for together are a
                task group: what counts is when the last of them ends

A call that several demands reach follows the strictest: waited for by itself, then as one of
a group, then throughput. Deadlines, `ttft` and `tpot` are waited for like `latency`.

Kept true: every generate node is in the result; one that no output needs is `throughput`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from .graph import Graph, Slot
from .ir import Generate
from .order import sort


class Performance(NamedTuple):
    """How a call should be run."""

    kind: Literal["latency", "throughput"]
    group: str | None
    """Calls with one group are finished when the last of them is; it keeps its name as long as
    its first call is in it."""
    depth: int
    """Calls behind this one on the longest way to an output, each output of a prompt a call."""


def get_perf_objective(graph: Graph, nodes: Iterable[str] | None = None) -> dict[str, Performance]:
    """The performance of every generate node, or of those among `nodes`.

    Only `nodes` are looked at then, and what it costs is linear in them. What has ended can
    be left out: nothing is behind it that has not.
    """
    names = graph.nodes if nodes is None else nodes
    slots = [slot for name in names for slot in graph.slots[name]]
    places = {graph.number(slot): place for place, slot in enumerate(slots)}
    calls = [isinstance(graph.nodes[slot.node], Generate) for slot in slots]
    behind = [
        [
            places[number]
            for later in graph.successors(slot)
            if (number := graph.number(later)) in places
        ]
        for slot in slots
    ]
    order = sort(range(len(slots)), behind.__getitem__)
    shape = _Shape(slots, calls, behind, order[::-1])
    waited = {name for name, objective in graph.objectives.items() if objective != "throughput"}
    stages = _distances(shape, waited)
    depths = _distances(shape, set(graph.outputs))
    groups = _group(shape, stages, _find_direct(shape, waited))
    found: dict[str, Performance] = {}
    for number, slot in enumerate(slots):
        if not calls[number]:
            continue
        kind: Literal["latency", "throughput"] = "throughput" if stages[number] < 0 else "latency"
        here = Performance(kind, groups.get(number), max(depths[number], 0))
        there = found.get(slot.node)
        found[slot.node] = here if there is None else _stricter(here, there)
    return found


class _Shape(NamedTuple):
    """A graph by slot numbers."""

    slots: list[Slot]
    calls: list[bool]
    """Whether a slot is of a generate node."""
    behind: list[list[int]]
    backwards: list[int]
    """All numbers, every one before those it waits for."""


def _stricter(one: Performance, other: Performance) -> Performance:
    """Two slots of a node: the stricter demand, the longer way."""
    ranked = sorted((one, other), key=lambda p: (p.kind == "latency", p.group is None))
    return ranked[-1]._replace(depth=max(one.depth, other.depth))


def _distances(shape: _Shape, ends: set[str]) -> list[int]:
    """Calls on the longest way from behind each slot to a variable in `ends`; -1: no way."""
    distances = [-1] * len(shape.slots)
    for number in shape.backwards:
        longest = 0 if any(name in ends for name in shape.slots[number].writes) else -1
        for later in shape.behind[number]:
            if distances[later] >= 0:
                longest = max(longest, distances[later] + shape.calls[later])
        distances[number] = longest
    return distances


def _find_direct(shape: _Shape, ends: set[str]) -> list[bool]:
    """Whether a slot writes a variable in `ends` with no call in between."""
    direct = [False] * len(shape.slots)
    for number in shape.backwards:
        direct[number] = any(name in ends for name in shape.slots[number].writes) or any(
            direct[later] and not shape.calls[later] for later in shape.behind[number]
        )
    return direct


def _group(shape: _Shape, stages: list[int], is_direct: list[bool]) -> dict[int, str]:
    """Calls that stand in a task group, with its name: the node of its first call.

    Calls of a stage belong together if something of the next stage waits for both; a group
    of the next stage is one thing. What waits is found through transparent slots, which are
    members of these sets too, so that the work is linear in the edges.
    """
    calls, behind = shape.calls, shape.behind
    sets = _DisjointSets()
    by_stage: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        by_stage.setdefault(stage, []).append(number)
    groups: dict[int, str] = {}
    for stage in range(1, max(by_stage, default=0) + 1):
        for number in by_stage[stage]:
            for later in behind[number]:
                if calls[later] and stages[later] == stage - 1:
                    sets.join(("before", number), ("behind", later))
                elif not calls[later] and stages[later] == stage:
                    sets.join(("before", number), ("before", later))
        candidates = [
            number for number in by_stage[stage] if calls[number] and not is_direct[number]
        ]
        for together in _members(candidates, sets):
            for number in together:
                groups[number] = shape.slots[together[0]].node
                sets.join(("behind", together[0]), ("behind", number))
    return groups


def _members(numbers: list[int], sets: _DisjointSets) -> list[list[int]]:
    """Those that stand in one set with others, in the order they were given."""
    members: dict[tuple[str, int], list[int]] = {}
    for number in numbers:
        members.setdefault(sets.find(("before", number)), []).append(number)
    return [together for together in members.values() if len(together) > 1]


class _DisjointSets:
    """Union-find with path halving."""

    def __init__(self) -> None:
        self._parents: dict[tuple[str, int], tuple[str, int]] = {}

    def find(self, member: tuple[str, int]) -> tuple[str, int]:
        parents = self._parents
        while (parent := parents.get(member, member)) != member:
            parents[member] = member = parents.get(parent, parent)
        return member

    def join(self, one: tuple[str, int], other: tuple[str, int]) -> None:
        self._parents[self.find(one)] = self.find(other)
