"""Executes `client`: requests a step from the client by an event, and waits for its answer.

The request is an event, which the journal orders after the values in its arguments, so a client
never sees a value that a crash could lose.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from ...program.errors import ConureError, RunError
from ...program.ir import ClientNode, Json
from ..node_context import NodeContext, NodeExecutor
from ..persistence.journaled_events import RecoveredState
from ..persistence.outbox import format_timestamp
from ..reporting.trace_records import TracedStep

CLIENT_TIMEOUT_S = 600.0
"""Timeout of a client step without `timeout_s`."""


class ClientStepExecutor(NodeExecutor[ClientNode]):
    """The `client` nodes of one program."""

    kind = ClientNode

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._pending: dict[str, PendingClientStep] = {}
        self._requested_before: AbstractSet[str] = frozenset()

    def run(self, node: ClientNode, slot: int) -> None:
        """Request the step."""
        args = {name: self.context.work.evaluate(expr) for name, expr in node.args.items()}
        attempt = self.state.nodes[node.id].attempt
        step = self._pending[node.id] = PendingClientStep(self, node, attempt, args)
        step.start_timer()
        if step.request_id not in self._requested_before:
            step.request()

    def restore(self, recovered: RecoveredState) -> None:
        """Remember which requests clients received before a restart: they are not sent again."""
        self._requested_before = recovered.requested

    def pending(self, node_id: str) -> PendingClientStep | None:
        """Return the step of a node, while it waits for its client."""
        return self._pending.get(node_id)

    def complete(self, node: ClientNode, value: Json) -> None:
        """Publish the value of a step."""
        step = self._pending.pop(node.id, None)
        if step is None or self.context.is_over:
            return
        if self.state.options.trace:
            self.context.outbox.record_trace(step.traced(value))
        try:
            ready = self.context.publish(node.output, value, node.id)
        except ConureError as error:
            self.context.retry_or_fail(node.id, error)
            return
        self.context.complete_slot(node.id, 0, ready)

    def abandon(self, node_id: str) -> None:
        """Stop waiting for the client."""
        if (step := self._pending.pop(node_id, None)) is not None:
            step.cancel_timer()

    def node_ended(self, node_id: str) -> None:
        """Stop waiting for the client of a node that has ended."""
        self.abandon(node_id)

    def release(self) -> None:
        """Stop waiting for all clients."""
        for node_id in list(self._pending):
            self.abandon(node_id)


class PendingClientStep:
    """A request to the client, until it is answered or times out."""

    def __init__(
        self,
        executor: ClientStepExecutor,
        node: ClientNode,
        attempt: int,
        args: Mapping[str, Json],
    ) -> None:
        self.request_id = request_id(executor.state.id, node.id, attempt)
        self._executor = executor
        self._context = executor.context
        self._node = node
        self._attempt = attempt
        self._args = args
        self._started_at = self._context.services.clock.now()
        self._timeout_s = node.timeout_s or CLIENT_TIMEOUT_S
        self._timer: asyncio.TimerHandle | None = None

    def start_timer(self) -> None:
        """Start the timeout. After a restart, the step has its full time again."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._timed_out)

    def request(self) -> None:
        """Send the request event."""
        self._context.emit(
            "client.requested",
            self._node.id,
            name=self._node.name,
            args=dict(self._args),
            output=self._node.output,
            request_id=self.request_id,
            attempt=self._attempt,
            expires_at=format_timestamp(time.time() + self._timeout_s),
        )

    def traced(self, value: Json) -> TracedStep:
        """Return the record of the step for the trace of its program."""
        return TracedStep(
            node=self._node.id,
            job=self._node.job,
            name=self._node.name,
            attempt=self._attempt,
            started_at=self._started_at,
            finished_at=self._context.services.clock.now(),
            args=dict(self._args),
            value=value,
        )

    def answer(self, value: Json) -> None:
        """Complete the step with the client's value."""
        self.cancel_timer()
        self._executor.complete(self._node, value)

    def fail(self, error: ConureError) -> None:
        """Fail the step."""
        self.cancel_timer()
        self._context.retry_or_fail(self._node.id, error)

    def cancel_timer(self) -> None:
        """Cancel the timeout; safe to repeat."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        step = f"{self._node.name} of node {self._node.id}"
        message = f"the client did not answer {step} within {self._timeout_s:g} s"
        self.fail(RunError("client.timeout", message))


def request_id(program: str, node: str, attempt: int) -> str:
    """Return the id of a request. A restarted server gives the same request the same id."""
    digest = hashlib.blake2b(f"{program}/{node}/{attempt}".encode(), digest_size=12).hexdigest()
    return f"r_{digest}"
