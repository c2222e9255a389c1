"""The client for coroutines: `client.Client`, said with await.

Everything that is not waiting is shared with it (`exchange`, `connection`, `steps`), and
the docstrings there hold here. Functions of client steps that are coroutine functions run
in the caller's loop, others in threads.

Kept true: connections belong to the loop that made them; a client that is used from
several loops, one after the other or at once, has connections of its own in each.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import httpx

from conure.server.program.errors import ConflictError, ConureError, NotFoundError
from conure.server.program.ir import Append, Json, Options, Program, Submission
from conure.server.program.status import (
    ENDED,
    Accepted,
    Event,
    EventType,
    ProgramStatus,
    PutValue,
    Receipt,
    VariableStatus,
)

from . import exchange
from .asgi import Application, AsyncTransport
from .connection import LIMITS, Follower, Opened, Settings, committed, ends, is_stream, wanted
from .exchange import Flow, Pause, Reply, Request, Retry, ServerUnreachableError
from .steps import (
    Function,
    Result,
    Shift,
    Step,
    answer_of,
    check_functions,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncClient:
    """A connection to a server, for coroutines."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        app: Application | None = None,
        timeout_s: float = 30.0,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Connects nothing yet; arguments as of `Client`.

        Args:
            base_url: of the server. None: the variable CONURE_URL, else 127.0.0.1:8400.
            app: an ASGI application to run in this process instead (its lifespan included).
            timeout_s: for an answer, on top of what a long poll waits.
            retry: how often and how soon refused or unanswered requests are repeated.
            headers: sent with every request.
            settings: of a client whose application this one shares and does not stop.
        """
        self._settings = settings or Settings(
            base_url, app=app, timeout_s=timeout_s, retry=retry, headers=headers
        )
        self._owns_app = settings is None
        self._per_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close this loop's connections, and stop the application if it is this client's."""
        http = self._per_loop.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()
        if self._owns_app and self._settings.local is not None:
            await asyncio.to_thread(self._settings.local.close)

    async def submit(
        self,
        program: Program | Submission | Mapping[str, Json],
        inputs: Mapping[str, Json] | None = None,
        objectives: Mapping[str, Json] | None = None,
        options: Options | Mapping[str, Json] | None = None,
        *,
        open: bool = False,  # noqa: A002 - the word of the wire
        idempotency_key: str | None = None,
        follow: bool = False,
        types: Collection[EventType] | None = None,
    ) -> AsyncRun:
        """Submit a program; see `Client.submit`."""
        body = exchange.submission_body(
            program, inputs=inputs, objectives=objectives, options=options, is_open=open
        )
        if not follow:
            accepted = await self._do(exchange.submit(body, self._retry, key=idempotency_key))
            return AsyncRun(self, accepted, body["program"])
        flow = exchange.follow(body, self._retry, key=idempotency_key, query=wanted(types))
        accepted, response = await self._do(flow)
        opened = None if response is None else Opened(response, types)
        return AsyncRun(self, accepted, body["program"], opened)

    async def attach(self, program_id: str) -> AsyncRun:
        """A handle on a program that was submitted before, by anybody."""
        status = await self._do(exchange.status(program_id, self._retry))
        return AsyncRun(self, exchange.accepted_of(status))

    async def run(
        self,
        program: Program | Submission | Mapping[str, Json],
        inputs: Mapping[str, Json] | None = None,
        functions: Mapping[str, Function] | None = None,
        objectives: Mapping[str, Json] | None = None,
        options: Options | Mapping[str, Json] | None = None,
    ) -> Result:
        """Submit a program, run its client steps here, and wait for its end; see `Client.run`."""
        body = exchange.submission_body(
            program, inputs=inputs, objectives=objectives, options=options
        )
        check_functions(body["program"], functions or {})
        run = await self.submit(body, follow=True)
        try:
            return await run.serve_client_steps(functions or {})
        except ConureError:
            raise
        except BaseException:
            with contextlib.suppress(ConureError):
                await asyncio.shield(run.cancel())
            raise

    async def models(self) -> list[dict[str, Json]]:
        """The models that programs can name, as `/v1/models` describes them."""
        page = await self._do(exchange.get_json("/v1/models", self._retry))
        return list(page["data"])

    @property
    def server(self) -> object:
        """Which server this is: clients with equal ones speak to the same."""
        return self._settings.server

    @property
    def _retry(self) -> Retry:
        return self._settings.retry

    async def _http(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        http = self._per_loop.get(loop)
        if http is None:
            transport = None
            if self._settings.local is not None:
                await asyncio.to_thread(self._settings.local.start)
                transport = AsyncTransport(self._settings.local)
            http = self._per_loop[loop] = httpx.AsyncClient(
                base_url=self._settings.base_url,
                headers=self._settings.headers,
                transport=transport,
                limits=LIMITS,
            )
        return http

    async def _do(self, flow: Flow[T]) -> T:
        """Run a flow in this loop."""
        http = await self._http()
        answer: Reply | None = None
        failure: ServerUnreachableError | None = None
        while True:
            try:
                what = flow.throw(failure) if failure is not None else flow.send(answer)
            except StopIteration as end:
                value: T = end.value
                return value
            answer, failure = None, None
            if isinstance(what, Pause):
                await asyncio.sleep(what.delay_s)
                continue
            try:
                answer = await self._ask(http, what)
                self._settings.is_known = True
            except httpx.TransportError as problem:
                failure = self._settings.unreachable(problem)

    async def _ask(self, http: httpx.AsyncClient, request: Request) -> Reply:
        sent = http.build_request(**self._settings.arguments(request))
        response = await http.send(sent, stream=request.is_followed)
        if not request.is_followed:
            return Reply(response.status_code, response.headers, response.content)
        if is_stream(response):
            return Reply(response.status_code, response.headers, b"", response)
        async with aclosing(response):
            return Reply(response.status_code, response.headers, await response.aread())

    async def _events(
        self,
        program: str,
        after: int,
        types: Collection[EventType] | None,
        opened: Opened | None,
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(self._batches(program, after, types, opened)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def _batches(
        self,
        program: str,
        after: int,
        types: Collection[EventType] | None,
        opened: Opened | None,
    ) -> AsyncGenerator[list[Event], None]:
        """Events in lists of what came at once."""
        http = await self._http()
        follower = Follower(self._settings, program, after, types)
        if opened is not None and not opened.serves(after, types):
            await opened.response.aclose()
            opened = None
        while not follower.is_over:
            connected: contextlib.AbstractAsyncContextManager[httpx.Response]
            if opened is not None:
                connected, opened = aclosing(opened.response), None
            else:
                connected = http.stream(**follower.arguments())
            try:
                async with connected as response:
                    if response.status_code >= 400:
                        body = await response.aread()
                        follower.refused(Reply(response.status_code, response.headers, body))
                    else:
                        async for chunk in response.aiter_raw():
                            yield follower.feed(chunk)
            except httpx.TransportError as problem:
                follower.broken(problem)
            if follower.may_have_ended():
                status = await self._do(exchange.status(program, self._retry))
                follower.is_over = status.status in ENDED
            if not follower.is_over:
                await asyncio.sleep(follower.pause_s())


class AsyncRun:
    """A program on the server."""

    def __init__(
        self,
        client: AsyncClient,
        accepted: Accepted,
        program: Any = None,
        opened: Opened | None = None,
    ) -> None:
        self._client = client
        self._program = program
        """As it was submitted here; None if it was there before."""
        self._opened = opened
        self.id = accepted.id
        self.outputs = accepted.outputs
        """Names of the program's outputs."""

    def __repr__(self) -> str:
        return f"AsyncRun({self.id!r})"

    async def get(self, variable: str, *, wait_s: float | None = None) -> Json:
        """Wait for the value of a variable; see `Run.get`."""
        return await self._client._do(
            exchange.get(self.id, variable, self._retry, wait_s=wait_s, clock=time.monotonic)
        )

    async def status(self) -> ProgramStatus:
        """What is known about the program now."""
        return await self._client._do(exchange.status(self.id, self._retry))

    def events(
        self, after: int = 0, *, types: Collection[EventType] | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events to the program's end; see `Run.events`."""
        opened, self._opened = self._opened, None
        return self._client._events(self.id, after, types, opened)

    async def put(
        self, variable: str, value: Json, *, request_id: str | None = None
    ) -> VariableStatus:
        """Give a variable its value; see `Run.put`."""
        answer = PutValue(value=value, request_id=request_id)
        return await self._client._do(exchange.put(self.id, variable, answer, self._retry))

    async def append(self, more: Append | Mapping[str, Json]) -> ProgramStatus:
        """Add nodes to a program that was submitted with `open`, or close it."""
        return await self._client._do(exchange.append(self.id, more, self._retry))

    async def cancel(self) -> ProgramStatus:
        """Stop the program; what has ended stays as it is."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.response.aclose()
        return await self._client._do(exchange.cancel(self.id, self._retry))

    async def result(self, *, wait_s: float | None = None) -> dict[str, Json]:
        """Wait for all outputs; see `Run.result`."""
        opened, found = self._opened, {}
        if wait_s is None and opened is not None:
            self._opened = None
            found = await self._committed(opened)
        return {
            name: found[name] if name in found else await self.get(name, wait_s=wait_s)
            for name in self.outputs
        }

    async def _committed(self, opened: Opened) -> dict[str, Json]:
        """Values of the program, once it has ended or all outputs are there."""
        found: dict[str, Json] = {}
        reading = self._client._batches(self.id, 0, opened.types, opened)
        async with aclosing(reading) as batches:
            async for events in batches:
                found |= committed(events)
                if found.keys() >= set(self.outputs) and not ends(events):
                    break
        return found

    async def receipt(self) -> Receipt:
        """Wait for the program's end and return what it cost."""
        status = await self.status()
        if status.status not in ENDED:
            async with aclosing(self.events()) as events:
                async for _ in events:
                    pass
            status = await self.status()
        return status.receipt or Receipt()

    async def serve_client_steps(self, functions: Mapping[str, Function]) -> Result:
        """Run the program's client steps until it ends; see `Client.run`."""
        desk = self._client._settings.desk
        status = None if self._program is not None else await self.status()
        shift = desk.open(self.id, self.outputs, status, self._program)
        answers: set[asyncio.Task[None]] = set()
        try:
            async with aclosing(self.events()) as events:
                async for event in events:
                    step = shift.take(event, functions)
                    if step is not None:
                        task = asyncio.create_task(self._answer(shift, step))
                        answers.add(task)
                        task.add_done_callback(answers.discard)
            for name in shift.missing():
                with contextlib.suppress(ConureError):
                    shift.found(name, await self.get(name, wait_s=0))
            return shift.result(await self.status() if shift.needs_status() else None)
        finally:
            for task in answers:
                task.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
            desk.close(self.id)

    @property
    def _retry(self) -> Retry:
        return self._client._retry

    async def _answer(self, shift: Shift, step: Step) -> None:
        # Whatever happens here must reach the server, or the program waits for its timeout.
        try:
            if inspect.iscoroutinefunction(step.function):
                value = await step.function(**step.args)
            else:
                value = await asyncio.to_thread(step.function, **step.args)
            answer = answer_of(step, value)
        except Exception as problem:  # told to the server as the step's error
            answer = shift.failed(step, problem)
        refused = partial(shift.failed, step)
        flow = exchange.answer(self.id, step.output, answer, self._retry, refused=refused)
        try:
            await self._client._do(flow)
        except (ConflictError, NotFoundError):
            pass  # answered before, or the program is gone
        except ConureError as problem:
            logger.warning("client step not answered step=%s error=%r", step.name, problem)
