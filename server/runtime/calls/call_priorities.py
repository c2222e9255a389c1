"""The priorities of a program's LLM calls: performance objective, critical path and rank.

Priorities are derived from the graph before anything runs, and again when nodes are added.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ...program.graph.critical_path import get_latest_starts, get_remaining, has_deadline
from ...program.graph.graph import Slot
from ...program.graph.objectives import PerformanceObjective, get_perf_objective
from ...program.graph.slot_graph import SlotGraph
from ...program.ir import GenerateNode, MapNode, Segment
from ...scheduling.policy import Rank
from ...scheduling.request import PriorityInputs
from ..program_state import ProgramState
from ..services import RuntimeServices
from .outputs import output_lengths
from .remaining_work import RemainingWork

MAX_NODES_RECOMPUTED = 128
"""Unended nodes up to which every append recomputes all priorities."""
MAX_NODES_AT_ONCE = 2_000
"""Unended nodes beyond which the priorities of older nodes stay as they are."""


class CallPriorities:
    """The priorities of one program's calls."""

    def __init__(self, state: ProgramState, services: RuntimeServices) -> None:
        self.live_nodes: dict[str, None] = {}
        """Nodes that have not ended."""
        self._state = state
        self._scheduler = services.scheduler
        self._started_at_s = time.monotonic() - (services.clock.now() - state.created_at)
        self.service = services.scheduler.sessions.join(
            state.tenant, state.options.session, self._started_at_s
        )
        """The service that the program's session has received."""
        self._performance: dict[str, PerformanceObjective] = {}
        self._latest_starts: dict[str, float] = {}
        self._length_s: float | None = None
        self._has_begun = False
        self._remaining_steps: dict[str, int] | None = None
        self._new_nodes: dict[str, None] = {}
        self._work = RemainingWork()
        self._sizes: dict[str, tuple[int, list[int]]] = {}
        """Tokens of a call's prompt and of each of its outputs, estimated."""

    def add_nodes(self, nodes: Iterable[str]) -> None:
        """Add new nodes. Their priorities are computed when the next call is created."""
        known = dict.fromkeys(nodes)
        self._new_nodes.update(known)
        self.live_nodes.update(known)
        graph = self._state.graph
        calls = (node for each in known if isinstance(node := graph.nodes[each], GenerateNode))
        self._work.add(calls, self._state.values)

    def remove_node(self, node_id: str) -> None:
        """Remove a node that has ended; safe to repeat."""
        self.live_nodes.pop(node_id, None)
        self._new_nodes.pop(node_id, None)
        self._sizes.pop(node_id, None)
        self._work.remove(node_id)

    def recompute(self) -> None:
        """Compute the priorities of all live nodes."""
        slot_graph = SlotGraph.of(self._state.graph, self.live_nodes)
        self._performance = get_perf_objective(self._state.graph, slot_graph)
        self._latest_starts = self._compute_latest_starts(slot_graph)
        self._remaining_steps = None
        if not self._state.is_open:
            if self._length_s is None:
                self._length_s = self._compute_length_s(slot_graph)
            if self._state.num_open_calls > 1:
                self._remaining_steps = self._compute_remaining_steps(slot_graph)
        self._new_nodes.clear()

    def update(self) -> bool:
        """Compute the priorities of new nodes.

        In a large graph, a few new nodes are computed by themselves, and in a very large graph all
        new nodes: updating the others can wait, and the event loop cannot.

        Returns: whether the priorities of all nodes were recomputed.
        """
        num_live = len(self.live_nodes)
        has_few_new = len(self._new_nodes) * 10 < num_live
        is_very_large = num_live > MAX_NODES_AT_ONCE and bool(self._performance)
        if num_live > MAX_NODES_RECOMPUTED and (has_few_new or is_very_large):
            new = [node_id for node_id in self._new_nodes if node_id not in self._performance]
            if is_very_large:
                self._new_nodes.clear()
            if new:
                slot_graph = SlotGraph.of(self._state.graph, new)
                self._performance |= get_perf_objective(self._state.graph, slot_graph)
                self._latest_starts |= self._compute_latest_starts(slot_graph)
            return False
        if self._new_nodes:
            self.recompute()
            return True
        return False

    def performance(self, node_id: str) -> PerformanceObjective:
        """Return the performance objective of a call. All calls of a map form one task group."""
        graph = self._state.graph
        performance = self._performance[node_id]
        body = graph.body_of(node_id)
        while body is not None:
            if isinstance(graph.nodes[body.control], MapNode):
                return performance._replace(group=body.control)
            body = graph.body_of(body.control)
        return performance

    def begun(self) -> None:
        """Note that a call of the program has started."""
        self._has_begun = True

    def opens_program(self) -> bool:
        """Return whether the program has several calls and none of them has started."""
        return not self._has_begun and not self._state.is_open and self._state.num_open_calls > 1

    def num_remaining_steps(self, node_id: str) -> int:
        """Return the decode steps from the start of a call to the end of its program, at most."""
        if self._state.is_open or self._state.num_open_calls <= 1:
            return 0
        if self._remaining_steps is None:
            live = SlotGraph.of(self._state.graph, self.live_nodes)
            self._remaining_steps = self._compute_remaining_steps(live)
        return self._remaining_steps.get(node_id, 0)

    def _compute_remaining_steps(self, slot_graph: SlotGraph) -> dict[str, int]:
        steps = get_remaining(self._state.graph, self._num_steps, slot_graph=slot_graph)
        return {node: round(number) for node, number in steps.items()}

    def _num_steps(self, slot: Slot) -> float:
        """Return the steps of a slot; 0 if it is not an LLM call."""
        node = self._state.graph.nodes[slot.node]
        return self._size_of(node)[1][slot.index] if isinstance(node, GenerateNode) else 0.0

    def rank(self, node: GenerateNode, ready_at_s: float) -> Rank:
        """Return the rank of a call by the server's policy."""
        performance = self.performance(node.id)
        latest_start = self._latest_starts.get(node.id)
        # An open program counts as starting, and as long, as its latest request.
        is_open = self._state.is_open
        inputs = PriorityInputs(
            arrived_at_s=ready_at_s,
            program_started_at_s=ready_at_s if is_open else self.service.started_at_s,
            total_s=self._program_length_s(node.id),
            remaining_work_s=self._remaining_work_s(node.id),
            kind=performance.kind,
            depth=performance.depth,
            priority=node.priority,
            latest_start_s=None if latest_start is None else self._started_at_s + latest_start,
            attained_s=self.service.attained_s,
        )
        return self._scheduler.policy.rank(inputs)

    def _compute_latest_starts(self, slot_graph: SlotGraph) -> dict[str, float]:
        graph, deadline_s = self._state.graph, self._state.options.deadline_s
        if deadline_s is None and not has_deadline(graph):
            return {}
        return get_latest_starts(
            graph, self.estimate_s, deadline_s=deadline_s, slot_graph=slot_graph
        )

    def _remaining_work_s(self, node_id: str) -> float:
        """Return the engine time of the program's remaining calls, or of one in an open program."""
        pace = self._scheduler.service_time
        if self._state.is_open:
            return self._work.call_seconds(node_id, pace)
        return self._work.seconds(pace)

    def _program_length_s(self, node_id: str) -> float:
        """Return the duration of the program without others, computed with its first call.

        An open program is as long as its call `node_id`.
        """
        if self._state.is_open:
            return self._compute_length_s(SlotGraph.of(self._state.graph, [node_id]))
        if self._length_s is None:
            live = SlotGraph.of(self._state.graph, self.live_nodes)
            self._length_s = self._compute_length_s(live)
        return self._length_s

    def _compute_length_s(self, slot_graph: SlotGraph) -> float:
        remaining = get_remaining(self._state.graph, self.estimate_s, slot_graph=slot_graph)
        return max(remaining.values(), default=0.0)

    def estimate_s(self, slot: Slot) -> float:
        """Estimate the duration of a slot; 0 if it is not an LLM call."""
        node = self._state.graph.nodes[slot.node]
        if not isinstance(node, GenerateNode):
            return 0.0
        num_prompt, outputs = self._size_of(node)
        return self._scheduler.service_time.estimate_s(num_prompt, outputs[slot.index])

    def _size_of(self, node: GenerateNode) -> tuple[int, list[int]]:
        """Return the estimated tokens of a call's prompt and of each of its outputs."""
        known = self._sizes.get(node.id)
        if known is None:
            outputs = [length for _, length in output_lengths(node)]
            per_char = self._scheduler.service_time.tokens_per_char
            known = self._sizes[node.id] = (round(num_static_chars(node) * per_char), outputs)
        return known


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
