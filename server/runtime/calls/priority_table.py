"""The part of the priorities of a program's calls that follows from its graph.

Responsibility: computes performance objectives, latest starts, the program's duration and its
remaining decode steps, for all nodes or for some of them. The time is linear in these nodes, and
for thousands of them it is too long for one turn of the event loop.

Out of scope: when a table is computed, and ranks (`call_priorities`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...program.graph.critical_path import get_latest_starts, get_remaining
from ...program.graph.graph import Slot
from ...program.graph.objectives import PerformanceObjective, get_perf_objective
from ...program.graph.slot_graph import SlotGraph
from ...program.ir import GenerateNode, Segment
from ...scheduling.service_time import ServiceTimeEstimator
from ..program_state import ProgramState
from .outputs import output_lengths


class PriorityTable(NamedTuple):
    """What the graph says of calls, by node."""

    performance: dict[str, PerformanceObjective]
    latest_starts: dict[str, float]
    """Seconds after the start of the program; only of calls that have a deadline."""
    length_s: float | None
    """Duration of the longest chain of calls; None if the program is open."""
    remaining_steps: dict[str, int] | None
    """Decode steps from the start of a call to the end of the program; None if they are not used:
    the program is open, or has a single call."""


class CallSizes:
    """Estimated lengths of a program's calls. The first estimate of a call is kept."""

    def __init__(self, pace: ServiceTimeEstimator) -> None:
        self._pace = pace
        self._sizes: dict[str, tuple[int, list[int]]] = {}

    def remove(self, node_id: str) -> None:
        """Forget a call; safe to repeat."""
        self._sizes.pop(node_id, None)

    def of(self, node: GenerateNode) -> tuple[int, list[int]]:
        """Return the estimated tokens of a call's prompt and of each of its outputs."""
        known = self._sizes.get(node.id)
        if known is None:
            outputs = [length for _, length in output_lengths(node)]
            num_prompt = round(num_static_chars(node) * self._pace.tokens_per_char)
            known = self._sizes[node.id] = (num_prompt, outputs)
        return known

    def num_steps(self, node: GenerateNode, slot: int) -> int:
        """Return the decode steps of one output."""
        return self.of(node)[1][slot]

    def estimate_s(self, node: GenerateNode, slot: int) -> float:
        """Return the estimated duration of one output."""
        num_prompt, outputs = self.of(node)
        return self._pace.estimate_s(num_prompt, outputs[slot])


class PriorityTables:
    """Computes tables of one program. No method changes the program."""

    def __init__(self, state: ProgramState, sizes: CallSizes) -> None:
        self._state = state
        self._sizes = sizes

    def compute(self, nodes: Iterable[str], length_s: float | None = None) -> PriorityTable:
        """Return the table of all nodes that have not ended.

        Args:
            nodes: the nodes.
            length_s: the duration of the program, if it is known.
        """
        state = self._state
        slot_graph = SlotGraph.of(state.graph, nodes)
        if length_s is None and not state.is_open:
            length_s = self._length_s(slot_graph)
        has_steps = not state.is_open and state.num_open_calls > 1
        return PriorityTable(
            get_perf_objective(state.graph, slot_graph),
            self._latest_starts(slot_graph),
            length_s,
            self._remaining_steps(slot_graph) if has_steps else None,
        )

    def compute_performance(
        self, nodes: Iterable[str]
    ) -> tuple[dict[str, PerformanceObjective], dict[str, float]]:
        """Return the objectives and the latest starts of nodes, computed without the others."""
        slot_graph = SlotGraph.of(self._state.graph, nodes)
        return get_perf_objective(self._state.graph, slot_graph), self._latest_starts(slot_graph)

    def compute_length_s(self, nodes: Iterable[str]) -> float:
        """Return the duration of the longest chain of calls."""
        return self._length_s(SlotGraph.of(self._state.graph, nodes))

    def compute_remaining_steps(self, nodes: Iterable[str]) -> dict[str, int]:
        """Return the decode steps from the start of each call to the end of the last."""
        return self._remaining_steps(SlotGraph.of(self._state.graph, nodes))

    def estimate_s(self, slot: Slot) -> float:
        """Estimate the duration of a slot; 0 if it is not an LLM call."""
        node = self._state.graph.nodes[slot.node]
        return self._sizes.estimate_s(node, slot.index) if isinstance(node, GenerateNode) else 0.0

    def _num_steps(self, slot: Slot) -> float:
        node = self._state.graph.nodes[slot.node]
        return self._sizes.num_steps(node, slot.index) if isinstance(node, GenerateNode) else 0.0

    def _latest_starts(self, slot_graph: SlotGraph) -> dict[str, float]:
        graph, deadline_s = self._state.graph, self._state.options.deadline_s
        if deadline_s is None and not graph.deadlines:
            return {}
        return get_latest_starts(
            graph, self.estimate_s, deadline_s=deadline_s, slot_graph=slot_graph
        )

    def _length_s(self, slot_graph: SlotGraph) -> float:
        remaining = get_remaining(self._state.graph, self.estimate_s, slot_graph=slot_graph)
        return max(remaining.values(), default=0.0)

    def _remaining_steps(self, slot_graph: SlotGraph) -> dict[str, int]:
        steps = get_remaining(self._state.graph, self._num_steps, slot_graph=slot_graph)
        return {node: round(number) for node, number in steps.items()}


def first_table(state: ProgramState, pace: ServiceTimeEstimator) -> PriorityTable:
    """Return the table of a program that has not started."""
    return PriorityTables(state, CallSizes(pace)).compute(state.graph.nodes)


def num_static_chars(node: GenerateNode) -> int:
    """Return the number of characters of a prompt that are text of the program."""
    total = 0
    for message in node.messages or ():
        if isinstance(message.content, str):
            total += len(message.content)
        elif isinstance(message.content, list):
            total += _num_text_chars(message.content)
    return total + (_num_text_chars(node.prompt) if isinstance(node.prompt, list) else 0)


def _num_text_chars(segments: list[Segment]) -> int:
    total = 0
    for segment in segments:
        if isinstance(segment.text, str):
            total += len(segment.text)
    return total
