"""`map` at work: items come into the graph as there is room, and their results are one list.

Takes the width once, writes it down, and appends the items in several turns of the loop, for
the sake of other programs, and no more at a time than the server has room for.

Kept true: results stand in the order of the items; a map ends after all its items.
"""

from __future__ import annotations

import asyncio

from ..program.control import ENTER, GIVE
from ..program.errors import ConureError, RunError
from ..program.expression import evaluate
from ..program.ir import Expression, Json, Map
from ..program.status import Problem
from ..program.value import check_size
from .execution import Ready
from .ground import Ground, as_error, named

NODES_AT_ONCE = 128
"""Nodes that a map appends in one turn of the loop."""


class Maps:
    """The maps of one program."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._execution = ground.execution
        self._host = ground.host
        self._bodies = ground.bodies
        self._narrowed: dict[str, tuple[Map, int]] = {}
        """Maps that found no room for their next item."""

    def enter(self, node: Map) -> None:
        """The list is there: take its length, and let the items come."""
        items = self._ground.list_of(node.items, node.id)
        if len(items) > node.max_width:
            raise RunError(
                "map.too_wide",
                f"map {node.id} has {len(items)} items, its `max_width` is {node.max_width}",
            )
        self._ground.decide(node, items)
        self._expand(node, 0)

    def _expand(self, node: Map, start: int) -> None:
        """Append items, a few hundred in a turn, and no more than there is room for: the others
        come when something of the program has ended.
        """
        if self._host.is_over or self._execution.nodes[node.id].has_ended:
            return
        width = self._bodies.width(node)
        assert width is not None
        most = max(1, NODES_AT_ONCE // self._bodies.item_size(node))
        stop = min(width, start + min(most, self._num_admitted(node)))
        if stop > start:
            try:
                grown = self._bodies.add_items(node, start, stop)
            except ConureError as error:
                self._host.fail(node.id, error)
                return
            self._ground.take_in(node.id, grown)
        if stop == width:
            self._host.slot_over(node.id, ENTER, [])
        elif stop > start:
            asyncio.get_running_loop().call_soon(self._expand, node, stop)
        else:
            self._narrowed[node.id] = (node, start)

    def _num_admitted(self, node: Map) -> int:
        """Items that may come now. One may always if none is open: what the others of the queue
        wait for might be this very map.
        """
        num_calls = self._bodies.item_calls(node)
        if not num_calls:
            return node.max_width
        nodes = self._execution.nodes
        parts = self._execution.graph.parts(node.id)
        is_open = any(
            not nodes[node_id].has_ended
            for part in reversed(list(parts))
            for node_id in parts[part]
        )
        return max(self._host.room() // num_calls, 0 if is_open else 1)

    def ended(self) -> None:
        """A node of the program has ended: there may be room for more items."""
        narrowed, self._narrowed = self._narrowed, {}
        for node, start in narrowed.values():
            asyncio.get_running_loop().call_soon(self._expand, node, start)

    def give(self, node: Map) -> None:
        """All items have ended: list what they give, in order."""
        width = self._bodies.width(node)
        assert width is not None
        lists: dict[str, list[Json]] = {name: [] for name in node.collect}
        failures: list[Problem] = []
        for index in range(width):
            given = self._bodies.collected(node, index)
            problem = self._problem_of(node, index, given)
            if problem is not None:
                if node.fail == "any":
                    raise as_error(problem)
                failures.append(problem)
            for name, expression in given.items():
                lists[name].append(None if problem else self._value_or_null(expression))
        if failures and len(failures) == width:
            raise as_error(failures[0])
        ready: list[Ready] = []
        for name, values in lists.items():
            check_size(values)
            ready += self._host.write(name, values, node.id)
        self._host.slot_over(node.id, GIVE, ready)

    def _problem_of(self, node: Map, index: int, given: dict[str, Expression]) -> Problem | None:
        """Why an item failed, None if it did not."""
        for node_id in self._execution.graph.parts(node.id).get(str(index), ()):
            state = self._execution.nodes[node_id]
            if state.phase == "failed" and not self._execution.isolates(node_id):
                return named(state.problem, node_id)
        for expression in given.values():
            absence = self._ground.absence_of(expression)
            if absence is not None and absence.phase == "failed":
                return absence.problem
        return None

    def _value_or_null(self, expression: Expression) -> Json:
        """What an item gives; what was skipped or killed in it is null."""
        if self._ground.absence_of(expression) is not None:
            return None
        return evaluate(expression, self._execution.values)
