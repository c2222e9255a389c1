"""The priorities of a program's LLM calls: performance objective, critical path and rank.

Priorities are derived from the graph before anything runs, and again when nodes are added. Those
of a large program are computed in a thread before it starts (`priority_table.first_table`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from ...program.graph.graph import Slot, bodies_around
from ...program.graph.objectives import PerformanceObjective, stricter
from ...program.ir import GenerateNode, MapNode
from ...scheduling.policy import Rank
from ...scheduling.request import PriorityInputs
from ..program_state import ProgramState
from ..services import RuntimeServices
from .priority_table import CallSizes, PriorityTable, PriorityTables
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
        self._preset_nodes: frozenset[str] = frozenset()
        self._work = RemainingWork()
        self._sizes = CallSizes(services.scheduler.service_time)
        self._tables = PriorityTables(state, self._sizes)

    def preset(self, table: PriorityTable) -> None:
        """Take over the table of all nodes, before they are added."""
        self._preset_nodes = frozenset(self._state.graph.nodes)
        self._take_over(table)

    def add_nodes(self, nodes: Iterable[str]) -> None:
        """Add new nodes. Unknown priorities are computed when the next call is created."""
        added = dict.fromkeys(nodes)
        self._new_nodes |= {each: None for each in added if each not in self._preset_nodes}
        self.live_nodes.update(added)
        graph = self._state.graph
        calls = (node for each in added if isinstance(node := graph.nodes[each], GenerateNode))
        self._work.add(calls, self._state.values)

    def remove_node(self, node_id: str) -> None:
        """Remove a node that has ended; safe to repeat."""
        self.live_nodes.pop(node_id, None)
        self._new_nodes.pop(node_id, None)
        self._sizes.remove(node_id)
        self._work.remove(node_id)

    def recompute(self) -> None:
        """Compute the priorities of all live nodes."""
        self._take_over(self._tables.compute(self.live_nodes, self._length_s))
        self._new_nodes.clear()

    def _take_over(self, table: PriorityTable) -> None:
        self._performance, self._latest_starts = table.performance, table.latest_starts
        self._length_s, self._remaining_steps = table.length_s, table.remaining_steps

    def update(self) -> bool:
        """Compute the priorities of new nodes.

        In a large graph, a few new nodes are computed without an update of the other nodes. In a
        very large graph this holds for any number of new nodes, so that the event loop stays
        responsive.

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
                performance, latest_starts = self._tables.compute_performance(new)
                self._performance |= performance
                self._latest_starts |= latest_starts
                self._remaining_steps = None
            return False
        if self._new_nodes:
            self.recompute()
            return True
        return False

    def tighten(self, variable: str) -> list[str]:
        """Update the priorities after the objective of a variable became stricter.

        In a large graph, only nodes that the variable depends on are computed, and no other nodes.

        Returns: the nodes whose priorities may have changed.
        """
        if len(self.live_nodes) <= MAX_NODES_RECOMPUTED:
            self.recompute()
            return list(self.live_nodes)
        if self.update():
            return list(self.live_nodes)
        nodes = self._nodes_before(variable)
        performance, latest_starts = self._tables.compute_performance(nodes)
        for node_id, found in performance.items():
            known = self._performance.get(node_id, found)
            self._performance[node_id] = stricter(found, known)
        for node_id, start in latest_starts.items():
            self._latest_starts[node_id] = min(start, self._latest_starts.get(node_id, start))
        return nodes

    def _nodes_before(self, variable: str) -> list[str]:
        """Return the live nodes that a variable depends on, at most `MAX_NODES_AT_ONCE`.

        The nearest are first. Nodes before a call that a reader waits for already are left out,
        because they have its objective.
        """
        graph = self._state.graph
        has_deadline = variable in graph.deadlines
        producer = graph.get_producer(variable)
        waiting = deque(() if producer is None else (producer,))
        seen: set[tuple[str, int]] = set()
        nodes: dict[str, None] = {}
        while waiting and len(nodes) < MAX_NODES_AT_ONCE:
            slot = waiting.popleft()
            key = (slot.node, slot.index)
            if key in seen or slot.node not in self.live_nodes:
                continue
            seen.add(key)
            if not has_deadline and self._is_waited_for(slot.node):
                continue
            nodes[slot.node] = None
            waiting += graph.predecessors(slot)
        return list(nodes)

    def _is_waited_for(self, node_id: str) -> bool:
        """Return whether a reader waits for the only output of a call."""
        known = self._performance.get(node_id)
        is_alone = known is not None and known.kind == "latency" and known.group is None
        return is_alone and len(self._state.graph.slots[node_id]) == 1

    def performance(self, node_id: str) -> PerformanceObjective:
        """Return the performance objective of a call. All calls of a map form one task group."""
        graph = self._state.graph
        performance = self._performance[node_id]
        for body in bodies_around(graph, node_id):
            if isinstance(graph.nodes[body.control], MapNode):
                return performance._replace(group=body.control)
        return performance

    def begun(self) -> None:
        """Note that a call of the program has started."""
        self._has_begun = True

    def opens_program(self) -> bool:
        """Return whether a closed program has several calls and none of them has started."""
        return not self._has_begun and not self._state.is_open and self._state.num_open_calls > 1

    def num_remaining_steps(self, node_id: str) -> int:
        """Return an upper bound of the decode steps from a call's start to its program's end."""
        if self._state.is_open or self._state.num_open_calls <= 1:
            return 0
        if self._remaining_steps is None:
            self._remaining_steps = self._tables.compute_remaining_steps(self.live_nodes)
        return self._remaining_steps.get(node_id, 0)

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
            return self._tables.compute_length_s([node_id])
        if self._length_s is None:
            self._length_s = self._tables.compute_length_s(self.live_nodes)
        return self._length_s

    def estimate_s(self, slot: Slot) -> float:
        """Estimate the duration of a slot; 0 if it is not an LLM call."""
        return self._tables.estimate_s(slot)
