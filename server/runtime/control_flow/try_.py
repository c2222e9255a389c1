"""Executes `try`: the body, retries of the body, and the handler of its failure.

Invariants: after a failure, every node of the failed body ends. At most one handler runs; if the
handler fails, the node fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...program.errors import ConureError
from ...program.graph.graph import bodies_around
from ...program.graph.instances import read_by
from ...program.ir import Expression, TryNode
from ...program.nodes.bodies import BodyRef
from ...program.nodes.control.base import ENTER, OUTPUT
from ...program.nodes.control.try_ import handler_part
from ...program.status import Problem
from ..node_context import NodeExecutor, prefix_with_node
from ..node_state import Expansion, MissingValue, NodeState, Ready
from ..persistence.journaled_events import ExpansionHistory
from ..program_state import ProgramState
from .bodies import absent_if_resolved, end_body, publish_outputs, template_of


class TryExecutor(NodeExecutor[TryNode]):
    """The `try` nodes of one program."""

    kind = TryNode

    def run(self, node: TryNode, slot: int) -> None:
        """Enter the body, or publish the outputs of the part that ran."""
        if slot == ENTER:
            ready = self.state.enter_body(BodyRef(node.id, "body"))
            self.context.complete_slot(node.id, ENTER, ready)
        else:
            self._finish(node)

    def _finish(self, node: TryNode) -> None:
        """Publish the outputs of the part that has ended, or handle an isolated failure in it."""
        part = _current_part(self.state, node)
        for node_id in self.state.graph.body_nodes(node.id).get(part, ()):
            failure = _failure_of(self.state.nodes[node_id])
            if failure is not None:
                problem = prefix_with_node(failure, node_id)
                self.context.advance(self.child_failed(node, BodyRef(node.id, part), problem))
                return
        outputs = _outputs(self.state, node)
        names = {name for each in outputs.values() for name in read_by(each)}
        readiness = self.state.readiness
        if any(not self.state.is_resolved(name) for name in names):
            # An output comes from outside of the body and is not resolved yet.
            readiness.block(node.id, OUTPUT)
            readiness.add_reads(node.id, OUTPUT, names)
            self.context.advance(readiness.unblock(node.id, OUTPUT))
            return
        ready: list[Ready] = []
        if node.handler_variable not in self.state.values:
            ready += self.context.publish(node.handler_variable, None, node.id)
        problem = Problem(code="try.no_failure", message=f"{node.id} needed no handler")
        for index in range(len(node.handlers)):
            handler = BodyRef(node.id, handler_part(index))
            ready += end_body(self.context, handler, "skipped", problem)
        self.context.advance(ready)
        publish_outputs(self.context, node, outputs)

    def child_failed(self, node: TryNode, body: BodyRef, problem: Problem) -> list[Ready]:
        """Retry the body, run a handler, or fail the node."""
        handler = _find_handler(node, problem.code)
        node_state = self.state.nodes[node.id]
        can_retry = node_state.num_retries < node.retries
        if body.part.startswith("handlers") or not (can_retry or handler is not None):
            self.context.fail_with(node.id, problem)
            return []
        self.state.readiness.block(node.id, OUTPUT)
        ready = end_body(self.context, body, "killed", problem)
        if can_retry:
            self.context.restart_node(node_state, problem.code)
            try:
                expansion = _add_attempt(self.state, node, node_state.num_retries)
            except ConureError as error:
                self.context.fail(node.id, error)
                return ready
            self.context.attach(node.id, expansion.nodes)
            ready += expansion.ready
        else:
            try:
                ready += self.context.publish(node.handler_variable, handler, node.id)
            except ConureError as error:  # the program has used up a quota
                self.context.fail(node.id, error)
                return ready
            ready += self.state.enter_body(BodyRef(node.id, _current_part(self.state, node)))
        return ready + self.state.readiness.unblock(node.id, OUTPUT)

    @classmethod
    def replay(cls, state: ProgramState, node: TryNode, history: ExpansionHistory) -> None:
        """Add the retries of the body, and enter the handler that was chosen."""
        size = template_of(state, node).num_nodes
        num_added = history.num_added[node.id] // size if size else 0
        for number in range(1, num_added + 1):
            _add_attempt(state, node, number)
        if state.values.get(node.handler_variable) is not None:
            state.enter_body(BodyRef(node.id, _current_part(state, node)))

    @classmethod
    def absent_outputs(cls, state: ProgramState, node: TryNode) -> Mapping[str, MissingValue]:
        """Return the outputs that have no value in the part that ran last."""
        if state.nodes[node.id].phase != "done":
            return {}  # another part may run
        return absent_if_resolved(state, _outputs(state, node))


def _failure_of(node_state: NodeState) -> Problem | None:
    """Return the isolated failure of a node, or of a `wait` in it that ended its control flow."""
    if node_state.phase == "failed":
        return node_state.problem
    cut = node_state.cut
    return cut.problem if cut is not None and cut.reason == "failure" else None


def _find_handler(node: TryNode, code: str) -> int | None:
    for index, handler in enumerate(node.handlers):
        if not handler.codes or any(_handles(each, code) for each in handler.codes):
            return index
    return None


def _handles(handled: str, code: str) -> bool:
    """Whether a code of a handler is the code of a failure, or `GROUP.*` for its group."""
    return handled == code or (handled.endswith(".*") and code.startswith(handled[:-1]))


def _add_attempt(state: ProgramState, node: TryNode, number: int) -> Expansion:
    part = _attempt_part(state, node, number)
    return state.grow(template_of(state, node).instantiate(part, f".{part}", {}))


def _attempt_part(state: ProgramState, node: TryNode, number: int) -> str:
    """Return the part name of a retry: an `r` for each enclosing `try`, and its number (`rr1`).

    With one `r` at every depth, the second attempt of an inner node would have the name of its
    first attempt in the second attempt of the outer node.
    """
    around = (state.graph.nodes[body.control] for body in bodies_around(state.graph, node.id))
    depth = 1 + sum(isinstance(each, TryNode) for each in around)
    return "r" * depth + str(number)


def _current_part(state: ProgramState, node: TryNode) -> str:
    """Return the part of a `try` that runs or ran last."""
    handler: int | None = state.values.get(node.handler_variable)
    if handler is not None:
        return handler_part(handler)
    num_retries = state.nodes[node.id].num_retries
    return _attempt_part(state, node, num_retries) if num_retries else "body"


def _outputs(state: ProgramState, node: TryNode) -> dict[str, Expression]:
    """Return the references that the part that ran gives for each output."""
    handler: int | None = state.values.get(node.handler_variable)
    if handler is not None:
        return {name: sides[handler + 1] for name, sides in node.merge.items()}
    part = _current_part(state, node)
    if part == "body":
        return {name: sides[0] for name, sides in node.merge.items()}
    renaming = template_of(state, node).renaming_of(f".{part}", {})
    return {name: renaming.reference(sides[0]) for name, sides in node.merge.items()}
