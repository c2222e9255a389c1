"""Nodes that decide what else runs, at work: `map`, `if`, `loop`, `try`, `wait`, `kill`, `yield`.

Takes each decision once, when what it depends on is there, and writes it down as a value
before anything follows from it: a width, a branch, another round, a handler. All that follows
happens in the same turn: what is chosen starts, what is not chosen or loses dies, and the abort
of what runs is in the next frame to its engine. (Only the items of a wide map come in several
turns, for the sake of other programs.)

A failure inside of a body goes to the node around it: an item of a map with `fail: all` dies
alone, a `try` catches, all others fail themselves and hand it on.

Knows what decisions mean. Refuses to know calls, engines, clients and disks: its host is the
program.

Kept true: what a decision excludes never starts; a node with bodies ends after all that is in
them.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
from msgspec import UNSET

from ..program.control import ENTER, GIVE, Place, caught, decision, handler_part
from ..program.errors import ConureError, ExpressionError, RunError
from ..program.expression import evaluate, input_expression, variables
from ..program.instances import Instance, read_by
from ..program.ir import (
    Control,
    Expression,
    If,
    Json,
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
from ..program.status import EventType, Phase, Problem
from ..program.value import check_size, is_true, kind_of
from .bodies import Bodies, Grown
from .execution import Absence, Execution, Ready
from .feed import Feed
from .kill import Doom

NODES_AT_ONCE = 128
"""Nodes that a map appends in one turn of the loop."""
ROUNDS_AT_ONCE = 32
"""Rounds of computations alone that a loop runs in one turn."""

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

    def foresee(self, node_id: str, instances: list[Instance]) -> None:
        """What comes into the graph for this node unless it ends before."""
        ...

    def advance(self, ready: list[Ready]) -> None:
        """Dispatch slots."""
        ...

    def emit(self, event_type: EventType, node: str | None = None, **data: Json) -> None:
        """Write an event."""
        ...


class Flow:
    """The deciding nodes of one program."""

    def __init__(self, execution: Execution, host: FlowHost, bodies: Bodies) -> None:
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

    def run(self, node: Flowing, slot: int) -> None:
        """A slot of a deciding node is ready.

        Raises:
            ConureError: if the node fails.
        """
        self._execution.nodes[node.id].phase = "running"
        match node, slot:
            case ((Map() | If() | Loop() | Try()), 0):
                self._enter(node)
            case Map(), 1:
                self._give_map(node)
            case Loop(), 1:
                self._give_loop(node)
            case Try(), 1:
                self._give_try(node)
            case If(), 1:
                self._give(node)
            case Round(), _:
                self._end_round(node)
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
                self._enter_map(node)
            case If():
                self._enter_if(node)
            case Loop():
                self._enter_loop(node)
            case Try():
                self._host.slot_over(node.id, ENTER, self._bodies.begin_try(node))

    # --- map ------------------------------------------------------------------------------

    def _enter_map(self, node: Map) -> None:
        items = self._list_of(node.items, node.id)
        if len(items) > node.max_width:
            raise RunError(
                "map.too_wide",
                f"map {node.id} has {len(items)} items, its `max_width` is {node.max_width}",
            )
        self._decide(node, items)
        self._expand(node, 0)

    def _list_of(self, expression: Expression, node_id: str) -> list[Json]:
        items = evaluate(input_expression(expression), self._execution.values)
        if not isinstance(items, list):
            raise RunError(
                "map.not_a_list", f"the items of {node_id} are no list but {kind_of(items)}"
            )
        return items

    def _decide(self, node: Map | Loop, value: Json) -> list[Ready]:
        """Write down what the node was entered with; a list that is a variable by its length."""
        chosen = decision(node)
        assert chosen is not None
        if isinstance(value, list) and not chosen.endswith(".items"):
            value = len(value)
        return self._host.write(chosen, value, node.id)

    def _expand(self, node: Map, start: int) -> None:
        """Append items, a few hundred in a turn."""
        if self._host.is_over or self._execution.nodes[node.id].has_ended:
            return
        width = self._bodies.width(node)
        assert width is not None
        stop = min(width, start + max(1, NODES_AT_ONCE // self._bodies.item_size(node)))
        if stop > start:
            try:
                grown = self._bodies.add_items(node, start, stop)
            except ConureError as error:
                self._host.fail(node.id, error)
                return
            self._take_in(node.id, grown)
        if stop < width:
            asyncio.get_running_loop().call_soon(self._expand, node, stop)
        else:
            self._host.slot_over(node.id, ENTER, [])

    def _take_in(self, node_id: str, grown: Grown) -> None:
        self._host.grown(node_id, grown.nodes)
        self._host.advance(grown.ready)

    def _give_map(self, node: Map) -> None:
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
                    raise _as_error(problem)
                failures.append(problem)
            for name, expression in given.items():
                lists[name].append(None if problem else self._value_or_null(expression))
        if failures and len(failures) == width:
            raise _as_error(failures[0])
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
                return _named(state.problem, node_id)
        for expression in given.values():
            absence = self._absence_of(expression)
            if absence is not None and absence.phase == "failed":
                return absence.problem
        return None

    def _value_or_null(self, expression: Expression) -> Json:
        """What an item gives; what was skipped or killed in it is null."""
        if self._absence_of(expression) is not None:
            return None
        return evaluate(expression, self._execution.values)

    def _absence_of(self, reference: Expression) -> Absence | None:
        return self._absence_among(read_by(reference))

    def _absence_among(self, names: frozenset[str]) -> Absence | None:
        """The absence that counts most among these: a failure, if there is one."""
        found = [self._execution.absences[name] for name in sorted(names) if self._is_absent(name)]
        return next((each for each in found if each.phase == "failed"), found[0] if found else None)

    def _is_absent(self, name: str) -> bool:
        return name in self._execution.absences

    # --- if and try -----------------------------------------------------------------------

    def _enter_if(self, node: If) -> None:
        is_taken = is_true(evaluate(input_expression(node.cond), self._execution.values))
        part, other = ("then", "else") if is_taken else ("else", "then")
        ready = self._host.write(f"{node.id}.taken", part, node.id)
        ready += self._bodies.take_branch(node)
        problem = Problem(code="if.not_taken", message=f"{node.id} went the other way")
        ready += self._end_part(Place(node.id, other), "skipped", problem)
        self._host.slot_over(node.id, ENTER, ready)

    def _end_part(self, place: Place, phase: Phase, problem: Problem) -> list[Ready]:
        nodes = list(self._execution.graph.parts(place.control).get(place.part, ()))
        return [each for node_id in nodes for each in self._host.end_node(node_id, phase, problem)]

    def _give(self, node: If | Try) -> None:
        """Commit what leaves the part that ran; what is absent there is absent outside."""
        ready: list[Ready] = []
        for name, reference in self._bodies.merged(node).items():
            absence = self._absence_of(reference)
            if absence is None:
                value = evaluate(input_expression(reference), self._execution.values)
                ready += self._host.write(name, value, node.id)
            else:
                phase: Phase = "failed" if absence.phase == "failed" else "skipped"
                ready += self._host.lose_output(name, Absence(phase, absence.problem))
        self._host.slot_over(node.id, GIVE, ready)

    def _give_try(self, node: Try) -> None:
        """All of the part that ran has ended. A failure in it that was isolated counts too."""
        part = self._bodies.attempted(node)
        for node_id in self._execution.graph.parts(node.id).get(part, ()):
            state = self._execution.nodes[node_id]
            if state.phase == "failed":
                self._host.advance(self._failed_in_try(node, part, _named(state.problem, node_id)))
                return
        names = {name for each in self._bodies.merged(node).values() for name in read_by(each)}
        if any(not self._execution.is_resolved(name) for name in names):
            # Something from outside is merged, and is not there yet.
            self._execution.hold(node.id, GIVE)
            self._execution.read(node.id, GIVE, names)
            self._host.advance(self._execution.let_go(node.id, GIVE))
            return
        ready: list[Ready] = []
        if caught(node) not in self._execution.values:
            ready += self._host.write(caught(node), None, node.id)
        problem = Problem(code="try.no_failure", message=f"{node.id} needed no handler")
        for index in range(len(node.handlers)):
            ready += self._end_part(Place(node.id, handler_part(index)), "skipped", problem)
        self._host.advance(ready)
        self._give(node)

    def _failed_in_try(self, node: Try, part: str, problem: Problem) -> list[Ready]:
        """Run the body again, or a handler, or fail."""
        handler = _handler_for(node, problem.code)
        state = self._execution.nodes[node.id]
        is_handled = part.startswith("handlers")
        can_retry = state.num_retries < node.retries
        if is_handled or not (can_retry or handler is not None):
            self._host.fail(node.id, _as_error(problem))
            return []
        self._execution.hold(node.id, GIVE)
        ready = self._end_part(Place(node.id, part), "killed", problem)
        if can_retry:
            state.num_retries += 1
            state.attempt += 1
            self._host.emit(
                "node.restarted", node.id, why=problem.code, attempt=state.attempt, retry=True
            )
            try:
                grown = self._bodies.add_attempt(node, state.num_retries)
            except ConureError as error:
                self._host.fail(node.id, error)
                return []
            self._host.grown(node.id, grown.nodes)
            ready += grown.ready
        else:
            ready += self._host.write(caught(node), handler, node.id)
            ready += self._bodies.begin_handler(node)
        return ready + self._execution.let_go(node.id, GIVE)

    # --- loop -----------------------------------------------------------------------------

    def _enter_loop(self, node: Loop) -> None:
        rounds: Json = None
        if node.items is not UNSET:
            rounds = self._list_of(node.items, node.id)
        elif node.count is not UNSET:
            rounds = evaluate(node.count, self._execution.values)
            if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0:
                raise RunError("loop.count", f"{rounds!r} is no number of rounds for {node.id}")
        starts = {
            name: evaluate(init, self._execution.values) for name, (init, _) in node.carry.items()
        }
        ready = self._decide(node, rounds)
        for name, value in starts.items():
            ready += self._host.write(f"{name}.0", value, node.id)
        self._host.advance(ready)
        if self._bodies.width(node) == 0:
            self._host.slot_over(node.id, ENTER, [])
        else:
            self._add_round(node, 0)

    def _add_round(self, node: Loop, index: int) -> None:
        if self._host.is_over or self._execution.nodes[node.id].has_ended:
            return
        try:
            grown = self._bodies.add_round(node, index)
        except ConureError as error:
            self._host.fail(node.id, error)
            return
        self._host.foresee(node.id, self._bodies.next_round(node, index + 1))
        self._take_in(node.id, grown)

    def _end_round(self, node: Round) -> None:
        place = self._execution.graph.place(node.id)
        assert place is not None
        loop = self._execution.graph.nodes[place.control]
        assert isinstance(loop, Loop)
        values = {name: self._carried(node, name) for name in node.carry}
        more = not self._is_last(node)
        following = int(place.part) + 1
        if more and following >= loop.max_iter:
            raise RunError(
                "loop.exhausted",
                f"loop {loop.id} would go on after {loop.max_iter} rounds, its `max_iter`",
            )
        ready: list[Ready] = []
        for name, value in values.items():
            ready += self._host.write(name, value, node.id)
        ready += self._host.write(node.more, more, node.id)
        if not more:
            self._host.slot_over(node.id, 0, ready)
            self._host.slot_over(loop.id, ENTER, [])
            return
        if following % ROUNDS_AT_ONCE:
            self._add_round(loop, following)
        else:
            asyncio.get_running_loop().call_soon(self._add_round, loop, following)
        self._host.slot_over(node.id, 0, ready)

    def _carried(self, node: Round, name: str) -> Json:
        """What a variable is in the next round; as it was if that cannot be told."""
        absence = self._absence_among(variables(node.carry[name]))
        try:
            return evaluate(node.carry[name], self._execution.values)
        except ExpressionError as error:
            if error.code != "variable.absent" or absence is None or absence.phase == "failed":
                raise
            return self._execution.values[node.keeps[name]]

    def _is_last(self, node: Round) -> bool:
        """What `until` says; if what it reads was skipped or killed, there is another round."""
        if node.until is UNSET:
            return False
        absence = self._absence_among(variables(node.until))
        try:
            return is_true(evaluate(node.until, self._execution.values))
        except ExpressionError as error:
            if error.code != "variable.absent" or absence is None or absence.phase == "failed":
                raise
            return False

    def _give_loop(self, node: Loop) -> None:
        last = self._bodies.num_rounds(node)
        ready: list[Ready] = []
        for name in node.carry:
            value = self._execution.values[f"{name}.{last}"]
            ready += self._host.write(name, value, node.id)
        self._host.slot_over(node.id, GIVE, ready)

    # --- wait, kill, yield ----------------------------------------------------------------

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

    # --- failures -------------------------------------------------------------------------

    def failed_inside(self, place: Place, node_id: str, problem: Problem) -> list[Ready]:
        """A node in a body failed and has ended: the node around it takes it or hands it on."""
        control = self._execution.graph.nodes[place.control]
        problem = _named(problem, node_id)
        if self._execution.nodes[place.control].has_ended:
            return []
        if isinstance(control, Map) and control.fail == "all":
            return self._end_part(place, "killed", problem)
        if isinstance(control, Try):
            return self._failed_in_try(control, place.part, problem)
        self._host.fail(place.control, _as_error(problem))
        return []


def _handler_for(node: Try, code: str) -> int | None:
    for index, handler in enumerate(node.handlers):
        if not handler.codes or code in handler.codes:
            return index
    return None


def _named(problem: Problem | None, node_id: str) -> Problem:
    """A failure with the name of the node that it came from, where it goes on."""
    assert problem is not None
    if node_id in problem.message:
        return problem
    return Problem(code=problem.code, message=f"{node_id}: {problem.message}")


def _as_error(problem: Problem) -> RunError:
    return RunError(problem.code, problem.message)
