"""`map` at work: items come into the graph as there is room, and their results are one list.

Takes the width once, writes it down, and appends the items in several turns of the loop, for
the sake of other programs, and those with LLM calls as the server has room for them.

Kept true: results stand in the order of the items; a map ends after all its items.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

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


@dataclass(slots=True, eq=False)
class Coming:
    """A map whose items are coming in. A guest in the server's room."""

    node: Map
    width: int
    start: int
    """Items that have come."""
    num_calls: int
    """LLM calls of an item."""
    size: int
    """Nodes of an item, at first."""
    host: Maps

    @property
    def is_gone(self) -> bool:
        """Whether the others need not come any more."""
        return self.host.is_over(self.node.id) or self.start == self.width

    @property
    def num_nodes(self) -> int:
        """Nodes that have not come yet."""
        return (self.width - self.start) * self.size

    def admit(self, num_items: int) -> bool:
        """Let so many items come, or as many as fit into one turn; returns whether more want to."""
        if not self.is_gone:
            at_once = max(1, NODES_AT_ONCE // self.size)
            self.host.add(self, min(self.width, self.start + min(num_items, at_once)))
        return not self.is_gone


class Maps:
    """The maps of one program."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._execution = ground.execution
        self._host = ground.host
        self._bodies = ground.bodies
        self._coming: dict[str, Coming] = {}

    def enter(self, node: Map) -> None:
        """The list is there: take its length, and let the items come.

        Raises:
            RunError: `map.not_a_list`, `map.too_wide`.
            ProgramError: `program.too_large`, before anything of it runs.
        """
        items = self._ground.list_of(node.items, node.id)
        if len(items) > node.max_width:
            raise RunError(
                "map.too_wide",
                f"map {node.id} has {len(items)} items, its `max_width` is {node.max_width}",
            )
        promised = sum(coming.num_nodes for coming in self._coming.values())
        self._execution.graph.check_growth(promised + len(items) * self._bodies.item_size(node))
        self._ground.decide(node, items)
        self._come(node, 0)

    def go_on(self) -> None:
        """After a restart: maps that had not all of their items get the others."""
        for state in list(self._execution.nodes.values()):
            node = state.node
            if node.id in self._coming:
                continue  # it entered just now, and not before the restart
            if isinstance(node, Map) and not state.has_ended and self._bodies.has_begun(node):
                start = self._bodies.num_items(node)
                if start < self._bodies.width(node):
                    self._come(node, start)

    def _come(self, node: Map, start: int) -> None:
        """Let the items from `start` on come: a few hundred nodes in a turn, those with LLM calls
        as the server has room for them.
        """
        num_calls = self._bodies.item_calls(node)
        size = self._bodies.item_size(node)
        coming = Coming(node, self._bodies.width(node), start, num_calls, size, self)
        self._coming[node.id] = coming
        if start == coming.width:
            self.add(coming, start)
        elif num_calls == 0:
            self._come_by_turns(coming)
        else:
            self._host.ask_room(coming)
            self._come_by_right(coming)

    def _come_by_turns(self, coming: Coming) -> None:
        if coming.admit(coming.width):
            asyncio.get_running_loop().call_soon(self._come_by_turns, coming)

    def _come_by_right(self, coming: Coming) -> None:
        """One item may always be open: what the calls of others wait for might be this very map."""
        if not self._num_open(coming):
            coming.admit(1)

    def _num_open(self, coming: Coming) -> int:
        return self._execution.num_open_in(coming.node.id)

    def is_over(self, node_id: str) -> bool:
        """Whether a map has ended, or its program."""
        return self._host.is_over or self._execution.nodes[node_id].has_ended

    def add(self, coming: Coming, stop: int) -> None:
        """Append items up to `stop`; after the last one, the map has done its part."""
        node, start = coming.node, coming.start
        coming.start = stop
        if stop > start:
            try:
                grown = self._bodies.add_items(node, start, stop)
            except ConureError as error:
                self._host.fail(node.id, error)
                return
            self._ground.take_in(node.id, grown)
        if stop == coming.width:
            self._coming.pop(node.id, None)
            self._host.slot_over(node.id, ENTER, [])

    def ended(self, node_id: str) -> None:
        """A node has ended: was it the last that a map had open whose items wait?"""
        self._coming.pop(node_id, None)
        place = self._execution.graph.place(node_id)
        coming = None if place is None else self._coming.get(place.control)
        if coming is not None and coming.num_calls and not self._num_open(coming):
            asyncio.get_running_loop().call_soon(self._come_by_right, coming)

    def give(self, node: Map) -> None:
        """All items have ended: list what they give, in order."""
        width = self._bodies.width(node)
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
