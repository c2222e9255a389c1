"""What dies when variables or jobs are killed.

Pure: from a program's state to the nodes that end. A variable dies with the node that would
write it. Where that is a computation, it goes back to what the computation reads, and on to the
call behind that, unless somebody else still needs it.

Kept true: nothing that has ended is touched; nobody who is not killed loses something that he
still waits for, except what was named.
"""

from __future__ import annotations

from ..program.ir import Expr, Kill
from .execution import Execution


class Doom:
    """The nodes that a kill ends, as they are found."""

    def __init__(self, execution: Execution, node: Kill) -> None:
        self._execution = execution
        self._node = node
        self.nodes: dict[str, None] = {}
        """To be ended now, in this order."""
        self.later: dict[str, int] = {}
        """Growing prompts whose earlier outputs are still needed: to be ended before this slot."""
        for target in node.targets:
            if target in execution.graph.variables:
                self._add_variable(target)
            else:
                self._add_job(target)

    def _add_job(self, job: str) -> None:
        around = set(self._around(self._node.id))
        for node_id, state in self._execution.nodes.items():
            is_own = node_id == self._node.id or node_id in around
            if not is_own and not state.has_ended and self._is_in_job(node_id, job):
                self.nodes[node_id] = None

    def _is_in_job(self, node_id: str, job: str) -> bool:
        """Whether a node, or one around it, belongs to a job."""
        nodes = self._execution.graph.nodes
        return any(
            self._execution.is_within(nodes[each].job, job)
            for each in (node_id, *self._around(node_id))
        )

    def _around(self, node_id: str) -> list[str]:
        found = []
        place = self._execution.graph.place(node_id)
        while place is not None:
            found.append(place.control)
            place = self._execution.graph.place(place.control)
        return found

    def _add_variable(self, variable: str) -> None:
        stack = [variable]
        while stack:
            name = stack.pop()
            producer = self._execution.graph.get_producer(name)
            if producer is None or self._execution.is_resolved(name):
                continue
            node_id = producer.node
            if node_id in self.nodes or self._execution.nodes[node_id].has_ended:
                continue
            if self._is_needed_before(node_id, producer.index):
                self.later[node_id] = min(self.later.get(node_id, producer.index), producer.index)
                continue
            self.nodes[node_id] = None
            node = self._execution.graph.nodes[node_id]
            if isinstance(node, Expr):
                reads = self._execution.graph.slots[node_id][0].reads
                stack += [read for read in sorted(reads) if not self._is_needed(read)]

    def _is_needed_before(self, node_id: str, slot: int) -> bool:
        """Whether somebody waits for what the node writes before this slot."""
        earlier = self._execution.graph.slots[node_id][:slot]
        return any(
            not self._execution.is_resolved(name) and self._is_needed(name)
            for each in earlier
            for name in each.writes
        )

    def _is_needed(self, variable: str) -> bool:
        """Whether anybody but the killed still reads it, or may come to."""
        graph = self._execution.graph
        if variable in graph.outputs:
            return True
        readers = (*graph.get_consumers(variable), *graph.get_seers(variable))
        states = self._execution.nodes
        return any(
            reader.node not in self.nodes
            and not states[reader.node].has_ended
            and states[reader.node].slots_done <= reader.index
            for reader in readers
        )
