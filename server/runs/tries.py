"""`try` at work: a body, the body again, or the handler of what went wrong in it.

Kept true: of a body that failed nothing goes on; at most one handler runs, and its own failure
is the node's.
"""

from __future__ import annotations

from ..program.control import ENTER, GIVE, Place, caught, handler_part
from ..program.errors import ConureError
from ..program.instances import read_by
from ..program.ir import Try
from ..program.status import Problem
from .execution import Ready
from .ground import Ground, as_error, named


class Tries:
    """The tries of one program."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._execution = ground.execution
        self._host = ground.host
        self._bodies = ground.bodies

    def enter(self, node: Try) -> None:
        """Its body begins."""
        self._host.slot_over(node.id, ENTER, self._bodies.begin_try(node))

    def give(self, node: Try) -> None:
        """All of the part that ran has ended. A failure in it that was isolated counts too."""
        part = self._bodies.attempted(node)
        for node_id in self._execution.graph.parts(node.id).get(part, ()):
            state = self._execution.nodes[node_id]
            if state.phase == "failed":
                self._host.advance(self.failed_inside(node, part, named(state.problem, node_id)))
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
            ready += self._ground.end_part(Place(node.id, handler_part(index)), "skipped", problem)
        self._host.advance(ready)
        self._ground.give(node)

    def failed_inside(self, node: Try, part: str, problem: Problem) -> list[Ready]:
        """Run the body again, or a handler, or fail."""
        handler = _handler_for(node, problem.code)
        state = self._execution.nodes[node.id]
        is_handled = part.startswith("handlers")
        can_retry = state.num_retries < node.retries
        if is_handled or not (can_retry or handler is not None):
            self._host.fail(node.id, as_error(problem))
            return []
        self._execution.hold(node.id, GIVE)
        ready = self._ground.end_part(Place(node.id, part), "killed", problem)
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


def _handler_for(node: Try, code: str) -> int | None:
    for index, handler in enumerate(node.handlers):
        if not handler.codes or code in handler.codes:
            return index
    return None
