"""Steps that are no LLM call: those that the client runs, and functions of the server.

Both get JSON and give JSON, and both look outside the server, so neither begins before
everything it was given is on disk: a client is asked by an event, which the journal orders
behind its inputs, and a function waits for a barrier.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from ..program.errors import ConureError, RunError
from ..program.ir import Call, Client, Json
from ..program.status import EventType
from .outbox import Outbox, iso

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 600.0
"""What a client step without `timeout_s` gets."""


class StepHost(Protocol):
    """What a step needs of its program."""

    outbox: Outbox

    @property
    def program_id(self) -> str:
        """Id of the program."""
        ...

    def emit(self, event_type: EventType, node: str | None = None, **data: Any) -> None:
        """Write an event."""
        ...

    def step_done(self, node_id: str, value: Json) -> None:
        """The step has its value."""
        ...

    def step_failed(self, node_id: str, error: ConureError) -> None:
        """The step has none."""
        ...


class Steps:
    """The steps of one program that are at work, by node."""

    def __init__(
        self,
        host: StepHost,
        functions: Mapping[str, Callable[..., Any]],
        threads: ThreadPoolExecutor,
    ) -> None:
        self.asked: AbstractSet[str] = frozenset()
        """Request ids that clients have seen in an earlier life of the server."""
        self._host = host
        self._functions = functions
        self._threads = threads
        self._at_work: dict[str, ClientStep | FunctionStep] = {}

    def start(self, node: Client | Call, attempt: int, args: Mapping[str, Json]) -> None:
        """Begin a step.

        Raises:
            RunError: `call.unknown_function` if no function has its name.
        """
        if isinstance(node, Client):
            step = ClientStep(self._host, node, attempt, args)
            self._at_work[node.id] = step
            step.ask(asked_already=step.request_id in self.asked)
            return
        function = self._functions.get(node.function)
        if function is None:
            message = f"no function {node.function} is registered on this server any more"
            raise RunError("call.unknown_function", message)
        self._at_work[node.id] = FunctionStep(self._host, node, function, args, self._threads)

    def pop(self, node_id: str) -> ClientStep | FunctionStep | None:
        """The step of a node, which is at work no more; None if it is not."""
        return self._at_work.pop(node_id, None)

    def asked_of_client(self, node_id: str) -> ClientStep | None:
        """The client step of a node, while it waits for its client."""
        step = self._at_work.get(node_id)
        return step if isinstance(step, ClientStep) else None

    def drop(self, node_id: str) -> None:
        """Nobody waits for a node's step any more; safe to repeat."""
        if (step := self.pop(node_id)) is not None:
            step.abandon()

    def abandon(self) -> None:
        """Nobody waits for any step any more."""
        for step in list(self._at_work.values()):
            step.abandon()


class ClientStep:
    """A question to the client, until it is answered or out of time."""

    def __init__(
        self, host: StepHost, node: Client, attempt: int, args: Mapping[str, Json]
    ) -> None:
        self.node = node
        self.output: str | None = node.output
        self.request_id = request_id(host.program_id, node.id, attempt)
        self._host = host
        self._attempt = attempt
        self._args = dict(args)
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, *, asked_already: bool = False) -> None:
        """Put the question; after a restart only the clock starts again, for it was put before."""
        timeout_s = self.node.timeout_s or CLIENT_TIMEOUT_S
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._timeout, timeout_s)
        if asked_already:
            return
        self._host.emit(
            "client.requested",
            self.node.id,
            name=self.node.name,
            args=self._args,
            output=self.node.output,
            request_id=self.request_id,
            attempt=self._attempt,
            expires_at=iso(time.time() + timeout_s),
        )

    def answer(self, value: Json) -> None:
        """The client gave its value."""
        self.abandon()
        self._host.step_done(self.node.id, value)

    def refuse(self, error: ConureError) -> None:
        """The client's step failed."""
        self.abandon()
        self._host.step_failed(self.node.id, error)

    def abandon(self) -> None:
        """Nobody waits for the answer any more; safe to repeat."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timeout(self, timeout_s: float) -> None:
        step = f"{self.node.name} of node {self.node.id}"
        message = f"the client did not answer {step} within {timeout_s:g} s"
        self.refuse(RunError("client.timeout", message))


class FunctionStep:
    """A function of the server at work, in a task; sync functions run in a thread."""

    def __init__(
        self,
        host: StepHost,
        node: Call,
        function: Callable[..., Any],
        args: Mapping[str, Json],
        threads: ThreadPoolExecutor,
    ) -> None:
        self.node = node
        self.output: str | None = None if node.output is UNSET else node.output
        self._host = host
        self._is_abandoned = False
        self._task = asyncio.create_task(self._run(function, dict(args), threads))

    def abandon(self) -> None:
        """Nobody waits for the result any more; safe to repeat. A thread runs to its end."""
        self._is_abandoned = True
        if self._task is not asyncio.current_task():
            self._task.cancel()

    async def _run(
        self, function: Callable[..., Any], args: dict[str, Json], threads: ThreadPoolExecutor
    ) -> None:
        node = self.node
        try:
            await self._host.outbox.barrier()
            if inspect.iscoroutinefunction(function):
                result = await function(**args)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(threads, _run_in_thread, function, args)
            value = msgspec.json.decode(msgspec.json.encode(result))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if self._is_abandoned:
                return
            # The function is the operator's: its text may hold what a client must not read.
            logger.exception("function %s of node %s failed", node.function, node.id)
            message = f"function {node.function} of node {node.id} raised {type(error).__name__}"
            self._host.step_failed(node.id, RunError("call.failed", message))
        else:
            self._host.step_done(node.id, value)


def _run_in_thread(function: Callable[..., Any], args: Mapping[str, Json]) -> Any:
    try:
        return function(**args)
    except StopIteration as error:
        # asyncio cannot carry this one from a thread: whoever awaits it would wait for ever.
        raise RuntimeError("the function raised StopIteration") from error


def request_id(program: str, node: str, attempt: int) -> str:
    """The same question has the same id, also when a restarted server would put it again."""
    digest = hashlib.blake2b(f"{program}/{node}/{attempt}".encode(), digest_size=12).hexdigest()
    return f"r_{digest}"
