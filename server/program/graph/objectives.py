"""Performance objectives of calls, derived from the objectives of outputs (OSDI'24, section 5.2).

The paper's rule applies to generate nodes. Paths pass through other nodes without counting them:

    throughput  every call that a throughput output depends on
    latency     the calls that write a latency output and, backwards stage by stage, the calls
                they depend on. The stage of a call is the number of calls after it on the
                longest path to a latency output. Calls of one stage with a common successor
                in the next stage are a task group: only the end of the last one matters

A variable that a client waits for counts as an output.

A call with several objectives follows the strictest: latency alone, then latency in a group, then
throughput. `deadline_s`, `ttft` and `tpot` count as `latency`.

Out of scope: engines, queues and time; the scheduler decides what an objective means.

Invariant: every generate node is in the result; one that no output depends on is `throughput`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..ir import Objective
from .graph import Graph
from .slot_graph import SlotGraph


class PerformanceObjective(NamedTuple):
    """The performance objective of a call."""

    kind: Literal["latency", "throughput"]
    group: str | None
    """The task group. It keeps its name as long as it contains its first call."""
    depth: int
    """Calls after this one on the longest path to an output; each output of a prompt counts."""


def is_background(objectives: Mapping[str, Objective]) -> bool:
    """Return whether no reader waits for a program with these objectives of its outputs."""
    return all(objective == "throughput" for objective in objectives.values())


def get_perf_objective(
    graph: Graph, slot_graph: SlotGraph | None = None
) -> dict[str, PerformanceObjective]:
    """Return the performance objective of every generate node of a slot graph (None: of all).

    The cost is linear in the slot graph, which can omit nodes that have ended.
    """
    if slot_graph is None:
        slot_graph = SlotGraph.of(graph)
    names = {name for slot in slot_graph.slots for name in slot.writes}
    outputs = {name for name in names if name in graph.objectives}
    latency_outputs = {name for name in outputs if graph.objectives[name] != "throughput"}
    stages = _distances(slot_graph, latency_outputs)
    depths = _distances(slot_graph, outputs)
    groups = _group(slot_graph, stages, _find_direct(slot_graph, latency_outputs))
    by_node: dict[str, PerformanceObjective] = {}
    for number, slot in enumerate(slot_graph.slots):
        if not slot_graph.is_call[number]:
            continue
        kind: Literal["latency", "throughput"] = "throughput" if stages[number] < 0 else "latency"
        here = PerformanceObjective(kind, groups.get(number), max(depths[number], 0))
        other = by_node.get(slot.node)
        by_node[slot.node] = here if other is None else stricter(here, other)
    return by_node


def stricter(one: PerformanceObjective, other: PerformanceObjective) -> PerformanceObjective:
    """Return the stricter objective of two, with the longer path."""
    ranked = sorted((one, other), key=lambda p: (p.kind == "latency", p.group is None))
    return ranked[-1]._replace(depth=max(one.depth, other.depth))


def _distances(slot_graph: SlotGraph, ends: set[str]) -> list[int]:
    """Return the calls after each slot on its longest path to a variable in `ends`; -1: no path."""
    distances = [-1] * len(slot_graph.slots)
    for number in slot_graph.reverse_order:
        longest = 0 if any(name in ends for name in slot_graph.slots[number].writes) else -1
        for later in slot_graph.successors[number]:
            if distances[later] >= 0:
                longest = max(longest, distances[later] + slot_graph.is_call[later])
        distances[number] = longest
    return distances


def _find_direct(slot_graph: SlotGraph, ends: set[str]) -> list[bool]:
    """Return whether each slot leads to a variable in `ends` without another call."""
    direct = [False] * len(slot_graph.slots)
    for number in slot_graph.reverse_order:
        direct[number] = any(name in ends for name in slot_graph.slots[number].writes) or any(
            direct[later] and not slot_graph.is_call[later]
            for later in slot_graph.successors[number]
        )
    return direct


def _group(slot_graph: SlotGraph, stages: list[int], is_direct: list[bool]) -> dict[int, str]:
    """Return the task group of each call in one: the node of the group's first call.

    Calls of a stage form a group if they have a common successor in the next stage, where a
    group of the next stage counts as one successor. Transparent slots are members of the sets,
    so that the cost is linear in the number of edges.
    """
    is_call, successors = slot_graph.is_call, slot_graph.successors
    sets = _DisjointSets()
    by_stage: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        by_stage.setdefault(stage, []).append(number)
    groups: dict[int, str] = {}
    for stage in range(1, max(by_stage, default=0) + 1):
        for number in by_stage[stage]:
            for later in successors[number]:
                if is_call[later] and stages[later] == stage - 1:
                    sets.join(("before", number), ("after", later))
                elif not is_call[later] and stages[later] == stage:
                    sets.join(("before", number), ("before", later))
        candidates = [
            number for number in by_stage[stage] if is_call[number] and not is_direct[number]
        ]
        for group in _members(candidates, sets):
            for number in group:
                groups[number] = slot_graph.slots[group[0]].node
                sets.join(("after", group[0]), ("after", number))
    return groups


def _members(numbers: list[int], sets: _DisjointSets) -> list[list[int]]:
    """Return the members of each set with more than one of the numbers, in their order."""
    members: dict[tuple[str, int], list[int]] = {}
    for number in numbers:
        members.setdefault(sets.find(("before", number)), []).append(number)
    return [group for group in members.values() if len(group) > 1]


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
