"""Executes `call`: runs a function that the operator registered on the server.

A function may have effects outside the server, so it starts after its arguments are durable.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping

import msgspec

from ...functions.registry import ServerFunction
from ...functions.threads import FunctionTimeoutError, time_limit
from ...program.errors import ConureError, ExpressionError, RunError
from ...program.expressions.values import check_size
from ...program.ir import CallNode, Json
from ..node_context import NodeContext
from .external_step import ExternalStepExecutor

logger = logging.getLogger(__name__)

_UNSUPPORTED_TYPE = re.compile(r"objects of type ([\w.]+) is unsupported")
"""What msgspec says about a value that it cannot encode."""


class RunningFunction:
    """A function that runs in a task. Synchronous functions run in a thread."""

    def __init__(
        self,
        context: NodeContext,
        node: CallNode,
        function: ServerFunction,
        args: Mapping[str, Json],
        on_result: Callable[[CallNode, Json], None],
    ) -> None:
        self._context = context
        self._on_result = on_result
        self._node = node
        self._function = function
        self._is_abandoned = False
        self.args = args
        self.attempt = self._context.state.nodes[node.id].attempt
        self.started_at = self._context.services.clock.now()
        self._task = asyncio.create_task(self._run(args))

    def abandon(self) -> None:
        """Ignore the result. A coroutine is cancelled; a thread runs to its end."""
        self._is_abandoned = True
        if self._task is not asyncio.current_task():
            self._task.cancel()

    async def _run(self, args: Mapping[str, Json]) -> None:
        node = self._node
        try:
            await self._context.outbox.barrier()
        except ConureError as error:  # the journal has not accepted the arguments
            if not self._is_abandoned:
                self._context.fail(node.id, error)
            return
        try:
            value = await self._result(args)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if self._is_abandoned:
                return
            self._context.retry_or_fail(node.id, self._failure(error))
        else:
            self._on_result(node, value)

    async def _result(self, args: Mapping[str, Json]) -> Json:
        """Run the function and return its result as a JSON value of bounded size."""
        function, timeout_s = self._function, self._timeout_s
        if function.is_async:
            async with time_limit(timeout_s):
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
        if isinstance(error, FunctionTimeoutError):
            message = f"function {node.function} of node {node.id} took over {self._timeout_s:g} s"
            return RunError("call.timeout", message)
        if isinstance(error, _NotJsonError):
            message = f"function {node.function} of node {node.id} returned a value that is not "
            return RunError("call.failed", f"{message}JSON: {error}")
        # The exception's text belongs to the operator and must not reach a client.
        logger.error("function %s of node %s failed", node.function, node.id, exc_info=error)
        message = f"function {node.function} of node {node.id} raised {type(error).__name__}"
        return RunError("call.failed", message)


class _NotJsonError(Exception):
    """A function returned a value that is not JSON; the argument is the name of its type."""


class FunctionStepExecutor(ExternalStepExecutor[CallNode, RunningFunction]):
    """The `call` nodes of one program."""

    kind = CallNode

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
        arguments = function.check_arguments(args)
        self.steps[node.id] = RunningFunction(
            self.context, node, function, arguments, self.complete
        )


def _as_json(result: object) -> Json:
    """Return a result as the JSON value that the journal will have.

    Raises:
        ExpressionError: `expr.size`, `expr.number`.
        _NotJsonError: if the result, or a part of it, is of another type.
    """
    try:
        encoded = msgspec.json.encode(result)
    except TypeError as error:
        unsupported = _UNSUPPORTED_TYPE.search(str(error))
        name = type(result).__name__ if unsupported is None else unsupported[1]
        raise _NotJsonError(name) from error
    value = msgspec.json.decode(encoded)
    check_size(value)
    return value
