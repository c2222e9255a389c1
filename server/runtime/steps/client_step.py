"""Executes `client`: requests a step from the client by an event, and waits for its answer.

The request is an event, which the journal orders after the values in its arguments, so a client
never sees a value that a crash could lose.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from ...program.errors import ConureError, RunError
from ...program.ir import ClientNode, Json
from ..clock import format_timestamp
from ..node_context import NodeContext
from ..persistence.journaled_events import RecoveredState
from .external_step import ExternalStepExecutor

CLIENT_TIMEOUT_S = 600.0
"""Timeout of a client step without `timeout_s`."""


class PendingClientStep:
    """A request to the client, until it is answered or times out."""

    def __init__(
        self,
        context: NodeContext,
        node: ClientNode,
        attempt: int,
        args: Mapping[str, Json],
        on_answer: Callable[[ClientNode, Json], None],
    ) -> None:
        self.request_id = request_id(context.state.id, node.id, attempt)
        self._context = context
        self._on_answer = on_answer
        self._node = node
        self.attempt = attempt
        self.args = args
        self.started_at = self._context.services.clock.now()
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
            args=dict(self.args),
            output=self._node.output,
            request_id=self.request_id,
            attempt=self.attempt,
            expires_at=format_timestamp(time.time() + self._timeout_s),
        )

    def answer(self, value: Json) -> None:
        """Complete the step with the client's value."""
        self.abandon()
        self._on_answer(self._node, value)

    def fail(self, error: ConureError) -> None:
        """Fail the step."""
        self.abandon()
        self._context.retry_or_fail(self._node.id, error)

    def abandon(self) -> None:
        """Stop waiting for the client; safe to repeat."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        step = f"{self._node.name} of node {self._node.id}"
        message = f"the client did not answer {step} within {self._timeout_s:g} s"
        self.fail(RunError("client.timeout", message))


class ClientStepExecutor(ExternalStepExecutor[ClientNode, PendingClientStep]):
    """The `client` nodes of one program."""

    kind = ClientNode

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._requested_before: AbstractSet[str] = frozenset()
        self._resuming: dict[str, asyncio.Event] = {}
        """Nodes whose step was requested before a restart, until it waits for its answer again."""

    def run(self, node: ClientNode, slot: int) -> None:
        """Request the step."""
        args = {name: self.context.work.evaluate(expr) for name, expr in node.args.items()}
        attempt = self.state.nodes[node.id].attempt
        step = self.steps[node.id] = PendingClientStep(
            self.context, node, attempt, args, self.complete
        )
        step.start_timer()
        if step.request_id not in self._requested_before:
            step.request()
        self._release_waiters(node.id)

    def restore(self, recovered: RecoveredState) -> None:
        """Remember which requests clients received before a restart: they are not sent again."""
        self._requested_before = recovered.requested
        for node_id, node_state in self.state.nodes.items():
            if isinstance(node_state.node, ClientNode) and not node_state.has_ended:
                sent = request_id(self.state.id, node_id, node_state.attempt)
                if sent in recovered.requested:
                    self._resuming[node_id] = asyncio.Event()

    async def wait_resumed(self, node_id: str) -> None:
        """Wait for the step of a node if a client may answer it, but it has not started again."""
        if (resumed := self._resuming.get(node_id)) is not None:
            await resumed.wait()

    def node_ended(self, node_id: str) -> None:
        """Stop the step of a node that has ended."""
        super().node_ended(node_id)
        self._release_waiters(node_id)

    def release(self) -> None:
        """Stop all steps."""
        super().release()
        for node_id in list(self._resuming):
            self._release_waiters(node_id)

    def _release_waiters(self, node_id: str) -> None:
        if (resumed := self._resuming.pop(node_id, None)) is not None:
            resumed.set()


def request_id(program: str, node: str, attempt: int) -> str:
    """Return the id of a request. A restarted server gives the same request the same id."""
    digest = hashlib.blake2b(f"{program}/{node}/{attempt}".encode(), digest_size=12).hexdigest()
    return f"r_{digest}"
