"""The largest number of calls and tokens of a program.

Every map has its greatest width, every loop all its rounds, every retry is needed, and an `if`
takes the more expensive body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from ..content import Expression, Json
from ..errors import ExpressionError
from ..expressions.budget import WorkBudget
from ..expressions.evaluate import evaluate, variables
from ..nodes import ExprNode, GenerateNode, IfNode, Node, TryNode
from ..nodes.bodies import walk
from ..nodes.control.base import NodeWithBodies, TemplateNode

MAX_STEPS: Final = 100_000
"""Steps of all `expr` nodes that are evaluated to find constants, and of all lists and counts."""


def known_values(nodes: Sequence[Node], inputs: Mapping[str, Json]) -> dict[str, Json]:
    """Return the inputs, and the values of the expressions that read only known values."""
    known = dict(inputs)
    budget = WorkBudget(MAX_STEPS)
    for node in nodes:
        if isinstance(node, ExprNode):
            value = _known(node.expr, known, budget)
            if value is not None:
                known[node.output] = value
    return known


class Repetition(NamedTuple):
    """How often the nodes of a program run at most."""

    times: dict[str, int]
    """By node."""
    varying: dict[str, frozenset[str]]
    """Node to the names around it whose values change from one run of it to the next."""
    rounds: dict[str, int]
    """Node with bodies to how often they run in one run of it; of a `try`, the first of them."""


def repetitions(nodes: Sequence[Node], inputs: Mapping[str, Json]) -> Repetition:
    """Return how often each node runs at most, `if` bodies counted both."""
    budget = WorkBudget(MAX_STEPS)
    known = partial(_known, inputs=inputs, budget=budget)
    controls = (node for _, node in walk(nodes, "") if isinstance(node, NodeWithBodies))
    rounds = {node.id: node.max_rounds(known) for node in controls}
    found = Repetition({}, {}, rounds)
    _visit(nodes, 1, frozenset(), found)
    return found


def _visit(nodes: Iterable[Node], times: int, varying: frozenset[str], found: Repetition) -> None:
    for node in nodes:
        is_try = isinstance(node, TryNode)
        here = times if is_try else times * (1 + node.retries)
        found.times[node.id] = here
        found.varying[node.id] = varying
        names = varying
        if isinstance(node, TemplateNode):
            for body in node.bodies():
                written = {
                    name for _, each in walk(body.nodes, "") for name in each.defined_variables()
                }
                names = names | body.binds | written
        for index, body in enumerate(node.bodies()):
            rounds = 1 if is_try and index > 0 else found.rounds[node.id]
            _visit(body.nodes, here * rounds, names, found)


def _known(expression: Expression, inputs: Mapping[str, Json], budget: WorkBudget) -> Json:
    """Return the value of an expression over the inputs; None if it is not known."""
    match expression:
        case {"var": str(name), **others} if not others and name in inputs:
            return inputs[name]  # without a copy: the value may be large
    try:
        if not variables(expression) <= inputs.keys():
            return None
        return evaluate(expression, inputs, budget=budget)
    except (ExpressionError, TypeError, AttributeError):
        return None


def largest(nodes: Sequence[Node], rounds: Mapping[str, int], cost: Mapping[str, int]) -> int:
    """Return the largest total cost of the calls of a program.

    Args:
        nodes: the nodes.
        rounds: how often the bodies of each node with bodies run in one run of it.
        cost: of one run of each generate node.
    """
    total = 0
    for node in nodes:
        own = cost.get(node.id, 0) if isinstance(node, GenerateNode) else 0
        bodies = [largest(body.nodes, rounds, cost) for body in node.bodies()]
        if isinstance(node, IfNode):
            inner = max(bodies)
        elif isinstance(node, TryNode):
            inner = bodies[0] * (1 + node.retries) + max(bodies[1:], default=0)
        else:
            inner = sum(bodies) * rounds.get(node.id, 1)
        total += own * (1 + node.retries) + inner
    return total
