"""The largest number of calls and tokens of a program.

Every map has its greatest width, every loop all its rounds, every retry is needed, and an `if`
takes the more expensive body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ..content import Json
from ..errors import ExpressionError
from ..expressions.budget import WorkBudget
from ..expressions.evaluate import evaluate, input_expression, variables
from ..nodes import ExprNode, GenerateNode, IfNode, LoopNode, MapNode, Node, TryNode
from ..nodes.bodies import walk

MAX_STEPS: Final = 100_000
"""Steps of all expressions that are evaluated to find constant lists and counts."""


def known_values(nodes: Sequence[Node], inputs: Mapping[str, Json]) -> dict[str, Json]:
    """Return the inputs, and the values of the expressions that read only known values."""
    known = dict(inputs)
    budget = WorkBudget(MAX_STEPS)
    for node in nodes:
        if isinstance(node, ExprNode):
            value = _known(node.expr, known, is_reference=False, budget=budget)
            if value is not None:
                known[node.output] = value
    return known


class Repetition(NamedTuple):
    """How often the nodes of a program run at most."""

    times: dict[str, int]
    """By node."""
    varying: dict[str, frozenset[str]]
    """Node to the names around it whose values change from one run of it to the next."""


def repetitions(nodes: Sequence[Node], inputs: Mapping[str, Json]) -> Repetition:
    """Return how often each node runs at most, `if` bodies counted both."""
    found = Repetition({}, {})
    _visit(nodes, inputs, 1, frozenset(), found)
    return found


def _visit(
    nodes: Iterable[Node],
    inputs: Mapping[str, Json],
    times: int,
    varying: frozenset[str],
    found: Repetition,
) -> None:
    for node in nodes:
        is_try = isinstance(node, TryNode)
        here = times if is_try else times * (1 + node.retries)
        found.times[node.id] = here
        found.varying[node.id] = varying
        names = varying
        if isinstance(node, MapNode | LoopNode):
            for body in node.bodies():
                written = {
                    name for _, each in walk(body.nodes, "") for name in each.defined_variables()
                }
                names = names | body.binds | written
        runs = num_runs(node, inputs)
        for index, body in enumerate(node.bodies()):
            is_handler = is_try and index > 0
            _visit(body.nodes, inputs, here * (1 if is_handler else runs), names, found)


def num_runs(node: Node, inputs: Mapping[str, Json]) -> int:
    """Return how often the bodies of a node run at most; of a `try`, the first of them."""
    match node:
        case MapNode():
            known = _known(node.items, inputs, is_reference=True)
            return min(len(known), node.max_width) if isinstance(known, list) else node.max_width
        case LoopNode():
            known = _known(node.items, inputs, is_reference=True)
            count = _known(node.count, inputs, is_reference=False)
            rounds = len(known) if isinstance(known, list) else count
            is_number = isinstance(rounds, int) and not isinstance(rounds, bool)
            return min(max(rounds, 0), node.max_iter) if is_number else node.max_iter
        case TryNode():
            return 1 + node.retries
        case _:
            return 1


def _known(
    expression: Json,
    inputs: Mapping[str, Json],
    *,
    is_reference: bool,
    budget: WorkBudget | None = None,
) -> Json:
    """Return the value of an expression over the inputs; None if it is not known."""
    reads = input_expression(expression) if is_reference else expression
    try:
        if not variables(reads) <= inputs.keys():
            return None
        return evaluate(reads, inputs, budget=budget)
    except (ExpressionError, TypeError, AttributeError):
        return None


def largest(nodes: Sequence[Node], inputs: Mapping[str, Json], cost: Mapping[str, int]) -> int:
    """Return the largest total cost of the calls of a program.

    Args:
        nodes: the nodes.
        inputs: known values, of inputs and expressions.
        cost: of one run of each generate node.
    """
    total = 0
    for node in nodes:
        own = cost.get(node.id, 0) if isinstance(node, GenerateNode) else 0
        bodies = [largest(body.nodes, inputs, cost) for body in node.bodies()]
        if isinstance(node, IfNode):
            inner = max(bodies)
        elif isinstance(node, TryNode):
            inner = bodies[0] * (1 + node.retries) + max(bodies[1:], default=0)
        else:
            inner = sum(bodies) * num_runs(node, inputs)
        total += own * (1 + node.retries) + inner
    return total
