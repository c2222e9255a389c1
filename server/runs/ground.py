"""The ground that deciding nodes stand on: their program, and the steps that they have in common.

Knows how a decision is written down, how what grows out of it comes into the graph, and what
leaves a body. Refuses to know the decisions themselves.

Kept true: a decision is a value before anything follows from it.
"""

from __future__ import annotations

from typing import Protocol

from ..program.control import GIVE, Place, decision
from ..program.errors import ConureError, RunError
from ..program.expression import evaluate, input_expression
from ..program.instances import Instance, read_by
from ..program.ir import Expression, If, Json, Loop, Map, Try
from ..program.status import EventType, Phase, Problem
from ..program.value import kind_of
from .bodies import Bodies, Grown
from .execution import Absence, Execution, Ready
from .feed import Feed
from .room import Guest


class FlowHost(Protocol):
    """What deciding nodes need of their program."""

    is_over: bool
    feed: Feed

    def write(self, variable: str, value: Json, node_id: str) -> list[Ready]:
        """Give a variable its value; returns what is ready by it."""
        ...

    def lose_output(self, variable: str, absence: Absence) -> list[Ready]:
        """A variable of a node that goes on will have no value."""
        ...

    def slot_over(self, node_id: str, slot: int, ready: list[Ready]) -> None:
        """A slot has done its work; `ready` is dispatched with what follows."""
        ...

    def end_node(self, node_id: str, phase: Phase, problem: Problem) -> list[Ready]:
        """End a node and all that is in its bodies; returns what is ready by it."""
        ...

    def fail(self, node_id: str, error: ConureError) -> None:
        """A node fails."""
        ...

    def grown(self, node_id: str, nodes: tuple[str, ...]) -> None:
        """Instances came into the graph for this node."""
        ...

    def ask_room(self, guest: Guest) -> None:
        """Let items of a map come as the server has room for their calls."""
        ...

    def foresee(self, node_id: str, instances: list[Instance]) -> None:
        """What comes into the graph for this node unless it ends before."""
        ...

    def advance(self, ready: list[Ready]) -> None:
        """Dispatch slots."""
        ...

    def emit(self, event_type: EventType, node: str | None = None, **data: Json) -> None:
        """Write an event."""
        ...


class Ground:
    """One program, as its deciding nodes see it."""

    def __init__(self, execution: Execution, host: FlowHost, bodies: Bodies) -> None:
        self.execution = execution
        self.host = host
        self.bodies = bodies

    def list_of(self, expression: Expression, node_id: str) -> list[Json]:
        """The items of a map or loop.

        Raises:
            RunError: `map.not_a_list` if they are none.
        """
        items = evaluate(input_expression(expression), self.execution.values)
        if not isinstance(items, list):
            raise RunError(
                "map.not_a_list", f"the items of {node_id} are no list but {kind_of(items)}"
            )
        return items

    def decide(self, node: Map | Loop, value: Json) -> list[Ready]:
        """Write down what the node was entered with; a list that is a variable by its length."""
        chosen = decision(node)
        assert chosen is not None
        if isinstance(value, list) and not chosen.endswith(".items"):
            value = len(value)
        return self.host.write(chosen, value, node.id)

    def take_in(self, node_id: str, grown: Grown) -> None:
        """What came into the graph for a node may start."""
        self.host.grown(node_id, grown.nodes)
        self.host.advance(grown.ready)

    def absence_of(self, reference: Expression) -> Absence | None:
        """Why a reference has no value; None if it has one."""
        return self.execution.absence_among(read_by(reference))

    def end_part(self, place: Place, phase: Phase, problem: Problem) -> list[Ready]:
        """End all that is in a part of a node; returns what is ready by it."""
        nodes = list(self.execution.graph.parts(place.control).get(place.part, ()))
        return [each for node_id in nodes for each in self.host.end_node(node_id, phase, problem)]

    def give(self, node: If | Try) -> None:
        """Commit what leaves the part that ran; what is absent there is absent outside."""
        ready: list[Ready] = []
        for name, reference in self.bodies.merged(node).items():
            absence = self.absence_of(reference)
            if absence is None:
                value = evaluate(input_expression(reference), self.execution.values)
                ready += self.host.write(name, value, node.id)
            else:
                phase: Phase = "failed" if absence.phase == "failed" else "skipped"
                ready += self.host.lose_output(name, Absence(phase, absence.problem))
        self.host.slot_over(node.id, GIVE, ready)


def named(problem: Problem | None, node_id: str) -> Problem:
    """A failure with the name of the node that it came from, where it goes on."""
    assert problem is not None
    if node_id in problem.message:
        return problem
    return Problem(code=problem.code, message=f"{node_id}: {problem.message}")


def as_error(problem: Problem) -> RunError:
    """A failure, to be raised again."""
    return RunError(problem.code, problem.message)
