"""Operations that the executors of nodes with bodies share: templates, instances, outputs.

An expansion depends only on committed decisions: recovery repeats it (`NodeExecutor.replay`) and
gets the same graph.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...program.errors import RunError
from ...program.expressions.evaluate import input_expression
from ...program.expressions.values import kind_of
from ...program.graph.instances import BodyTemplate, item_expression, read_by
from ...program.ir import Expression, Json
from ...program.nodes.bodies import BodyRef
from ...program.nodes.control.base import OUTPUT, NodeWithBodies, TemplateNode
from ...program.status import Phase, Problem
from ..node_context import NodeContext
from ..node_state import Expansion, MissingValue, Ready
from ..program_state import ProgramState


def template_of(state: ProgramState, node: NodeWithBodies) -> BodyTemplate:
    """Return the template of a node's first body."""
    template = state.templates.get(node.id)
    if template is None:
        template = state.templates[node.id] = BodyTemplate(node.id, node.bodies()[0].nodes)
    return template


def bound_names(node: TemplateNode, index: int) -> dict[str, Expression]:
    """Return what the names of item and index mean in one instance of a body."""
    bound: dict[str, Expression] = {}
    if isinstance(node.item, str):
        bound[node.item] = item_expression(node.items_variable, index)
    if isinstance(node.index, str):
        bound[node.index] = index
    return bound


def num_instances(state: ProgramState, node: TemplateNode) -> int | None:
    """Return how many items or rounds a node has; None if only `until` ends it."""
    value: list[Json] | int | None = state.values[node.decision_variable]
    return length_of(value)


def length_of(value: list[Json] | int | None) -> int | None:
    """Return the number of items; a number, or None, stands for itself."""
    return len(value) if isinstance(value, list) else value


def evaluate_items(context: NodeContext, expression: Expression, node_id: str) -> list[Json]:
    """Return the items of a map or loop.

    Raises:
        RunError: `map.not_a_list`.
    """
    items = context.work.evaluate(input_expression(expression))
    if not isinstance(items, list):
        message = f"`items` of {node_id} must be a list, got {kind_of(items)}"
        raise RunError("map.not_a_list", message)
    return items


def publish_decision(context: NodeContext, node: TemplateNode, value: Json) -> list[Ready]:
    """Publish the items, the number of items or the number of rounds of a node."""
    if isinstance(value, list) and not node.has_item_expression:
        value = len(value)
    return context.publish(node.decision_variable, value, node.id)


def missing_reference(state: ProgramState, reference: Expression) -> MissingValue | None:
    """Return why a reference has no value; None if it has one."""
    return state.first_missing(read_by(reference))


def end_body(context: NodeContext, body: BodyRef, phase: Phase, problem: Problem) -> list[Ready]:
    """End all nodes in a body; return the slots that became ready."""
    nodes = list(context.state.graph.body_nodes(body.control).get(body.part, ()))
    return [ready for node_id in nodes for ready in context.end_node(node_id, phase, problem)]


def publish_outputs(
    context: NodeContext,
    node: NodeWithBodies,
    references: Mapping[str, Expression],
) -> None:
    """Publish the outputs of the body that ran; a value that is missing there stays missing.

    After a restart, some may be resolved already.
    """
    state = context.state
    absent = absent_outputs(state, references)
    names = [name for name in references if not state.is_resolved(name)]
    # If an evaluation fails, or is suspended and repeated, no output may have been published.
    values = {
        name: context.work.evaluate(input_expression(references[name]))
        for name in names
        if name not in absent
    }
    ready: list[Ready] = []
    for name in names:
        if (missing := absent.get(name)) is None:
            ready += context.publish(name, values[name], node.id)
        else:
            ready += context.mark_missing(name, missing)
    context.complete_slot(node.id, OUTPUT, ready)


def absent_outputs(
    state: ProgramState, references: Mapping[str, Expression]
) -> dict[str, MissingValue]:
    """Return the outputs without a value of a body that ran."""
    absent: dict[str, MissingValue] = {}
    for name, reference in references.items():
        missing = missing_reference(state, reference)
        if missing is not None:
            phase: Phase = "failed" if missing.phase == "failed" else "skipped"
            absent[name] = MissingValue(phase, missing.problem)
    return absent


def absent_if_resolved(
    state: ProgramState, references: Mapping[str, Expression]
) -> dict[str, MissingValue]:
    """Return what `absent_outputs` does; nothing until all that the references read is resolved."""
    names = {name for reference in references.values() for name in read_by(reference)}
    return absent_outputs(state, references) if all(map(state.is_resolved, names)) else {}


def start_instances(context: NodeContext, node_id: str, expansion: Expansion) -> None:
    """Announce added instances and let them start."""
    context.attach(node_id, expansion.nodes)
    context.advance(expansion.ready)
