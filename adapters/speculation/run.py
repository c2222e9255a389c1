"""The driver of a run: it sends the run's requests, reads its events and waits for its calls.

Requests and events are tasks of the client's I/O thread. Calls can be awaited by threads and by
coroutines of any event loop, in one run.

Out of scope: what is sent (`outbox`) and what events mean (`registry`).

Invariants: every call that is waited for ends with an answer or an exception, also if the server
becomes unreachable. After the end of the run, its programs are closed or cancelled; a program whose
client has exited ends by its lease. Only methods that are documented to block do so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from typing import Final, TypeAlias

from conure.server.program.errors import ConureError, RunError
from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType

from ..client import AsyncClient, AsyncRun, Client, NotReadyError
from ..client.cancellation import presumed_accepted
from ..client.owned_generator import OwnedGenerator
from .answer_stream import RESULT_EVENTS, TEXT_EVENTS, AnswerStream, program_failure
from .outbox import OpenProgram, OutboxRequest, SpeculativeOutbox
from .planned_call import PlannedCall
from .registry import CallListener, CallRecord, PlanFailedError, PlannedCallRegistry
from .request_tasks import RequestTasks
from .siblings import SiblingWait

Resend: TypeAlias = Callable[[CallRecord, PlanFailedError], CallRecord]
"""Sends a call of the application whose planned call failed because of its plan."""

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S: Final = 5.0
"""How long the end of a run waits until its programs are cancelled."""
NUM_YIELDS: Final = 3
"""How often the I/O thread lets other threads run before it sends values and later calls."""
ARRIVAL_S: Final = 2.0
"""How long the server holds an append that arrives before the submission of its program."""


class TimeLimit:
    """The time that a call may take, from the first wait for an event of one of its answers."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self.timeout_s: Final = timeout_s
        self._clock = clock
        self._end_s: float | None = None

    def left_s(self) -> float | None:
        """Return the time that is left; None without a limit."""
        if self.timeout_s is None:
            return None
        now_s = self._clock()
        if self._end_s is None:
            self._end_s = now_s + self.timeout_s
        return max(0.0, self._end_s - now_s)

    def error(self) -> NotReadyError:
        """Return the error of a call whose time is over."""
        assert self.timeout_s is not None
        return NotReadyError.after(self.timeout_s)

    def first_wait_s(self, client: Client) -> float | None:
        """Return how long the call waits for the first answer of the server.

        It is longer than the limit, so that a server that was never reached is reported as
        unreachable and not as a timeout.
        """
        left_s = self.left_s()
        return None if left_s is None else left_s + client.first_contact_timeout_s


class SpeculativeRun:
    """One run on one server."""

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        is_streamed: bool,
        may_grow: bool = False,
        has_outputs: bool = True,
        session: str | None = None,
        program_ids: list[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send nothing yet.

        Args:
            client: client of the server.
            name: name of the programs.
            is_streamed: whether answers are read as streams. Otherwise texts are not requested
                from the server before `follow_texts`.
            may_grow: see `SpeculativeOutbox`.
            has_outputs: see `SpeculativeOutbox`.
            session: see `SpeculativeOutbox`.
            program_ids: see `SpeculativeOutbox`.
            clock: measures the time limits of calls, in seconds.
        """
        self.calls = PlannedCallRegistry()
        self.outbox = SpeculativeOutbox(
            self.calls,
            name,
            may_grow=may_grow,
            has_outputs=has_outputs,
            session=session,
            program_ids=program_ids,
        )
        self.identity = client.identity
        """Identifies the server and the sender of the calls: see `Client.identity`."""
        self._client = client
        self._name = name
        self.clock = clock
        """Measures the time limits of calls, in seconds."""
        self._is_streamed = is_streamed
        self._first_request_ended: Future[None] = Future()
        """Done when the first request has an answer or has failed."""
        self._is_flushing = False
        """Whether the I/O thread will look for requests."""
        self._writing = RequestTasks()
        self._sibling_wait = SiblingWait(self.calls.sibling_wait_s, self.calls.lock)
        self._is_idle: Future[None] = Future()
        """Done while no request is under way."""
        self._is_idle.set_result(None)

    # --- calls ----------------------------------------------------------------------------

    def plan(
        self,
        calls: Iterable[PlannedCall],
        values: Mapping[str, Json] | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        """Add planned calls and values that they read, and send what can run.

        `is_alone`: the application adds nothing at about the same moment.
        """
        self.calls.plan(calls, values)
        self.flush(0 if is_alone else NUM_YIELDS)

    def set_values(self, values: Mapping[str, Json]) -> None:
        """Add values that the application computed, and send them."""
        self.calls.set_values(values)
        self.flush()

    def add_unplanned(self, call: PlannedCall) -> CallRecord:
        """Add a call that the application makes, and send it."""
        record = self.calls.add_unplanned(call)
        self.flush()
        return record

    def flush(self, num_yields: int = NUM_YIELDS) -> None:
        """Start to send what is pending, together with what the application adds meanwhile.

        `num_yields`: how often the I/O thread lets other threads run before.
        """
        with self.calls.lock:
            if self._is_flushing:
                self._sibling_wait.end_if_known(self._client.io_thread.start_task)
                return
            if not self.outbox.has_work:
                if not (self.outbox.is_busy or self._is_idle.done()):
                    self._is_idle.set_result(None)
                return
            self._is_flushing = True
            if self._is_idle.done():
                self._is_idle = Future()
            try:
                self._client.io_thread.start_task(self._send_pending, num_yields)
            except RuntimeError as failure:  # the client is closed
                while requests := self._taken():
                    for request in requests:
                        self._rejected(request, failure)
                if not self._first_request_ended.done():
                    self._first_request_ended.set_result(None)

    def follow_texts(self) -> None:
        """Read texts from now on, including those of calls that were sent before."""
        with self.calls.lock:
            if self._is_streamed:
                return
            self._is_streamed = True
            for program in self.outbox.programs:
                if program.run is not None:
                    with contextlib.suppress(RuntimeError):  # closed: `flush` has ended the calls
                        self._client.io_thread.start_task(self._read_texts, program.run)

    # --- answers --------------------------------------------------------------------------

    def follow(
        self, record: CallRecord, resend: Resend, limit: TimeLimit
    ) -> Generator[tuple[AnswerStream, Event], None, None]:
        """Yield the events of a call, each with the stream to feed it to. Blocks.

        Ends when the answer is complete. If the planned call failed because of its plan, the events
        are those of the call that `resend` sends.

        Raises:
            NotReadyError: if the call has not ended within the limit.
            Exception: why the call has no answer.
        """
        while True:
            stream = AnswerStream(record.variable, record.node_id)
            try:
                with contextlib.closing(self._events(record, limit)) as events:
                    for event in events:
                        yield stream, event
                        if stream.is_complete:
                            return
            except PlanFailedError as failure:
                record = resend(record, failure)

    async def afollow(
        self, record: CallRecord, resend: Resend, limit: TimeLimit
    ) -> AsyncGenerator[tuple[AnswerStream, Event], None]:
        """`follow`, for coroutines of any loop."""
        while True:
            stream = AnswerStream(record.variable, record.node_id)
            try:
                async with OwnedGenerator(self._aevents(record, limit)) as events:
                    async for event in events:
                        yield stream, event
                        if stream.is_complete:
                            return
            except PlanFailedError as failure:
                record = resend(record, failure)

    def _events(self, record: CallRecord, limit: TimeLimit) -> Generator[Event, None, None]:
        """Yield the events of a call until it ends."""
        if not self._client.may_wait:
            # The garbage collector runs here, and closes a generator of the application that reads
            # its input to the end, as those of LangChain do. End it without a traceback.
            raise GeneratorExit
        inbox: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self.calls.listen(record, inbox.put)
        try:
            is_first = not self._first_request_ended.done()
            if limit.timeout_s is not None and record.is_open and is_first:
                with contextlib.suppress(TimeoutError):
                    self._first_request_ended.result(limit.first_wait_s(self._client))
            while True:
                try:
                    event = inbox.get(timeout=limit.left_s())
                except queue.Empty:
                    raise limit.error() from None
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._unlisten(record, inbox.put)

    async def _aevents(self, record: CallRecord, limit: TimeLimit) -> AsyncGenerator[Event, None]:
        """`_events`, for coroutines of any loop."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event | Exception] = asyncio.Queue()

        def put(event: Event | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(inbox.put_nowait, event)

        self.calls.listen(record, put)
        try:
            is_first = not self._first_request_ended.done()
            if limit.timeout_s is not None and record.is_open and is_first:
                ended = asyncio.wrap_future(self._first_request_ended)
                await asyncio.wait([ended], timeout=limit.first_wait_s(self._client))
            while True:
                try:
                    # `wait_for` would drop an event that has arrived before the time was over.
                    async with asyncio.timeout(limit.left_s()):
                        event = await inbox.get()
                except TimeoutError:
                    raise limit.error() from None
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._unlisten(record, put)

    def _unlisten(self, record: CallRecord, listener: CallListener) -> None:
        self.calls.unlisten(record, listener)
        if record.is_open:
            # The I/O thread ends the call. The garbage collector may run this method.
            self._client.io_thread.wake(self.flush)

    # --- end ------------------------------------------------------------------------------

    def end(self, *, is_cancelled: bool, keeps_awaited: bool = False) -> None:
        """Start to close the programs, or to cancel them; see `SpeculativeOutbox.end`."""
        self.outbox.end(is_cancelled=is_cancelled, keeps_awaited=keeps_awaited)
        self.flush()

    def wait_until_sent(self) -> None:
        """Block until the pending requests are answered, at most `CANCEL_TIMEOUT_S`."""
        if self._client.may_wait:
            with contextlib.suppress(TimeoutError):
                self._is_idle.result(CANCEL_TIMEOUT_S)

    async def await_until_sent(self) -> None:
        """`wait_until_sent`, for coroutines; completes even if the caller is cancelled."""
        idle = asyncio.ensure_future(
            asyncio.wait([asyncio.wrap_future(self._is_idle)], timeout=CANCEL_TIMEOUT_S)
        )
        await asyncio.shield(idle)

    # --- tasks of the I/O thread ----------------------------------------------------------

    async def _send_pending(self, num_yields: int) -> None:
        # Parallel parts of an application have their values within a millisecond. A call that
        # arrives after the others may have to wait for a step of the engine.
        for _ in range(num_yields):
            await asyncio.sleep(0)
        await self._sibling_wait.run()
        requests = self._taken()
        # A request that is cancelled leaves the others under way.
        await asyncio.gather(*map(self._write, requests), return_exceptions=True)

    def _taken(self) -> list[OutboxRequest]:
        """Return what can be sent now."""
        with self.calls.lock:
            self._is_flushing = False
            requests = list(iter(self.outbox.next, None))
            if not (self.outbox.is_busy or self._is_idle.done()):
                self._is_idle.set_result(None)
            return requests

    async def _write(self, request: OutboxRequest) -> None:
        try:
            with self._writing.running(request):
                await self._carry_out(request)
        except asyncio.CancelledError:
            self._rejected(request, RuntimeError("the client was closed"))
            raise
        except Exception as failure:
            self._rejected(request, failure)
        finally:
            with self.calls.lock:
                if not self._first_request_ended.done():
                    self._first_request_ended.set_result(None)
            self.flush()

    async def _carry_out(self, request: OutboxRequest) -> None:
        program = request.program
        if request.action == "submit":
            await self._submit(request)
        elif request.action == "cancel":
            if program.run is None and await self._writing.cancel_unanswered_requests(program):
                twin = self._client.twin
                self._client.io_thread.start_task(_cancel_unanswered, twin, program.id)
            if program.run is not None:
                self.calls.note_started(await program.run.cancel())
            self.outbox.accepted(request)
        else:
            wait_s = ARRIVAL_S if program.run is None else 0.0
            await self._client.twin.append(program.id, request.body, wait_s=wait_s)
            self.outbox.accepted(request)

    async def _submit(self, request: OutboxRequest) -> None:
        types = self._types
        run = await self._client.twin.submit(
            request.body, open=not request.is_complete, follow=True, types=types
        )
        # Taken before `follow_texts` can read events of this run.
        events = run.events(types=types)
        start = self._client.io_thread.start_task
        with self.calls.lock:
            self.outbox.accepted(request, run)
            lacks_texts = self._types != types  # `follow_texts` was called during the request
        start(self._read_events, request.program, events)
        if lacks_texts:
            start(self._read_texts, run)

    async def _read_events(self, program: OpenProgram, events: AsyncGenerator[Event, None]) -> None:
        try:
            async with OwnedGenerator(events) as owned:
                async for event in owned:
                    self._read(program, event)
            # A program that ended elsewhere may leave a stream without its last events.
            if not program.has_finished:
                message = f"the events of program {program.id} ended early"
                self._read_failed(program, RunError("run.ended", message))
        except asyncio.CancelledError:
            self._read_failed(program, RunError("run.ended", "the client was closed"))
            raise
        except Exception as failure:
            self._read_failed(program, failure)

    async def _read_texts(self, run: AsyncRun) -> None:
        # Results and errors are reported by the other reader.
        with contextlib.suppress(ConureError, RuntimeError):
            async with OwnedGenerator(run.events(types=TEXT_EVENTS)) as events:
                async for event in events:
                    if event.type in TEXT_EVENTS:
                        self.calls.on_event(event)

    @property
    def _types(self) -> frozenset[EventType]:
        return RESULT_EVENTS | TEXT_EVENTS if self._is_streamed else RESULT_EVENTS

    def _rejected(self, request: OutboxRequest, failure: Exception) -> None:
        if request.action in ("submit", "append") and not request.program.is_cancelled:
            logger.info("calls of %s not accepted: %s", self._name, failure)
        self.outbox.rejected(request, failure)

    def _read_failed(self, program: OpenProgram, failure: Exception) -> None:
        # After the end of the run its client may be closed.
        if not isinstance(failure, ConureError) and self.calls.failure is None:
            logger.exception("events of %s could not be read", program.id)
        self.outbox.program_ended(program, failure, has_finished=False)

    def _read(self, program: OpenProgram, event: Event) -> None:
        if event.type == "program.finished":
            self.outbox.program_ended(program, program_failure(event), has_finished=True)
            self.flush()
            return
        self.outbox.on_event(program, event)
        if event.type in ("variable.committed", "node.failed"):
            self.flush()


async def _cancel_unanswered(client: AsyncClient, program: str) -> None:
    """Cancel a program that the server may have accepted, without an answer to its submission.

    If the server accepts it later, the lease ends it.
    """
    with contextlib.suppress(ConureError, RuntimeError):
        await AsyncRun(client, presumed_accepted(program)).cancel()
