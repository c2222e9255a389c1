"""The executor of the node kinds whose value comes from outside of the graph.

Responsibility: the step of each running node, its record in the trace, and the publication of its
value. Out of scope: how the value is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from msgspec import UNSET

from ...program.errors import ConureError
from ...program.ir import CallNode, ClientNode, Json
from ..node_context import NodeContext, NodeExecutor
from ..node_state import Ready
from ..reporting.trace_records import TracedStep


class ExternalStep(Protocol):
    """One attempt of a node, until its value is known."""

    started_at: float
    args: Mapping[str, Json]
    attempt: int

    def abandon(self) -> None:
        """Stop waiting for the value; safe to repeat."""


N = TypeVar("N", ClientNode, CallNode)
S = TypeVar("S", bound=ExternalStep)


class ExternalStepExecutor(NodeExecutor[N], Generic[N, S]):
    """The steps of the nodes of one kind in one program."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self.steps: dict[str, S] = {}
        """By the id of the running node."""

    def complete(self, node: N, value: Json) -> None:
        """Publish the value of a running node. The value of an abandoned node is ignored."""
        step = self.steps.pop(node.id, None)
        if step is None or self.context.is_over:
            return
        if self.state.options.trace:
            self.context.outbox.record_trace(self._trace(node, step, value))
        ready: list[Ready] = []
        try:
            if node.output is not UNSET:
                ready = self.context.publish(node.output, value, node.id)
        except ConureError as error:
            self.context.retry_or_fail(node.id, error)
            return
        self.context.complete_slot(node.id, 0, ready)

    def abandon(self, node_id: str) -> None:
        """Stop the step of a node; safe to repeat."""
        if (step := self.steps.pop(node_id, None)) is not None:
            step.abandon()

    def node_ended(self, node_id: str) -> None:
        """Stop the step of a node that has ended."""
        self.abandon(node_id)

    def release(self) -> None:
        """Stop all steps."""
        for node_id in list(self.steps):
            self.abandon(node_id)

    def _trace(self, node: N, step: S, value: Json) -> TracedStep:
        return TracedStep(
            node=node.id,
            job=node.job,
            name=node.name if isinstance(node, ClientNode) else node.function,
            attempt=step.attempt,
            started_at=step.started_at,
            finished_at=self.context.services.clock.now(),
            args=dict(step.args),
            value=value,
        )
