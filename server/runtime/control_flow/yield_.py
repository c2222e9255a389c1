"""Executes `yield`: an event with a value, and partial events while the value is generated.

The final value is a durable event. Partial values are as transient as the text they are based on,
and are sent only while all other inputs of the node are resolved. A partial value whose expression
takes long is computed in a thread, from the latest text each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET

from ...program.errors import ExpressionError
from ...program.expressions.budget import WorkBudget
from ...program.expressions.evaluate import evaluate, input_expression, variables
from ...program.expressions.partial_values import finalized, partial_names, with_partial_texts
from ...program.ir import Json, YieldNode
from ..node_context import NodeContext, NodeExecutor
from ..slot_work import Outcome


class YieldExecutor(NodeExecutor[YieldNode]):
    """The `yield` nodes of one program."""

    kind = YieldNode

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._followers: dict[str, list[YieldNode]] = {}
        self._changed: dict[str, YieldNode] = {}
        """Nodes whose texts have grown since their last partial value."""
        self._computing: set[str] = set()
        """Nodes whose partial value is being computed in a thread."""
        self._is_scheduled = False

    def run(self, node: YieldNode, slot: int) -> None:
        """Send the final value."""
        expression = finalized(node.value) if node.mode == "partial" else node.value
        value = self.context.work.evaluate(expression)
        self.context.events.clear_partial_yield(node.id)
        self.context.emit("yield", node.id, value=value, mode=node.mode, final=True)
        self.context.complete_slot(node.id, slot, [])

    def node_ended(self, node_id: str) -> None:
        """Remove the partial value of a node that has ended."""
        self._changed.pop(node_id, None)
        self.context.events.clear_partial_yield(node_id)

    def nodes_added(self, nodes: Sequence[str]) -> None:
        """Register which texts new nodes follow."""
        for node_id in nodes:
            node = self.state.graph.nodes[node_id]
            if isinstance(node, YieldNode) and node.mode != "value":
                names = _followed_texts(node)
                self.context.followed_texts |= names
                for name in names:
                    self._followers.setdefault(name, []).append(node)

    def text_appended(self, variable: str) -> None:
        """Send partial values that are based on a text, in this turn if possible."""
        for node in self._followers.get(variable, ()):
            self._changed[node.id] = node
        if self._changed and not self._is_scheduled:
            self._send_all()

    def _send_all(self) -> None:
        self._is_scheduled = False
        turns = self.context.services.turns
        for node in list(self._changed.values()):
            if self.context.is_over or node.id in self._computing:
                continue
            if turns.has_ended:
                self._is_scheduled = True
                turns.call_later(self._send_all)
                return
            if self._changed.pop(node.id, None) is not None:
                self._send(node)

    def _send(self, node: YieldNode) -> None:
        """Send a partial value if everything but texts is resolved."""
        names = _followed_texts(node)
        growing = {name for name in names if not self.state.is_resolved(name)}
        if self.state.nodes[node.id].has_ended:
            return
        if not self.state.readiness.waits_only_for(node.id, 0, growing):
            return
        value = with_partial_texts(node.value, names - growing)
        reads = variables(value)
        if node.when is not UNSET:
            reads |= variables(input_expression(node.when))
        values = self.state.values
        scope = {name: values[name] for name in reads if name in values}
        scope |= {name: self.context.events.text_of(name) for name in growing}

        def compute(budget: WorkBudget) -> Json:
            when = True if node.when is UNSET else input_expression(node.when)
            is_wanted = evaluate(when, scope, budget=budget)
            return evaluate(value, scope, budget=budget) if is_wanted else UNSET

        self._compute(node, compute)

    def _compute(self, node: YieldNode, compute: Callable[[WorkBudget], Json]) -> None:
        def done(outcome: Outcome) -> None:
            self._computing.discard(node.id)
            self._set_value(node, outcome)
            if node.id in self._changed and not self._is_scheduled:
                self._send_all()

        outcome = self.context.work.try_now(compute)
        if outcome is None:
            self._computing.add(node.id)
            self.context.work.submit(compute, done)
        else:
            self._set_value(node, outcome)

    def _set_value(self, node: YieldNode, outcome: Outcome) -> None:
        if self.context.is_over or self.state.nodes[node.id].has_ended:
            return
        try:
            value = outcome.get()
        except ExpressionError:
            return  # the text is incomplete; wait for more
        if value is not UNSET and (node.mode == "partial" or isinstance(value, str)):
            self.context.events.set_partial_yield(node.id, node.job, node.mode, value)


def _followed_texts(node: YieldNode) -> frozenset[str]:
    return partial_names(node.value) if node.mode == "partial" else variables(node.value)
