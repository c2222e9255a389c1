"""The critical path method (Kelley and Walker, 1959) over a program's calls.

A forward pass gives the earliest start of each call. A backward pass gives the time that a call
and its longest chain of successors take, and the latest start that keeps every deadline. All calls
of the critical path have the same slack; other calls have more.

Out of scope: clocks. Times are seconds since the program began, and durations are given.

Invariants: the latest start of a slot, plus its duration, is not after the latest start of any
successor. A call with its successors takes at least as long as any successor with its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..ir import GenerateNode
from ..nodes.bodies import count_calls
from ..nodes.control.base import OUTPUT, TemplateNode
from .graph import Graph, Slot
from .slot_graph import SlotGraph

SlotSeconds = Callable[[Slot], float]
"""An estimate of a slot's duration once it runs."""


def get_latest_starts(
    graph: Graph,
    seconds: SlotSeconds,
    *,
    deadline_s: float | None = None,
    slot_graph: SlotGraph | None = None,
) -> dict[str, float]:
    """Return the latest start of each generate node before a deadline; negative if it is too late.

    Args:
        graph: the program.
        seconds: the duration of slots.
        deadline_s: a deadline for all calls of the program.
        slot_graph: the nodes that have not ended; None: all.
    """
    if slot_graph is None:
        slot_graph = SlotGraph.of(graph)
    deadlines = graph.deadlines
    program_deadline = math.inf if deadline_s is None else deadline_s
    starts = [math.inf] * len(slot_graph.slots)
    for index in slot_graph.reverse_order:
        slot = slot_graph.slots[index]
        ends = min((deadlines[name] for name in slot.writes if name in deadlines), default=math.inf)
        ends = min(ends, program_deadline)
        for later in slot_graph.successors[index]:
            ends = min(ends, starts[later])
        if ends < math.inf:
            starts[index] = ends - seconds(slot)
    by_node: dict[str, float] = {}
    for slot, is_call, start in zip(slot_graph.slots, slot_graph.is_call, starts, strict=True):
        if is_call and start < math.inf:
            by_node[slot.node] = min(start, by_node.get(slot.node, math.inf))
    return by_node


def get_earliest_starts(seconds: SlotSeconds, slot_graph: SlotGraph) -> dict[str, float]:
    """Return the earliest start of each node in seconds from now, if engines have room for all.

    Args:
        seconds: the remaining duration of slots, including those that run.
        slot_graph: the nodes that have not ended.
    """
    starts = [0.0] * len(slot_graph.slots)
    for index in reversed(slot_graph.reverse_order):
        ends = starts[index] + seconds(slot_graph.slots[index])
        for later in slot_graph.successors[index]:
            starts[later] = max(starts[later], ends)
    return {
        slot.node: start
        for slot, start in zip(slot_graph.slots, starts, strict=True)
        if slot.index == 0
    }


def get_remaining(
    graph: Graph, seconds: SlotSeconds, *, slot_graph: SlotGraph | None = None
) -> dict[str, float]:
    """Return how long each generate node takes, with its longest chain of successors.

    Args:
        graph: the program.
        seconds: the duration of slots.
        slot_graph: the nodes that have not ended; None: all.
    """
    if slot_graph is None:
        slot_graph = SlotGraph.of(graph)
    remaining = [0.0] * len(slot_graph.slots)
    for index in slot_graph.reverse_order:
        longest = max((remaining[later] for later in slot_graph.successors[index]), default=0.0)
        remaining[index] = seconds(slot_graph.slots[index]) + longest
    by_node: dict[str, float] = {}
    for slot, is_call, left in zip(slot_graph.slots, slot_graph.is_call, remaining, strict=True):
        if is_call:
            by_node[slot.node] = max(left, by_node.get(slot.node, 0.0))
    return by_node


def longest_chain(graph: Graph) -> int:
    """Return the number of LLM calls on the longest path, with one instance of each template."""
    slot_graph = SlotGraph.of(graph)
    calls = [0] * len(slot_graph.slots)
    for index in slot_graph.reverse_order:
        longest = max((calls[later] for later in slot_graph.successors[index]), default=0)
        calls[index] = longest + _num_calls(graph, slot_graph.slots[index])
    return max(calls, default=0)


def _num_calls(graph: Graph, slot: Slot) -> int:
    node = graph.nodes[slot.node]
    if isinstance(node, TemplateNode) and slot.index == OUTPUT:
        (body,) = node.bodies()
        return count_calls(body.nodes)
    return int(isinstance(node, GenerateNode))
