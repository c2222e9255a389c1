"""A run of a chain beside its program: what is sent, what is read, how calls wait.

`Replay` for threads, `AsyncReplay` for coroutines; both keep a `Board` and speak with one
session of the server. The first plan travels while the chain begins. Knows connections and
waiting. Refuses to know Runnables.

Kept true: a plan that the server refuses is forgotten, and its calls are made as if there
had been none; whatever happens, the session is closed or cancelled at the end, and one whose
client is gone dies of its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.outputs import ChatGenerationChunk, ChatResult

from conure.server.program.errors import ConureError, UnavailableError
from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType

from ..client import AsyncClient, AsyncRun, Client, NotReadyError, Run
from .board import HEARD, TEXTS, Answer, Board, NotPlannedError
from .plan import Awaited, Plan
from .stream import AnswerStream, Whole, result_of
from .tally import Tally

logger = logging.getLogger(__name__)

LEAVING_S = 5.0
"""How long a chain that is over waits for its first plan to arrive, so that it can be ended."""

_CLOSE: dict[str, Json] = {"close": True}


class Replay:
    """One run of a chain, for threads."""

    def __init__(self, client: Client, name: str, *, is_streamed: bool) -> None:
        """Sends nothing yet.

        Args:
            client: of the server.
            name: of the chain.
            is_streamed: somebody wants answers in pieces. Else the server is not asked for
                texts that still grow before a call of the chain is.
        """
        self.board = Board()
        self._client = client
        self._name = name
        self._is_streamed = is_streamed
        self._session: Run | None = None
        """Takes more nodes."""
        self._runs: list[Run] = []
        self._opening: threading.Thread | None = None
        """Sends the first plan."""
        self._sending = threading.Lock()
        self._is_over = False

    def is_of(self, client: Client) -> bool:
        """Whether it runs on this client's server."""
        return self._client.server == client.server

    def begin(self, plans: Sequence[tuple[Plan, Mapping[str, Json]]]) -> None:
        """The chain begins something that has a plan, with the values that are there."""
        self.board.add(plans)
        if self._opening is None:
            self._open()
        else:
            self._send_plan()

    def observe(self, awaited: Awaited, made: Any) -> None:
        """The chain made a value that the plan waits for."""
        self.board.observe(awaited, made)
        self._send_plan()

    def result(self, nodes: Sequence[dict[str, Json]], timeout_s: float | None) -> ChatResult:
        """The answers to a call of the chain, one for each node.

        Raises:
            NotReadyError: if one is not there within `timeout_s` seconds.
            ConureError: if there will be none.
        """
        answers = self._claim(nodes)
        pairs = zip(answers, nodes, strict=True)
        return result_of([self._whole(answer, node, timeout_s) for answer, node in pairs])

    def _whole(self, answer: Answer, node: dict[str, Json], timeout_s: float | None) -> Whole:
        stream = AnswerStream(answer.variable, answer.node)
        try:
            for event in self._events(answer, timeout_s):
                stream.hear(event)
                if stream.value is not None:
                    return Whole(stream.value, stream.program)
        except NotPlannedError:
            (answer,) = self._claim([node])
            return self._whole(answer, node, timeout_s)
        raise AssertionError("events of a call end with its answer or an error")

    def chunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> Generator[ChatGenerationChunk, None, None]:
        """The answer to a call of the chain, in pieces; raises as `result`."""
        (answer,) = self._claim([node])
        self._stream()
        stream = AnswerStream(answer.variable, answer.node)
        try:
            for event in self._events(answer, timeout_s):
                yield from stream.feed(event)
                if stream.is_whole:
                    return
        except NotPlannedError:
            yield from self.chunks(node, timeout_s)

    def end(self, *, is_failed: bool) -> Tally:
        """The chain is over: let go of the session."""
        try:
            if self._opening is not None:
                self._opening.join(LEAVING_S)
        finally:
            self._is_over = True
        tally = self.board.end()
        if is_failed or not self.board.is_settled():
            # Nothing may be left running, and nobody waits for how it went.
            for run in self._runs:
                with _quietly():
                    self.board.stopped(run.cancel())
        elif self._session is not None:
            threading.Thread(target=self._close, args=(self._session,), daemon=True).start()
        return tally

    def _close(self, session: Run) -> None:
        with _quietly():
            session.append(_CLOSE)

    def _claim(self, nodes: Sequence[dict[str, Json]]) -> list[Answer]:
        answers = [self.board.claim(node) for node in nodes]
        if self.board.has_calls_to_send():
            with contextlib.suppress(ConureError):  # who listens is told
                self._send()
        return answers

    def _stream(self) -> None:
        """Somebody wants an answer in pieces: follow the texts, also of what was sent before."""
        if self._is_streamed:
            return
        with self._sending:
            if self._is_streamed:
                return
            self._is_streamed = True
            for run in self._runs:
                threading.Thread(target=self._read_texts, args=(run,), daemon=True).start()

    def _events(self, answer: Answer, timeout_s: float | None) -> Iterator[Event]:
        inbox: queue.SimpleQueue[Event | ConureError] = queue.SimpleQueue()
        self.board.listen(answer, inbox.put)
        if self._opening is not None:
            self._opening.join()  # a server that cannot be reached is told as that, not as late
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            try:
                event = inbox.get(timeout=left_s)
            except queue.Empty:
                raise _late(timeout_s) from None
            if isinstance(event, ConureError):
                raise event
            yield event

    def _open(self) -> None:
        """Send the first plan while the chain begins; nothing else is sent meanwhile."""
        self._sending.acquire()
        body = self.board.take()
        if body is None:
            self._sending.release()
            return
        deliver = contextvars.copy_context().run
        arguments = (self._deliver_plan, body)
        self._opening = threading.Thread(target=deliver, args=arguments, daemon=True)
        self._opening.start()

    def _deliver_plan(self, body: dict[str, Any]) -> None:
        try:
            self._deliver(body)
        except Exception as problem:
            _dropped(self._name, problem)
        finally:
            self._sending.release()

    def _send_plan(self) -> None:
        try:
            self._send()
        except Exception as problem:
            _dropped(self._name, problem)

    def _send(self) -> None:
        """Send what has come together; whoever comes meanwhile sends along."""
        with self._sending:
            body = self.board.take()
            if body is not None:
                self._deliver(body)

    def _deliver(self, body: dict[str, Any]) -> None:
        is_whole = body.pop("whole")
        try:
            if self._session is not None:
                self._session.append(body)
                self.board.sent(body, self._session.id)
                return
            run = self._client.submit(_submission(body, self._name), open=not is_whole)
        except Exception as problem:
            self.board.drop(body, _told(problem))
            raise
        self._runs.append(run)
        self._session = None if is_whole else run
        self.board.sent(body, run.id)
        if self._is_over:  # it took too long: nobody is there to end it
            with _quietly():
                run.cancel()
            return
        types = HEARD | TEXTS if self._is_streamed else HEARD
        threading.Thread(target=self._read, args=(run, types), daemon=True).start()

    def _read(self, run: Run, types: frozenset[EventType]) -> None:
        try:
            for event in run.events(types=types):
                self.board.hear(event)
        except ConureError as problem:
            self.board.fail(problem)
        except Exception as problem:
            if not self._is_over:  # else the client may be closed by now
                logger.exception("events of %s could not be read", run.id)
            self.board.fail(_told(problem))

    def _read_texts(self, run: Run) -> None:
        # What else happens, and what goes wrong, is the other reader's to tell: an answer
        # is whole when it is committed.
        with contextlib.suppress(ConureError, RuntimeError):
            for event in run.events(types=TEXTS):
                if event.type in TEXTS:
                    self.board.hear(event)


class AsyncReplay:
    """One run of a chain, for coroutines of one loop; see `Replay`."""

    def __init__(self, client: AsyncClient, name: str, *, is_streamed: bool) -> None:
        self.board = Board()
        self._client = client
        self._name = name
        self._is_streamed = is_streamed
        self._session: AsyncRun | None = None
        self._runs: list[AsyncRun] = []
        self._opening: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self._is_over = False
        self._reading: list[asyncio.Task[None]] = []

    def is_of(self, client: AsyncClient) -> bool:
        """Whether it runs on this client's server."""
        return self._client.server == client.server

    async def begin(self, plans: Sequence[tuple[Plan, Mapping[str, Json]]]) -> None:
        """The chain begins something that has a plan, with the values that are there."""
        self.board.add(plans)
        if self._opening is None:
            await self._open()
        else:
            await self._send_plan()

    async def observe(self, awaited: Awaited, made: Any) -> None:
        """The chain made a value that the plan waits for."""
        self.board.observe(awaited, made)
        await self._send_plan()

    async def result(self, nodes: Sequence[dict[str, Json]], timeout_s: float | None) -> ChatResult:
        """The answers to a call of the chain; raises as `Replay.result`."""
        answers = await self._claim(nodes)
        pairs = zip(answers, nodes, strict=True)
        return result_of([await self._whole(answer, node, timeout_s) for answer, node in pairs])

    async def _whole(self, answer: Answer, node: dict[str, Json], timeout_s: float | None) -> Whole:
        stream = AnswerStream(answer.variable, answer.node)
        try:
            async for event in self._events(answer, timeout_s):
                stream.hear(event)
                if stream.value is not None:
                    return Whole(stream.value, stream.program)
        except NotPlannedError:
            (answer,) = await self._claim([node])
            return await self._whole(answer, node, timeout_s)
        raise AssertionError("events of a call end with its answer or an error")

    async def chunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        """The answer to a call of the chain, in pieces; raises as `Replay.result`."""
        (answer,) = await self._claim([node])
        await self._stream()
        stream = AnswerStream(answer.variable, answer.node)
        try:
            async for event in self._events(answer, timeout_s):
                for chunk in stream.feed(event):
                    yield chunk
                if stream.is_whole:
                    return
        except NotPlannedError:
            async for chunk in self.chunks(node, timeout_s):
                yield chunk

    async def end(self, *, is_failed: bool) -> Tally:
        """The chain is over: let go of the session, even if who waits for that is cancelled."""
        return await asyncio.shield(self._leave(is_failed=is_failed))

    async def _leave(self, *, is_failed: bool) -> Tally:
        try:
            if self._opening is not None:
                await asyncio.wait([self._opening], timeout=LEAVING_S)
        finally:
            self._is_over = True
        tally = self.board.end()
        with _quietly():
            if is_failed or not self.board.is_settled():
                for run in self._runs:
                    self.board.stopped(await run.cancel())
            elif self._session is not None:
                await self._session.append(_CLOSE)
        for reading in self._reading:
            reading.cancel()
        if self._reading:
            await asyncio.wait(self._reading)
        return tally

    async def _claim(self, nodes: Sequence[dict[str, Json]]) -> list[Answer]:
        answers = [self.board.claim(node) for node in nodes]
        if self.board.has_calls_to_send():
            with contextlib.suppress(ConureError):
                await self._send()
        return answers

    async def _stream(self) -> None:
        """Somebody wants an answer in pieces; see `Replay._stream`."""
        if self._is_streamed:
            return
        async with self._sending:
            if self._is_streamed:
                return
            self._is_streamed = True
            self._reading += [asyncio.create_task(self._read_texts(run)) for run in self._runs]

    async def _events(self, answer: Answer, timeout_s: float | None) -> AsyncIterator[Event]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event | ConureError] = asyncio.Queue()

        def put(event: Event | ConureError) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        self.board.listen(answer, put)
        if self._opening is not None:
            await asyncio.wait([self._opening])
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            try:
                event = await asyncio.wait_for(inbox.get(), left_s)
            except TimeoutError:
                raise _late(timeout_s) from None
            if isinstance(event, ConureError):
                raise event
            yield event

    async def _open(self) -> None:
        """Send the first plan while the chain begins; nothing else is sent meanwhile."""
        await self._sending.acquire()
        body = self.board.take()
        if body is None:
            self._sending.release()
        else:
            self._opening = asyncio.create_task(self._deliver_plan(body))

    async def _deliver_plan(self, body: dict[str, Any]) -> None:
        try:
            await self._deliver(body)
        except Exception as problem:
            _dropped(self._name, problem)
        finally:
            self._sending.release()

    async def _send_plan(self) -> None:
        try:
            await self._send()
        except Exception as problem:
            _dropped(self._name, problem)

    async def _send(self) -> None:
        async with self._sending:
            body = self.board.take()
            if body is not None:
                await self._deliver(body)

    async def _deliver(self, body: dict[str, Any]) -> None:
        is_whole = body.pop("whole")
        try:
            if self._session is not None:
                await self._session.append(body)
                self.board.sent(body, self._session.id)
                return
            run = await self._client.submit(_submission(body, self._name), open=not is_whole)
        except Exception as problem:
            self.board.drop(body, _told(problem))
            raise
        self._runs.append(run)
        self._session = None if is_whole else run
        self.board.sent(body, run.id)
        if self._is_over:
            with contextlib.suppress(ConureError):
                await run.cancel()
            return
        types = HEARD | TEXTS if self._is_streamed else HEARD
        self._reading.append(asyncio.create_task(self._read(run, types)))

    async def _read(self, run: AsyncRun, types: frozenset[EventType]) -> None:
        try:
            async for event in run.events(types=types):
                self.board.hear(event)
        except ConureError as problem:
            self.board.fail(problem)
        except Exception as problem:
            logger.exception("events of %s could not be read", run.id)
            self.board.fail(_told(problem))

    async def _read_texts(self, run: AsyncRun) -> None:
        with contextlib.suppress(ConureError, RuntimeError):
            async for event in run.events(types=TEXTS):
                if event.type in TEXTS:
                    self.board.hear(event)


def _submission(body: dict[str, Any], name: str) -> dict[str, Json]:
    program = {k: body[k] for k in ("variables", "nodes", "outputs")} | {"name": name[:256]}
    # Attached: a session whose client is gone is nobody's.
    return {"program": program, "inputs": body["inputs"], "options": {"detach": False}}


def _quietly() -> contextlib.AbstractContextManager[None]:
    # A client that its owner has closed raises RuntimeError; then the lease ends the session.
    return contextlib.suppress(ConureError, RuntimeError)


def _late(timeout_s: float | None) -> NotReadyError:
    return NotReadyError("client.not_ready", f"the call has no answer after {timeout_s:g} s")


def _dropped(name: str, problem: Exception) -> None:
    logger.info("plan of %s dropped: %s", name, problem)


def _told(problem: Exception) -> ConureError:
    """What a call is told of it."""
    if isinstance(problem, ConureError):
        return problem
    return UnavailableError("client.stream", f"the connection was lost: {problem!r}")
