"""Executes `call`: runs a function that the operator registered on the server.

A function may have effects outside the server, so it starts after its arguments are durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from msgspec import UNSET

from ...functions.registry import ServerFunction
from ...program.errors import ConureError, ExpressionError, RunError
from ...program.expressions.values import check_size
from ...program.ir import CallNode, Json
from ..node_context import NodeContext, NodeExecutor
from ..node_state import Ready
from ..reporting.trace_records import TracedStep

logger = logging.getLogger(__name__)


class FunctionStepExecutor(NodeExecutor[CallNode]):
    """The `call` nodes of one program."""

    kind = CallNode

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._running: dict[str, RunningFunction] = {}

    def run(self, node: CallNode, slot: int) -> None:
        """Start the function.

        Raises:
            RunError: `call.unknown_function`, `call.argument`.
        """
        args = {name: self.context.work.evaluate(expr) for name, expr in node.args.items()}
        function = self.context.services.functions.get(node.function)
        if function is None:
            message = f"function {node.function} is no longer registered on this server"
            raise RunError("call.unknown_function", message)
        complete = function.check_arguments(args)
        self._running[node.id] = RunningFunction(self, node, function, complete)

    def complete(self, node: CallNode, value: Json) -> None:
        """Publish the result of a function."""
        step = self._running.pop(node.id, None)
        if step is None or self.context.is_over:
            return
        if self.state.options.trace:
            self.context.outbox.record_trace(step.traced(value))
        try:
            ready: list[Ready] = []
            if node.output is not UNSET:
                ready = self.context.publish(node.output, value, node.id)
        except ConureError as error:
            self.context.retry_or_fail(node.id, error)
            return
        self.context.complete_slot(node.id, 0, ready)

    def abandon(self, node_id: str) -> None:
        """Ignore the result of a running function."""
        if (running := self._running.pop(node_id, None)) is not None:
            running.abandon()

    def node_ended(self, node_id: str) -> None:
        """Ignore the result of a node that has ended."""
        self.abandon(node_id)

    def release(self) -> None:
        """Ignore the results of all running functions."""
        for node_id in list(self._running):
            self.abandon(node_id)


class RunningFunction:
    """A function that runs in a task. Synchronous functions run in a thread."""

    def __init__(
        self,
        executor: FunctionStepExecutor,
        node: CallNode,
        function: ServerFunction,
        args: Mapping[str, Json],
    ) -> None:
        self._executor = executor
        self._context = executor.context
        self._node = node
        self._function = function
        self._is_abandoned = False
        self._args = args
        self._started_at = self._context.services.clock.now()
        self._task = asyncio.create_task(self._run(args))

    def abandon(self) -> None:
        """Ignore the result. A coroutine is cancelled; a thread runs to its end."""
        self._is_abandoned = True
        if self._task is not asyncio.current_task():
            self._task.cancel()

    def traced(self, value: Json) -> TracedStep:
        """Return the record of the step for the trace of its program."""
        node = self._node
        return TracedStep(
            node=node.id,
            job=node.job,
            name=node.function,
            attempt=self._context.state.nodes[node.id].attempt,
            started_at=self._started_at,
            finished_at=self._context.services.clock.now(),
            args=dict(self._args),
            value=value,
        )

    async def _run(self, args: Mapping[str, Json]) -> None:
        node = self._node
        try:
            await self._context.outbox.barrier()
            value = await self._result(args)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if self._is_abandoned:
                return
            self._context.retry_or_fail(node.id, self._failure(error))
        else:
            self._executor.complete(node, value)

    async def _result(self, args: Mapping[str, Json]) -> Json:
        """Run the function and return its result as a JSON value of bounded size."""
        function, timeout_s = self._function, self._timeout_s
        if function.is_async:
            async with asyncio.timeout(timeout_s):
                result = await function.run(**args)
            return _as_json(result)
        threads = self._context.services.function_threads
        return await threads.run(lambda: _as_json(function.run(**args)), timeout_s=timeout_s)

    @property
    def _timeout_s(self) -> float:
        limit = self._function.signature.timeout_s
        return limit if self._node.timeout_s is None else min(limit, self._node.timeout_s)

    def _failure(self, error: BaseException) -> ConureError:
        node = self._node
        if isinstance(error, RunError | ExpressionError):
            return error
        if isinstance(error, TimeoutError):
            message = f"function {node.function} of node {node.id} took over {self._timeout_s:g} s"
            return RunError("call.timeout", message)
        # The exception's text belongs to the operator and must not reach a client.
        logger.error("function %s of node %s failed", node.function, node.id, exc_info=error)
        message = f"function {node.function} of node {node.id} raised {type(error).__name__}"
        return RunError("call.failed", message)


def _as_json(result: object) -> Json:
    """Return a result as the JSON value that the journal will have.

    Raises:
        ExpressionError: `expr.size`, `expr.number`.
    """
    value = msgspec.json.decode(msgspec.json.encode(result))
    check_size(value)
    return value
