"""Deadlines of outputs, carried back to every call as the latest moment it can start.

The backward pass of the critical path method (Kelley and Walker, 1959): a call must have
ended when the first of those that wait for it must start. What is left until then is its slack;
along the critical path all calls share the same slack, beside it they have more.

Knows the graph, its objectives, and what it is told of how long slots take. Refuses to know
clocks: times are seconds since the program began.

Kept true: nothing starts later than what waits for it, less its own time; only calls that a
deadline stands behind are in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .graph import Graph, Slot
from .ir import Deadline, Generate
from .order import sort


def has_deadline(graph: Graph) -> bool:
    """Whether an output is wanted by a certain time."""
    return any(isinstance(objective, Deadline) for objective in graph.objectives.values())


def get_latest_starts(
    graph: Graph,
    seconds: Callable[[Slot], float],
    *,
    deadline_s: float | None = None,
    nodes: Iterable[str] | None = None,
) -> dict[str, float]:
    """When each generate node has to start at the latest; may lie before the program began.

    Args:
        graph: the program.
        seconds: an estimate of how long a slot takes once it runs.
        deadline_s: of the whole program, which is one of all its outputs.
        nodes: only these are looked at; all others have ended.
    """
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
    due = _due(graph, deadline_s)
    starts = [math.inf] * len(slots)
    for place in reversed(sort(range(len(slots)), behind.__getitem__)):
        slot = slots[place]
        ends = min((due.get(name, math.inf) for name in slot.writes), default=math.inf)
        for later in behind[place]:
            ends = min(ends, starts[later])
        if ends < math.inf:
            starts[place] = ends - seconds(slot)
    found: dict[str, float] = {}
    for slot, start in zip(slots, starts, strict=True):
        if start < math.inf and isinstance(graph.nodes[slot.node], Generate):
            found[slot.node] = min(start, found.get(slot.node, math.inf))
    return found


def _due(graph: Graph, deadline_s: float | None) -> dict[str, float]:
    """When each output is due, of those that are."""
    whole = math.inf if deadline_s is None else deadline_s
    due = {
        name: min(whole, objective.deadline_s if isinstance(objective, Deadline) else math.inf)
        for name, objective in graph.objectives.items()
    }
    return {name: at for name, at in due.items() if at < math.inf}
