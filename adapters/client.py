"""Programs from Python: submit one, wait for its values, follow it, answer its questions.

`Client` is for threads, `AsyncClient` for coroutines; both say the same things (`exchange`)
over HTTP, or to an application in this process (`app=`). Knows connections and who runs
the functions of client steps. Refuses to know how a program is made.

Kept true: an event stream goes on where it broke; a client step is run at most once per
request of the server in one client, however often the request is seen.

    with Client() as client:
        run = client.submit({"nodes": [...], "outputs": ["test"]}, inputs={"task": "..."})
        print(run.get("test"))
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Collection, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar

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
from .asgi import Application, SyncTransport
from .connection import LIMITS, Follower, Opened, Settings, committed, ends, is_stream, wanted
from .coroutines import AsyncClient, AsyncRun
from .exchange import (
    Flow,
    NotReadyError,
    Pause,
    Reply,
    Request,
    Retry,
    ServerUnreachableError,
)
from .steps import (
    Function,
    Result,
    Shift,
    Step,
    answer_of,
    check_functions,
)

__all__ = [
    "AsyncClient",
    "AsyncRun",
    "Client",
    "NotReadyError",
    "Result",
    "Retry",
    "Run",
    "ServerUnreachableError",
]

T = TypeVar("T")

NUM_STEP_THREADS = 16

logger = logging.getLogger(__name__)


class Client:
    """A connection to a server, for any number of threads."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        app: Application | None = None,
        timeout_s: float = 30.0,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connects nothing yet; an application in this process is started.

        Args:
            base_url: of the server. None: the variable CONURE_URL, else 127.0.0.1:8400.
            app: an ASGI application to run in this process instead (its lifespan included).
            timeout_s: for an answer, on top of what a long poll waits.
            retry: how often and how soon refused or unanswered requests are repeated.
            headers: sent with every request.
        """
        self._settings = Settings(
            base_url, app=app, timeout_s=timeout_s, retry=retry, headers=headers
        )
        transport = None
        if self._settings.local is not None:
            self._settings.local.start()
            transport = SyncTransport(self._settings.local)
        self._http = httpx.Client(
            base_url=self._settings.base_url,
            headers=self._settings.headers,
            transport=transport,
            limits=LIMITS,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and stop the application if it runs in this process."""
        self._http.close()
        if self._settings.local is not None:
            self._settings.local.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Client:
        # Copies of a model that was given a client go through the same one.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client holds connections of this process; give what is to travel a base_url instead"
        )

    def asynchronous(self) -> AsyncClient:
        """A client for coroutines to the same server; this one must outlive it."""
        return AsyncClient(settings=self._settings)

    def submit(
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
    ) -> Run:
        """Submit a program; it is on the server's disk when this returns.

        Args:
            program: a program or a whole submission, as records or as JSON.
            inputs: values of the program's inputs.
            objectives: what matters for an output: `latency`, `throughput`, ...
            options: how the submission runs.
            open: keep the graph open for `append`.
            idempotency_key: None draws one, so that a repeat after a lost answer is safe.
            follow: its events come as the answer, a round trip sooner than one could ask for
                them: to who reads `events` next, which has to be done.
            types: of those events; as in `Run.events`.

        Raises:
            ProgramError: if it cannot be a program.
            UnavailableError: if the server cannot be reached or takes nothing now.
        """
        body = exchange.submission_body(
            program, inputs=inputs, objectives=objectives, options=options, is_open=open
        )
        if not follow:
            accepted = self._do(exchange.submit(body, self._retry, key=idempotency_key))
            return Run(self, accepted, body["program"])
        flow = exchange.follow(body, self._retry, key=idempotency_key, query=wanted(types))
        accepted, response = self._do(flow)
        opened = None if response is None else Opened(response, types)
        return Run(self, accepted, body["program"], opened)

    def attach(self, program_id: str) -> Run:
        """A handle on a program that was submitted before, by anybody."""
        status = self._do(exchange.status(program_id, self._retry))
        return Run(self, exchange.accepted_of(status))

    def run(
        self,
        program: Program | Submission | Mapping[str, Json],
        inputs: Mapping[str, Json] | None = None,
        functions: Mapping[str, Function] | None = None,
        objectives: Mapping[str, Json] | None = None,
        options: Options | Mapping[str, Json] | None = None,
    ) -> Result:
        """Submit a program, run its client steps in threads here, and wait for its end.

        A program whose caller is interrupted here is cancelled.

        Args:
            program: as in `submit`.
            inputs: values of the program's inputs.
            functions: by the names of the client steps; each gets the step's `args` by name.
            objectives: as in `submit`.
            options: as in `submit`.

        Raises:
            ProgramError: if it cannot be a program, or a client step has no function.
            ConureError: if the program failed or was stopped; its cause is the exception of
                the function that failed, if one did.
        """
        body = exchange.submission_body(
            program, inputs=inputs, objectives=objectives, options=options
        )
        check_functions(body["program"], functions or {})
        run = self.submit(body, follow=True)
        try:
            return run.serve_client_steps(functions or {})
        except ConureError:
            raise
        except BaseException:
            with contextlib.suppress(ConureError):
                run.cancel()
            raise

    def models(self) -> list[dict[str, Json]]:
        """The models that programs can name, as `/v1/models` describes them."""
        page = self._do(exchange.get_json("/v1/models", self._retry))
        return list(page["data"])

    @property
    def server(self) -> object:
        """Which server this is: clients with equal ones speak to the same."""
        return self._settings.server

    @property
    def _retry(self) -> Retry:
        return self._settings.retry

    def _do(self, flow: Flow[T]) -> T:
        """Run a flow in this thread."""
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
                time.sleep(what.delay_s)
                continue
            try:
                answer = self._ask(what)
                self._settings.is_known = True
            except httpx.TransportError as problem:
                failure = self._settings.unreachable(problem)

    def _ask(self, request: Request) -> Reply:
        http = self._http.build_request(**self._settings.arguments(request))
        response = self._http.send(http, stream=request.is_followed)
        if not request.is_followed:
            return Reply(response.status_code, response.headers, response.content)
        if is_stream(response):
            return Reply(response.status_code, response.headers, b"", response)
        with contextlib.closing(response):
            return Reply(response.status_code, response.headers, response.read())

    def _events(
        self,
        program: str,
        after: int,
        types: Collection[EventType] | None,
        opened: Opened | None,
    ) -> Generator[Event, None, None]:
        with contextlib.closing(self._batches(program, after, types, opened)) as batches:
            for events in batches:
                yield from events

    def _batches(
        self,
        program: str,
        after: int,
        types: Collection[EventType] | None,
        opened: Opened | None,
    ) -> Generator[list[Event], None, None]:
        """Events in lists of what came at once."""
        follower = Follower(self._settings, program, after, types)
        if opened is not None and not opened.serves(after, types):
            opened.response.close()
            opened = None
        while not follower.is_over:
            connected: contextlib.AbstractContextManager[httpx.Response]
            if opened is not None:
                connected, opened = contextlib.closing(opened.response), None
            else:
                connected = self._http.stream(**follower.arguments())
            try:
                with connected as response:
                    if response.status_code >= 400:
                        body = response.read()
                        follower.refused(Reply(response.status_code, response.headers, body))
                    else:
                        for chunk in response.iter_raw():
                            yield follower.feed(chunk)
            except httpx.TransportError as problem:
                follower.broken(problem)
            if follower.may_have_ended():
                status = self._do(exchange.status(program, self._retry))
                follower.is_over = status.status in ENDED
            if not follower.is_over:
                time.sleep(follower.pause_s())


class Run:
    """A program on the server."""

    def __init__(
        self, client: Client, accepted: Accepted, program: Any = None, opened: Opened | None = None
    ) -> None:
        self._client = client
        self._program = program
        """As it was submitted here; None if it was there before."""
        self._opened = opened
        self.id = accepted.id
        self.outputs = accepted.outputs
        """Names of the program's outputs."""

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def get(self, variable: str, *, wait_s: float | None = None) -> Json:
        """Wait for the value of a variable; None waits as long as it takes.

        Raises:
            NotReadyError: if there is no value within `wait_s` seconds.
            ConureError: if there will be none: the server's code says why.
        """
        return self._client._do(
            exchange.get(self.id, variable, self._retry, wait_s=wait_s, clock=time.monotonic)
        )

    def status(self) -> ProgramStatus:
        """What is known about the program now."""
        return self._client._do(exchange.status(self.id, self._retry))

    def events(
        self, after: int = 0, *, types: Collection[EventType] | None = None
    ) -> Generator[Event, None, None]:
        """Events with a sequence number above `after`, then what comes, to the program's end.

        A broken connection is opened anew and goes on where it broke; a text in the making
        then begins again with one delta at offset 0.

        Args:
            after: what was seen already.
            types: only these, and the last one. None: all.
        """
        opened, self._opened = self._opened, None
        return self._client._events(self.id, after, types, opened)

    def put(self, variable: str, value: Json, *, request_id: str | None = None) -> VariableStatus:
        """Give a variable its value; the same value again is safe.

        Raises:
            ConflictError: if it has another value.
        """
        answer = PutValue(value=value, request_id=request_id)
        return self._client._do(exchange.put(self.id, variable, answer, self._retry))

    def append(self, more: Append | Mapping[str, Json]) -> ProgramStatus:
        """Add nodes to a program that was submitted with `open`, or close it."""
        return self._client._do(exchange.append(self.id, more, self._retry))

    def cancel(self) -> ProgramStatus:
        """Stop the program; what has ended stays as it is."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.response.close()
        return self._client._do(exchange.cancel(self.id, self._retry))

    def result(self, *, wait_s: float | None = None) -> dict[str, Json]:
        """Wait for all outputs, at most `wait_s` seconds for each.

        Where the events come with the answer to the submission, that is where they are read.
        """
        opened, found = self._opened, {}
        if wait_s is None and opened is not None:
            self._opened = None
            found = self._committed(opened)
        return {
            name: found[name] if name in found else self.get(name, wait_s=wait_s)
            for name in self.outputs
        }

    def _committed(self, opened: Opened) -> dict[str, Json]:
        """Values of the program, once it has ended or all outputs are there."""
        found: dict[str, Json] = {}
        reading = self._client._batches(self.id, 0, opened.types, opened)
        with contextlib.closing(reading) as batches:
            for events in batches:
                found |= committed(events)
                if found.keys() >= set(self.outputs) and not ends(events):
                    break
        return found

    def receipt(self) -> Receipt:
        """Wait for the program's end and return what it cost."""
        status = self.status()
        if status.status not in ENDED:
            for _ in self.events():
                pass
            status = self.status()
        return status.receipt or Receipt()

    def serve_client_steps(self, functions: Mapping[str, Function]) -> Result:
        """Run the program's client steps in threads until it ends; see `Client.run`."""
        desk = self._client._settings.desk
        status = None if self._program is not None else self.status()
        shift = desk.open(self.id, self.outputs, status, self._program)
        pool = ThreadPoolExecutor(NUM_STEP_THREADS, thread_name_prefix="conure-step")
        try:
            with contextlib.closing(self.events()) as events:
                for event in events:
                    step = shift.take(event, functions)
                    if step is not None:
                        pool.submit(self._answer, shift, step)
            for name in shift.missing():
                with contextlib.suppress(ConureError):
                    shift.found(name, self.get(name, wait_s=0))
            return shift.result(self.status() if shift.needs_status() else None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            desk.close(self.id)

    @property
    def _retry(self) -> Retry:
        return self._client._retry

    def _answer(self, shift: Shift, step: Step) -> None:
        # Whatever happens here must reach the server, or the program waits for its timeout.
        try:
            value = step.function(**step.args)
            if inspect.iscoroutine(value):
                value = asyncio.run(_awaited(value))
            answer = answer_of(step, value)
        except Exception as problem:  # told to the server as the step's error
            answer = shift.failed(step, problem)
        refused = partial(shift.failed, step)
        flow = exchange.answer(self.id, step.output, answer, self._retry, refused=refused)
        try:
            self._client._do(flow)
        except (ConflictError, NotFoundError):
            pass  # answered before, or the program is gone
        except ConureError as problem:
            logger.warning("client step not answered step=%s error=%r", step.name, problem)


async def _awaited(work: Coroutine[Any, Any, T]) -> T:
    return await work
