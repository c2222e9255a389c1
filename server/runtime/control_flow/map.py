"""Executes `map`: adds the items as the call quota allows, and collects their results.

The width is published before any item is added. Items without LLM calls are added over several
turns of the event loop, items with LLM calls as the call quota admits them.

Invariants: results are in the order of the items. A map ends after all of its items.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass

from ...program.errors import ConureError, RunError
from ...program.expressions.budget import WorkBudget
from ...program.expressions.evaluate import evaluate, input_expression
from ...program.graph.instances import read_by
from ...program.graph.objectives import is_background
from ...program.ir import Expression, Json, MapNode
from ...program.nodes.bodies import BodyRef, count_calls
from ...program.nodes.control.base import ENTER, OUTPUT
from ...program.status import Problem
from ..node_context import NodeContext, NodeExecutor, prefix_with_node
from ..node_state import Expansion, Ready
from ..persistence.journaled_events import ExpansionHistory
from ..program_state import ProgramState
from .bodies import (
    bound_names,
    end_body,
    evaluate_items,
    missing_reference,
    num_instances,
    publish_decision,
    start_instances,
    template_of,
)

NODES_AT_ONCE = 128
"""Nodes that a map adds in one turn of the event loop."""
STEPS_PER_INSTANCE = 40
"""Steps of a turn that adding one node costs."""
STEPS_PER_RESULT = 12
"""Steps of a turn that the results of one item cost at least."""


@dataclass(slots=True, eq=False)
class PendingMap:
    """A map with items that are not added yet. Waits in the call quota (`QuotaWaiter`)."""

    node: MapNode
    width: int
    num_added: int
    num_calls: int
    """LLM calls per item."""
    size: int
    """Nodes per item, before it expands itself."""
    executor: MapExecutor

    @property
    def num_waiting_calls(self) -> int:
        """LLM calls of the items that are not added yet."""
        return (self.width - self.num_added) * self.num_calls

    @property
    def is_background(self) -> bool:
        """Whether no reader waits for the program."""
        return is_background(self.executor.state.graph.objectives)

    @property
    def is_gone(self) -> bool:
        """Whether no more items need to be added."""
        return self.executor.is_over(self.node.id) or self.num_added == self.width

    @property
    def num_nodes(self) -> int:
        """Nodes of the items that are not added yet."""
        return (self.width - self.num_added) * self.size

    def admit(self, num_items: int) -> bool:
        """Add up to `num_items` items, within one turn; return whether items remain."""
        if not self.is_gone:
            at_once = max(1, NODES_AT_ONCE // self.size)
            stop = self.num_added + min(num_items, at_once)
            self.executor.add_items(self, min(self.width, stop))
        return not self.is_gone


class MapExecutor(NodeExecutor[MapNode]):
    """The `map` nodes of one program."""

    kind = MapNode

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._pending: dict[str, PendingMap] = {}

    def run(self, node: MapNode, slot: int) -> None:
        """Decide the width, or publish the results.

        Raises:
            RunError: `map.not_a_list`, `map.too_wide`, or the failure of an item.
            ProgramError: `program.too_large`, before any item runs.
        """
        if slot == ENTER:
            self._enter(node)
        else:
            self._publish_results(node)

    def _enter(self, node: MapNode) -> None:
        items = evaluate_items(self.context, node.items, node.id)
        if len(items) > node.max_width:
            raise RunError(
                "map.too_wide",
                f"map {node.id} has {len(items)} items, its `max_width` is {node.max_width}",
            )
        num_pending = sum(pending.num_nodes for pending in self._pending.values())
        self.state.graph.check_expanded_size(
            num_pending + len(items) * _item_size(self.state, node)
        )
        publish_decision(self.context, node, items)
        self._add_remaining(node, 0)

    def resume(self) -> None:
        """Add the remaining items of maps that a restart interrupted."""
        for node_state in list(self.state.nodes.values()):
            node = node_state.node
            if not isinstance(node, MapNode) or node.id in self._pending or node_state.has_ended:
                continue  # a map in `_pending` has entered after the restart
            if node.decision_variable in self.state.values:
                num_added = _num_items(self.state, node)
                if num_added < _width(self.state, node):
                    self._add_remaining(node, num_added)

    def _add_remaining(self, node: MapNode, num_added: int) -> None:
        num_calls = count_calls(node.body)
        width, size = _width(self.state, node), _item_size(self.state, node)
        pending = PendingMap(node, width, num_added, num_calls, size, self)
        self._pending[node.id] = pending
        if num_added == width:
            self.add_items(pending, width)
        elif num_calls == 0:
            self._add_in_batches(pending)
        else:
            self.context.services.call_quota.request(pending)
            self._add_guaranteed_item(pending)

    def _add_in_batches(self, pending: PendingMap) -> None:
        if pending.admit(pending.width):
            turns = self.context.services.turns
            self.context.outbox.wait_turn(turns, lambda: self._add_in_batches(pending))

    def _add_guaranteed_item(self, pending: PendingMap) -> None:
        """Add an item if none is live, regardless of the quota.

        Otherwise the calls that fill the quota could wait for this map, and deadlock.
        """
        if not self.state.readiness.num_live_in(pending.node.id):
            pending.admit(1)

    def is_over(self, node_id: str) -> bool:
        """Whether a map or its program has ended."""
        return self.context.is_over or self.state.nodes[node_id].has_ended

    def add_items(self, pending: PendingMap, stop: int) -> None:
        """Add the items up to `stop`. The last one completes the map's first slot."""
        node, start = pending.node, pending.num_added
        pending.num_added = stop
        if stop > start:
            try:
                expansion = _add_items(self.state, node, start, stop)
            except ConureError as error:
                self.context.fail(node.id, error)
                return
            self.context.services.turns.spend(len(expansion.nodes) * STEPS_PER_INSTANCE)
            start_instances(self.context, node.id, expansion)
        if stop == pending.width:
            self._pending.pop(node.id, None)
            self.context.complete_slot(node.id, ENTER, [])

    def node_ended(self, node_id: str) -> None:
        """Add the next item of a map whose last live node has ended."""
        self._pending.pop(node_id, None)
        body = self.state.graph.body_of(node_id)
        pending = None if body is None else self._pending.get(body.control)
        if pending is None or not pending.num_calls:
            return
        if not self.state.readiness.num_live_in(pending.node.id):
            asyncio.get_running_loop().call_soon(self._add_guaranteed_item, pending)

    def child_failed(self, node: MapNode, body: BodyRef, problem: Problem) -> list[Ready]:
        """End the item; under `fail: any`, fail the map."""
        if node.fail == "all":
            return end_body(self.context, body, "killed", problem)
        return super().child_failed(node, body, problem)

    # --- results --------------------------------------------------------------------------

    def _publish_results(self, node: MapNode) -> None:
        work = self.context.work
        results = work.run_in_turns(lambda: self._results(node))
        if isinstance(results, Problem):
            self.context.fail_with(node.id, results)
            return
        for values in results.values():
            work.evaluate({"lit": values})  # checks the size
        ready: list[Ready] = []
        for name, values in results.items():
            ready += self.context.publish(name, values, node.id)
        self.context.complete_slot(node.id, OUTPUT, ready)

    def _results(self, node: MapNode) -> Generator[int, None, dict[str, list[Json]] | Problem]:
        """Return the results of all items, or the failure of one; yields steps."""
        width = _width(self.state, node)
        budget = WorkBudget()
        results: dict[str, list[Json]] = {name: [] for name in node.collect}
        failures: list[Problem] = []
        for index in range(width):
            references = _item_outputs(self.state, node, index)
            problem = self._item_failure(node, index, references)
            if problem is not None:
                if node.fail == "any":
                    return problem
                failures.append(problem)
            for name, reference in references.items():
                value = None if problem else self._value_or_null(reference, budget)
                results[name].append(value)
            steps = budget.left
            budget = WorkBudget()
            yield STEPS_PER_RESULT + budget.left - steps
        if failures and len(failures) == width:
            return failures[0]
        return results

    def _item_failure(
        self, node: MapNode, index: int, references: dict[str, Expression]
    ) -> Problem | None:
        """Return why an item failed; None if it did not."""
        for node_id in self.state.graph.body_nodes(node.id).get(str(index), ()):
            node_state = self.state.nodes[node_id]
            if node_state.phase == "failed" and not self.state.isolates(node_id):
                return prefix_with_node(node_state.problem, node_id)
        for reference in references.values():
            missing = missing_reference(self.state, reference)
            if missing is not None and missing.phase == "failed":
                return missing.problem
        return None

    def _value_or_null(self, reference: Expression, budget: WorkBudget) -> Json:
        """Return the result of an item, a name or an element; null if it was skipped or killed."""
        if missing_reference(self.state, reference) is not None:
            return None
        return evaluate(reference, self.state.values, budget=budget)

    # --- recovery -------------------------------------------------------------------------

    @classmethod
    def replay(cls, state: ProgramState, node: MapNode, history: ExpansionHistory) -> None:
        """Add the items that were in the graph; `resume` adds the others."""
        if node.decision_variable not in state.values:
            return
        _add_items(state, node, 0, history.num_added[node.id] // _item_size(state, node))
        if _num_items(state, node) < _width(state, node):
            state.mark_started(node.id, ENTER)

    @classmethod
    def is_slot_complete(cls, state: ProgramState, node: MapNode, slot: int) -> bool:
        """Whether all items are added, for the first slot."""
        return slot != ENTER or _num_items(state, node) == _width(state, node)


def _width(state: ProgramState, node: MapNode) -> int:
    width = num_instances(state, node)
    assert width is not None
    return width


def _num_items(state: ProgramState, node: MapNode) -> int:
    """Return the number of items in the graph; all of them if an item has no nodes."""
    num_items = len(state.graph.body_nodes(node.id))
    return num_items if template_of(state, node).num_nodes else _width(state, node)


def _item_size(state: ProgramState, node: MapNode) -> int:
    """Return the number of nodes of an item, before it expands itself; at least 1."""
    return max(1, template_of(state, node).num_nodes)


def _add_items(state: ProgramState, node: MapNode, start: int, stop: int) -> Expansion:
    template = template_of(state, node)
    instances = [
        instance
        for index in range(start, stop)
        for instance in template.instantiate(str(index), f".{index}", bound_names(node, index))
    ]
    expansion = state.grow(instances)
    if start == 0 and stop > 0:
        # Variables from outside are the same for all items. Those of the items end with them.
        references = _item_outputs(state, node, 0)
        names = {name for each in references.values() for name in read_by(each)}
        written = {name for _, slots, _ in instances for slot in slots for name in slot.writes}
        state.readiness.add_reads(node.id, OUTPUT, names - written)
    return expansion


def _item_outputs(state: ProgramState, node: MapNode, index: int) -> dict[str, Expression]:
    """Return what to evaluate for each output of an item."""
    renaming = template_of(state, node).renaming_of(f".{index}", bound_names(node, index))
    return {
        outer: input_expression(renaming.reference(inner)) for outer, inner in node.collect.items()
    }
