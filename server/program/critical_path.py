"""The critical path method (Kelley and Walker, 1959) over a program's calls.

Forwards from nothing and backwards from everything: how long the calls behind each call still
take, and when each has to start at the latest for every deadline behind it. A call must have
ended when the first of those that wait for it must start. What is left until then is its
slack; along the critical path all calls share the same slack, beside it they have more.

Knows the graph, its objectives, and what it is told of how long slots take. Refuses to know
clocks: times are seconds since the program began.

Kept true: nothing starts later than what waits for it, less its own time; a call takes with
all behind it no less than any of these does with all behind that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .graph import Graph, Slot
from .ir import Deadline, Generate
from .order import sort

Seconds = Callable[[Slot], float]
"""An estimate of how long a slot takes once it runs."""


def has_deadline(graph: Graph) -> bool:
    """Whether an output is wanted by a certain time."""
    return any(isinstance(objective, Deadline) for objective in graph.objectives.values())


def get_latest_starts(
    graph: Graph,
    seconds: Seconds,
    *,
    deadline_s: float | None = None,
    nodes: Iterable[str] | None = None,
) -> dict[str, float]:
    """When each generate node has to start at the latest; may lie before the program began.

    Only calls that a deadline stands behind are in it.

    Args:
        graph: the program.
        seconds: how long slots take.
        deadline_s: of the whole program, by which every call must have ended.
        nodes: only these are looked at; all others have ended.
    """
    shape = _shape(graph, nodes)
    due = _due(graph)
    whole = math.inf if deadline_s is None else deadline_s
    starts = [math.inf] * len(shape.slots)
    for place in shape.backwards:
        slot = shape.slots[place]
        ends = min((due[name] for name in slot.writes if name in due), default=whole)
        ends = min(ends, whole)
        for later in shape.behind[place]:
            ends = min(ends, starts[later])
        if ends < math.inf:
            starts[place] = ends - seconds(slot)
    found: dict[str, float] = {}
    for slot, start in zip(shape.slots, starts, strict=True):
        if start < math.inf and isinstance(graph.nodes[slot.node], Generate):
            found[slot.node] = min(start, found.get(slot.node, math.inf))
    return found


def get_earliest_starts(
    graph: Graph, seconds: Seconds, *, nodes: Iterable[str]
) -> dict[str, float]:
    """In how many seconds each node starts at the soonest, if there is room for all.

    Args:
        graph: the program.
        seconds: how long slots still take, also those that run.
        nodes: those that have not ended.
    """
    shape = _shape(graph, nodes)
    starts = [0.0] * len(shape.slots)
    for place in reversed(shape.backwards):
        ends = starts[place] + seconds(shape.slots[place])
        for later in shape.behind[place]:
            starts[later] = max(starts[later], ends)
    return {
        slot.node: start for slot, start in zip(shape.slots, starts, strict=True) if slot.index == 0
    }


def get_remaining(
    graph: Graph, seconds: Seconds, *, nodes: Iterable[str] | None = None
) -> dict[str, float]:
    """How long each generate node takes together with the longest way behind it.

    Args:
        graph: the program.
        seconds: how long slots take.
        nodes: only these are looked at; all others have ended.
    """
    shape = _shape(graph, nodes)
    remaining = [0.0] * len(shape.slots)
    for place in shape.backwards:
        behind = max((remaining[later] for later in shape.behind[place]), default=0.0)
        remaining[place] = seconds(shape.slots[place]) + behind
    found: dict[str, float] = {}
    for slot, left in zip(shape.slots, remaining, strict=True):
        if isinstance(graph.nodes[slot.node], Generate):
            found[slot.node] = max(left, found.get(slot.node, 0.0))
    return found


class _Shape(NamedTuple):
    """The slots of some nodes, by their places in a list."""

    slots: list[Slot]
    behind: list[list[int]]
    backwards: list[int]
    """All places, every one before those it waits for."""


def _shape(graph: Graph, nodes: Iterable[str] | None) -> _Shape:
    names = graph.nodes if nodes is None else nodes
    slots = [slot for name in names for slot in graph.slots[name]]
    places = {graph.number(slot): place for place, slot in enumerate(slots)}
    behind = [
        [
            places[number]
            for later in graph.successors(slot)
            if (number := graph.number(later)) in places
        ]
        for slot in slots
    ]
    return _Shape(slots, behind, sort(range(len(slots)), behind.__getitem__)[::-1])


def _due(graph: Graph) -> dict[str, float]:
    """When each output is due, of those that are."""
    return {
        name: objective.deadline_s
        for name, objective in graph.objectives.items()
        if isinstance(objective, Deadline)
    }
