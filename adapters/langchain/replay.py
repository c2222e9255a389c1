"""A run of a chain beside its program: what is sent, what is read, how calls wait.

`Replay` for threads, `AsyncReplay` for coroutines; both keep a `Board` and speak with one
session of the server. Knows connections and waiting. Refuses to know Runnables.

Kept true: a plan that the server refuses is forgotten, and its calls are made as if there
had been none; whatever happens, the session is closed or cancelled at the end, and one whose
client is gone dies of its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from .board import HEARD, TEXTS, Answer, Board, Tally
from .plan import Awaited, Plan
from .stream import AnswerStream, result_of

logger = logging.getLogger(__name__)

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
        self._sending = threading.Lock()
        self._is_over = False

    def is_of(self, client: Client) -> bool:
        """Whether it runs on this client's server."""
        return self._client.server == client.server

    def begin(self, plans: Sequence[tuple[Plan, Mapping[str, Json]]]) -> None:
        """The chain begins something that has a plan, with the values that are there."""
        self.board.add(plans)
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
        return result_of([self._whole(answer, timeout_s) for answer in answers])

    def _whole(self, answer: Answer, timeout_s: float | None) -> tuple[dict[str, Json], str]:
        program = self.board.program_of(answer)
        stream = AnswerStream(program, answer.variable, answer.node)
        for event in self._events(answer, timeout_s):
            for _ in stream.feed(event):
                pass
            if stream.value is not None:
                return stream.value, program
        raise AssertionError("events of a call end with its answer or an error")

    def chunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> Generator[ChatGenerationChunk, None, None]:
        """The answer to a call of the chain, in pieces; raises as `result`."""
        (answer,) = self._claim([node])
        self._stream()
        program = self.board.program_of(answer)
        stream = AnswerStream(program, answer.variable, answer.node)
        for event in self._events(answer, timeout_s):
            yield from stream.feed(event)
            if stream.is_whole:
                return

    def end(self, *, is_failed: bool) -> Tally:
        """The chain is over: let go of the session."""
        self._is_over = True
        tally = self.board.end()
        if is_failed or not self.board.is_settled():
            # Nothing may be left running, and nobody waits for how it went.
            for run in self._runs:
                _quietly(run.cancel)
        elif self._session is not None:
            close = self._session.append
            threading.Thread(target=_quietly, args=(close, _CLOSE), daemon=True).start()
        return tally

    def _claim(self, nodes: Sequence[dict[str, Json]]) -> list[Answer]:
        answers = [self.board.claim(node) for node in nodes]
        self._send()
        return answers

    def _stream(self) -> None:
        """Somebody wants an answer in pieces: follow the texts, also of what was sent before."""
        with self._sending:
            if self._is_streamed:
                return
            self._is_streamed = True
            for run in self._runs:
                threading.Thread(target=self._read_texts, args=(run,), daemon=True).start()

    def _events(self, answer: Answer, timeout_s: float | None) -> Iterator[Event]:
        inbox: queue.SimpleQueue[Event | ConureError] = queue.SimpleQueue()
        self.board.listen(answer, inbox.put)
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

    def _send_plan(self) -> None:
        try:
            self._send()
        except ConureError as problem:
            logger.info("plan of %s dropped: %s", self._name, problem)

    def _send(self) -> None:
        """Send what has come together; whoever comes meanwhile sends along."""
        with self._sending:
            body = self.board.take()
            if body is None:
                return
            is_whole = body.pop("whole")
            try:
                if self._session is not None:
                    self._session.append(body)
                    self.board.sent(body, self._session.id)
                    return
                run = self._client.submit(_submission(body, self._name), open=not is_whole)
            except ConureError as problem:
                self.board.drop(body, problem)
                raise
            self._runs.append(run)
            self._session = None if is_whole else run
            self.board.sent(body, run.id)
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
            self.board.fail(_lost(problem))

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
        self._sending = asyncio.Lock()
        self._reading: list[asyncio.Task[None]] = []

    def is_of(self, client: AsyncClient) -> bool:
        """Whether it runs on this client's server."""
        return self._client.server == client.server

    async def begin(self, plans: Sequence[tuple[Plan, Mapping[str, Json]]]) -> None:
        """The chain begins something that has a plan, with the values that are there."""
        self.board.add(plans)
        await self._send_plan()

    async def observe(self, awaited: Awaited, made: Any) -> None:
        """The chain made a value that the plan waits for."""
        self.board.observe(awaited, made)
        await self._send_plan()

    async def result(self, nodes: Sequence[dict[str, Json]], timeout_s: float | None) -> ChatResult:
        """The answers to a call of the chain; raises as `Replay.result`."""
        answers = await self._claim(nodes)
        return result_of([await self._whole(answer, timeout_s) for answer in answers])

    async def _whole(self, answer: Answer, timeout_s: float | None) -> tuple[dict[str, Json], str]:
        program = self.board.program_of(answer)
        stream = AnswerStream(program, answer.variable, answer.node)
        async for event in self._events(answer, timeout_s):
            for _ in stream.feed(event):
                pass
            if stream.value is not None:
                return stream.value, program
        raise AssertionError("events of a call end with its answer or an error")

    async def chunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        """The answer to a call of the chain, in pieces; raises as `Replay.result`."""
        (answer,) = await self._claim([node])
        await self._stream()
        program = self.board.program_of(answer)
        stream = AnswerStream(program, answer.variable, answer.node)
        async for event in self._events(answer, timeout_s):
            for chunk in stream.feed(event):
                yield chunk
            if stream.is_whole:
                return

    async def end(self, *, is_failed: bool) -> Tally:
        """The chain is over: let go of the session."""
        tally = self.board.end()
        with contextlib.suppress(ConureError):
            if is_failed or not self.board.is_settled():
                for run in self._runs:
                    await asyncio.shield(run.cancel())
            elif self._session is not None:
                await asyncio.shield(self._session.append(_CLOSE))
        for reading in self._reading:
            reading.cancel()
        if self._reading:
            await asyncio.wait(self._reading)
        return tally

    async def _claim(self, nodes: Sequence[dict[str, Json]]) -> list[Answer]:
        answers = [self.board.claim(node) for node in nodes]
        await self._send()
        return answers

    async def _stream(self) -> None:
        """Somebody wants an answer in pieces; see `Replay._stream`."""
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

    async def _send_plan(self) -> None:
        try:
            await self._send()
        except ConureError as problem:
            logger.info("plan of %s dropped: %s", self._name, problem)

    async def _send(self) -> None:
        async with self._sending:
            body = self.board.take()
            if body is None:
                return
            is_whole = body.pop("whole")
            try:
                if self._session is not None:
                    await self._session.append(body)
                    self.board.sent(body, self._session.id)
                    return
                submission = _submission(body, self._name)
                run = await self._client.submit(submission, open=not is_whole)
            except ConureError as problem:
                self.board.drop(body, problem)
                raise
            self._runs.append(run)
            self._session = None if is_whole else run
            self.board.sent(body, run.id)
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
            self.board.fail(_lost(problem))

    async def _read_texts(self, run: AsyncRun) -> None:
        with contextlib.suppress(ConureError, RuntimeError):
            async for event in run.events(types=TEXTS):
                if event.type in TEXTS:
                    self.board.hear(event)


def _submission(body: dict[str, Any], name: str) -> dict[str, Json]:
    program = {k: body[k] for k in ("variables", "nodes", "outputs")} | {"name": name[:256]}
    # Attached: a session whose client is gone is nobody's.
    return {"program": program, "inputs": body["inputs"], "options": {"detach": False}}


def _quietly(action: Any, *args: Any) -> None:
    # A client that its owner has closed raises RuntimeError; then the lease ends the session.
    with contextlib.suppress(ConureError, RuntimeError):
        action(*args)


def _late(timeout_s: float | None) -> NotReadyError:
    return NotReadyError("client.not_ready", f"the call has no answer after {timeout_s:g} s")


def _lost(problem: Exception) -> ConureError:
    return UnavailableError("client.stream", f"events could not be read: {problem!r}")
