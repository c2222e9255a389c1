"""Nodes that decide what else runs, at work: `map`, `if`, `loop`, `try`, `wait`, `kill`, `yield`.

Takes each decision once, when what it depends on is there, and writes it down as a value
before anything follows from it: a width, a branch, another round, a handler. All that follows
happens in the same turn: what is chosen starts, what is not chosen or loses dies, and the abort
of what runs is in the next frame to its engine. (Only the items of a wide map come in several
turns, for the sake of other programs.)

A failure inside of a body goes to the node around it: an item of a map with `fail: all` dies
alone, a `try` catches, all others fail themselves and hand it on.

Knows what decisions mean; `maps`, `loops` and `tries` know those that take more than a few
lines. Refuses to know calls, engines, clients and disks: its host is the program.

Kept true: what a decision excludes never starts; a node with bodies ends after all that is in
them.
"""

from __future__ import annotations

import msgspec

from ..program.control import ENTER, Place
from ..program.expression import evaluate, input_expression
from ..program.ir import (
    Control,
    If,
    Kill,
    Loop,
    Map,
    Placed,
    Round,
    Try,
    Wait,
    Yield,
)
from ..program.partial import as_whole
from ..program.status import Problem
from ..program.value import is_true
from .bodies import Bodies
from .execution import Execution, Ready
from .ground import FlowHost, Ground, as_error, named
from .kill import Doom
from .loops import Loops
from .maps import Maps
from .tries import Tries

Flowing = Control | Round | Wait | Kill | Yield


def is_tolerant(node: Placed, slot: int) -> bool:
    """Whether a slot goes on when something that it reads has no value: deciding nodes see to
    that themselves once they are entered, and of the others those with a `first`; look for it
    before giving up.
    """
    match node:
        case Map() | If() | Loop() | Try() | Wait():
            return slot > 0 or _has_first(node)
        case Round():
            return True
        case _:
            return _has_first(node)


def _has_first(node: Placed) -> bool:
    return b'"first"' in msgspec.json.encode(node)


class Flow:
    """The deciding nodes of one program."""

    def __init__(self, execution: Execution, host: FlowHost, bodies: Bodies) -> None:
        self._ground = ground = Ground(execution, host, bodies)
        self._maps = Maps(ground)
        self._loops = Loops(ground)
        self._tries = Tries(ground)
        self._execution = execution
        self._host = host
        self._bodies = bodies
        self.doomed: dict[str, int] = {}
        """Calls that end before this slot, because only what comes earlier is needed."""

    def resume(self) -> None:
        """What was killed before a restart, and was left running for what comes before it, still
        ends there.
        """
        for state in self._execution.nodes.values():
            if isinstance(state.node, Kill) and state.phase == "done":
                self.doomed |= Doom(self._execution, state.node).later

    def go_on(self) -> None:
        """After a restart: items that had not come yet still come."""
        self._maps.go_on()

    def run(self, node: Flowing, slot: int) -> None:
        """A slot of a deciding node is ready.

        Raises:
            ConureError: if the node fails.
        """
        self._execution.nodes[node.id].phase = "running"
        match node, slot:
            case ((Map() | If() | Loop() | Try()), 0):
                self._enter(node)
            case ((Map() | If() | Loop() | Try()), 1):
                self._give(node)
            case Round(), _:
                self._loops.end_round(node)
            case Wait(), 1:
                self._end_wait(node)
            case Kill(), _:
                self._kill(node)
            case Yield(), _:
                self._yield(node)
            case _:  # a wait has begun, or all in a body has ended
                self._host.slot_over(node.id, slot, [])

    def _enter(self, node: Control) -> None:
        match node:
            case Map():
                self._maps.enter(node)
            case If():
                self._enter_if(node)
            case Loop():
                self._loops.enter(node)
            case Try():
                self._tries.enter(node)

    def _give(self, node: Control) -> None:
        """All in its bodies has ended."""
        match node:
            case Map():
                self._maps.give(node)
            case If():
                self._ground.give(node)
            case Loop():
                self._loops.give(node)
            case Try():
                self._tries.give(node)

    def ended(self, node_id: str) -> None:
        """A node of the program has ended: it may have been the last item that a map had open."""
        self._maps.ended(node_id)

    def _enter_if(self, node: If) -> None:
        is_taken = is_true(evaluate(input_expression(node.cond), self._execution.values))
        part, other = ("then", "else") if is_taken else ("else", "then")
        ready = self._host.write(f"{node.id}.taken", part, node.id)
        ready += self._bodies.take_branch(node)
        problem = Problem(code="if.not_taken", message=f"{node.id} went the other way")
        ready += self._ground.end_part(Place(node.id, other), "skipped", problem)
        self._host.slot_over(node.id, ENTER, ready)

    def _end_wait(self, node: Wait) -> None:
        names = set(node.variables)
        enough = {"all": len(names), "any": 1}.get(str(node.mode)) or int(node.mode)
        if sum(name in self._execution.values for name in names) >= enough:
            self._host.slot_over(node.id, 1, [])
            return
        absence = self._execution.absence_for(self._execution.graph.slots[node.id][1])
        assert absence is not None
        self._host.advance(self._host.end_node(node.id, absence.phase, absence.problem))

    def _kill(self, node: Kill) -> None:
        doom = Doom(self._execution, node)
        problem = Problem(code="node.killed", message=f"{node.id} killed it")
        self.doomed |= doom.later
        ready = [
            each
            for node_id in doom.nodes
            for each in self._host.end_node(node_id, "killed", problem)
        ]
        self._host.slot_over(node.id, 0, ready)

    def _yield(self, node: Yield) -> None:
        expression = as_whole(node.value) if node.mode == "partial" else node.value
        value = evaluate(expression, self._execution.values)
        self._host.feed.hide(node.id)
        self._host.emit("yield", node.id, value=value, mode=node.mode, final=True)
        self._host.slot_over(node.id, 0, [])

    def failed_inside(self, place: Place, node_id: str, problem: Problem) -> list[Ready]:
        """A node in a body failed and has ended: the node around it takes it or hands it on."""
        control = self._execution.graph.nodes[place.control]
        problem = named(problem, node_id)
        if self._execution.nodes[place.control].has_ended:
            return []
        if isinstance(control, Map) and control.fail == "all":
            return self._ground.end_part(place, "killed", problem)
        if isinstance(control, Try):
            return self._tries.failed_inside(control, place.part, problem)
        self._host.fail(place.control, as_error(problem))
        return []
