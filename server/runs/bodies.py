"""What grows out of the nodes with bodies: items, rounds, attempts; and which gates open.

A part of the state machine of a program: plain steps without I/O, each a function of the
decision that stands in a value, so that a program that is read back from the journal grows
again as it had grown. Who takes decisions is `flow`'s business.

Kept true: what a decision leads to is appended once; the same decisions give the same graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ..program.control import (
    ENTER,
    GIVE,
    Place,
    caught,
    count_calls,
    decision,
    handler_part,
    source,
)
from ..program.expression import input_expression
from ..program.instances import (
    Instance,
    Renaming,
    Template,
    end_of_round,
    item_expression,
    read_by,
)
from ..program.ir import Expression, If, Json, Loop, Map, Round, Try
from ..store.journal import EventRecord
from .execution import Execution, Ready


class Grown(NamedTuple):
    """What came into the graph, and what may start now."""

    nodes: tuple[str, ...]
    ready: list[Ready]


class Bodies:
    """The bodies of one program."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._templates: dict[str, Template] = {}

    def _template(self, node: Map | Loop | Try) -> Template:
        if node.id not in self._templates:
            self._templates[node.id] = Template(node.id, node.body)
        return self._templates[node.id]

    # --- map ------------------------------------------------------------------------------

    def has_begun(self, node: Map) -> bool:
        """Whether its list was there, and its width was written down."""
        return decision(node) in self._execution.values

    def width(self, node: Map) -> int:
        """Items of a map."""
        width = self._chosen(node)
        assert width is not None
        return width

    def _chosen(self, node: Map | Loop) -> int | None:
        chosen = decision(node)
        assert chosen is not None
        value: Json = self._execution.values[chosen]
        return len(value) if isinstance(value, list) else value

    def num_items(self, node: Map) -> int:
        """Items that have come; they are all there at once if nothing stands in them."""
        num_items = len(self._execution.graph.parts(node.id))
        return num_items if self._template(node).num_nodes else self.width(node)

    def item_size(self, node: Map) -> int:
        """Nodes of one item, at first."""
        return max(1, self._template(node).num_nodes)

    def item_calls(self, node: Map) -> int:
        """LLM calls that an item may have open: those of its body, however deep."""
        return count_calls(node.body)

    def add_items(self, node: Map, start: int, stop: int) -> Grown:
        """Append the items from `start` to `stop`; the map will wait for them.

        Raises:
            ProgramError: `program.too_large`.
        """
        template = self._template(node)
        instances = [
            instance
            for index in range(start, stop)
            for instance in template.instantiate(str(index), f".{index}", bound_in(node, index))
        ]
        grown = Grown(*self._execution.grow(instances))
        if start == 0 and stop > 0:
            # Names from around the body are the same for all items; others end with the items.
            names = {name for each in self.collected(node, 0).values() for name in read_by(each)}
            made = {name for _, slots, _ in instances for slot in slots for name in slot.writes}
            self._execution.read(node.id, GIVE, names - made)
        return grown

    def collected(self, node: Map, index: int) -> dict[str, Expression]:
        """What an item gives: for every variable outside, what to evaluate."""
        renaming = self._template(node).rename(f".{index}", bound_in(node, index))
        return {
            outer: input_expression(renaming.reference(inner))
            for outer, inner in node.collect.items()
        }

    # --- loop -----------------------------------------------------------------------------

    def num_planned(self, node: Loop) -> int | None:
        """Rounds of a loop; None: only `until` ends it."""
        return self._chosen(node)

    def add_round(self, node: Loop, index: int) -> Grown:
        """Append a round.

        Raises:
            ProgramError: `program.too_large`.
        """
        renaming = self._renaming(node, index)
        end = end_of_round(
            node,
            index,
            renaming,
            [renaming.name(node_id) for node_id in self._template(node).node_ids],
            is_last=self._is_last(node, index),
        )
        return Grown(*self._execution.grow([*self._round(node, index), end]))

    def next_round(self, node: Loop, index: int) -> list[Instance]:
        """What round `index` will consist of, if the round before it is not the last."""
        is_over = self._is_last(node, index - 1) or index >= node.max_iter
        return [] if is_over else self._round(node, index)

    def _round(self, node: Loop, index: int) -> list[Instance]:
        return self._template(node).instantiate(str(index), f".{index}", self._carried(node, index))

    def _renaming(self, node: Loop, index: int) -> Renaming:
        return self._template(node).rename(f".{index}", self._carried(node, index))

    def _carried(self, node: Loop, index: int) -> dict[str, Expression]:
        """What the names of item, index and carried variables are in a round."""
        carried = {name: {"var": f"{name}.{index}"} for name in node.carry}
        return bound_in(node, index) | carried

    def _is_last(self, node: Loop, index: int) -> bool:
        width = self.num_planned(node)
        return width is not None and index + 1 >= width

    def num_rounds(self, node: Loop) -> int:
        """Rounds that have begun."""
        return len(self._execution.graph.parts(node.id))

    # --- if -------------------------------------------------------------------------------

    def take_branch(self, node: If) -> list[Ready]:
        """Open the part that was chosen, and read what leaves it."""
        part = self.taken(node)
        names = {name for side in self.merged(node).values() for name in read_by(side)}
        self._execution.read(node.id, GIVE, names)
        return self._execution.open(Place(node.id, part))

    def taken(self, node: If) -> str:
        """The part that was chosen."""
        part: str = self._execution.values[f"{node.id}.taken"]
        return part

    # --- try ------------------------------------------------------------------------------

    def begin_try(self, node: Try) -> list[Ready]:
        """Open the body."""
        return self._execution.open(Place(node.id, "body"))

    def add_attempt(self, node: Try, number: int) -> Grown:
        """Append the body once more.

        Raises:
            ProgramError: `program.too_large`.
        """
        part = self._attempt(node, number)
        instances = self._template(node).instantiate(part, f".{part}", {})
        return Grown(*self._execution.grow(instances))

    def _attempt(self, node: Try, number: int) -> str:
        """What an attempt after the first is called: `r1`, in a `try` inside of a `try` `rr1`.

        Else the second attempt of the inner one and the inner one's first in the second attempt
        of the outer one would have the same names.
        """
        depth = 1
        place = self._execution.graph.place(node.id)
        while place is not None:
            depth += isinstance(self._execution.graph.nodes[place.control], Try)
            place = self._execution.graph.place(place.control)
        return "r" * depth + str(number)

    def begin_handler(self, node: Try) -> list[Ready]:
        """Open the handler that was chosen."""
        return self._execution.open(Place(node.id, self.attempted(node)))

    def attempted(self, node: Try) -> str:
        """The part of a `try` that runs, or ran last."""
        handler: int | None = self._execution.values.get(caught(node))
        if handler is not None:
            return handler_part(handler)
        num_retries = self._execution.nodes[node.id].num_retries
        return self._attempt(node, num_retries) if num_retries else "body"

    def merged(self, node: If | Try) -> dict[str, Expression]:
        """What leaves the part that ran: for every variable outside, a reference."""
        if isinstance(node, If):
            side = int(self.taken(node) == "else")
            return {name: sides[side] for name, sides in node.merge.items()}
        handler: int | None = self._execution.values.get(caught(node))
        if handler is not None:
            return {name: sides[handler + 1] for name, sides in node.merge.items()}
        part = self.attempted(node)
        if part == "body":
            return {name: sides[0] for name, sides in node.merge.items()}
        renaming = self._template(node).rename(f".{part}", {})
        return {name: renaming.reference(sides[0]) for name, sides in node.merge.items()}


def regrow(execution: Execution, events: Iterable[EventRecord]) -> None:
    """Let a program grow as it had grown, by the decisions that stand, after a restart."""
    retries: Counter[str] = Counter()
    came: Counter[str] = Counter()
    for event in events:
        if event.type == "node.restarted" and b'"retry"' in event.data:
            retries[msgspec.json.decode(event.data)["node"]] += 1
        elif event.type == "nodes.appended" and b'"node"' in event.data:
            data = msgspec.json.decode(event.data)
            came[data["node"]] += len(data["nodes"])
    bodies = Bodies(execution)
    fresh = list(execution.nodes)
    while fresh:
        known = len(execution.nodes)
        for node_id in fresh:
            _regrow_node(bodies, execution, node_id, retries, came)
        fresh = list(execution.nodes)[known:]


def _regrow_node(
    bodies: Bodies,
    execution: Execution,
    node_id: str,
    retries: Mapping[str, int],
    came: Mapping[str, int],
) -> None:
    node = execution.graph.nodes[node_id]
    values = execution.values
    match node:
        case Map() if bodies.has_begun(node):
            # The others come when the program goes on.
            bodies.add_items(node, 0, came[node_id] // bodies.item_size(node))
            if bodies.num_items(node) < bodies.width(node):
                execution.begun(node_id, ENTER)
        case If() if decision(node) in values:
            bodies.take_branch(node)
        case Loop() if decision(node) in values and bodies.num_planned(node) != 0:
            bodies.add_round(node, 0)
            execution.begun(node_id, ENTER)
        case Round() if values.get(node.more):
            place = execution.graph.place(node_id)
            assert place is not None
            loop = execution.graph.nodes[place.control]
            assert isinstance(loop, Loop)
            bodies.add_round(loop, int(place.part) + 1)
        case Try():
            for number in range(1, min(retries[node_id], node.retries) + 1):
                bodies.add_attempt(node, number)
            if values.get(caught(node)) is not None:
                bodies.begin_handler(node)
        case _:
            pass


def is_slot_over(execution: Execution, node_id: str, slot: int) -> bool:
    """Whether a slot that has written everything is over: a loop goes on after its first words, and
    a map until all its items are there.
    """
    node = execution.graph.nodes[node_id]
    if not isinstance(node, Map | Loop) or slot != ENTER:
        return True
    bodies = Bodies(execution)
    if isinstance(node, Map):
        return bodies.num_items(node) == bodies.width(node)
    last = bodies.num_rounds(node) - 1
    return last < 0 or execution.values.get(f"{node_id}.{last}.more") is False


def bound_in(node: Map | Loop, index: int) -> dict[str, Expression]:
    """What item and index are called in a body, and what they are in one instance."""
    bound: dict[str, Expression] = {}
    if isinstance(node.item, str):
        bound[node.item] = item_expression(source(node), index)
    if isinstance(node.index, str):
        bound[node.index] = index
    return bound
