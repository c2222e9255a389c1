"""A run of a chain beside its program, for coroutines of one loop: `replay`, said with await.

Kept true: what `replay` keeps; its docstrings hold here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from langchain_core.outputs import ChatGenerationChunk, ChatResult

from conure.server.program.errors import ConureError
from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType

from ..client import AsyncClient, AsyncRun
from .board import HEARD, TEXTS, Answer, Board, NotPlannedError
from .plan import Awaited, Plan
from .replay import CLOSE, LEAVING_S, as_told, late, quietly, submission_of, tell_dropped
from .stream import AnswerStream, Whole, result_of
from .tally import Tally

logger = logging.getLogger(__name__)


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
            return await self._whole(await self._claim_alone(answer, node), node, timeout_s)
        raise AssertionError("events of a call end with its answer or an error")

    async def chunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        """The answer to a call of the chain, in pieces; raises as `Replay.result`."""
        (answer,) = await self._claim([node])
        await self._stream()
        async for chunk in self._pieces(answer, node, timeout_s):
            yield chunk

    async def _pieces(
        self, answer: Answer, node: dict[str, Json], timeout_s: float | None
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        stream = AnswerStream(answer.variable, answer.node)
        try:
            async for event in self._events(answer, timeout_s):
                for chunk in stream.feed(event):
                    yield chunk
                if stream.is_whole:
                    return
        except NotPlannedError:
            answer = await self._claim_alone(answer, node)
            async for chunk in self._pieces(answer, node, timeout_s):
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
        with quietly():
            if is_failed or not self.board.is_settled():
                for run in self._runs:
                    self.board.stopped(await run.cancel())
            elif self._session is not None:
                await self._session.append(CLOSE)
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

    async def _claim_alone(self, before: Answer, node: dict[str, Json]) -> Answer:
        answer, body = self.board.claim_alone(before, node)
        async with self._sending:
            await self._deliver(body)
        return answer

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
                raise late(timeout_s) from None
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
            tell_dropped(self._name, problem)
        finally:
            self._sending.release()

    async def _send_plan(self) -> None:
        try:
            await self._send()
        except Exception as problem:
            tell_dropped(self._name, problem)

    async def _send(self) -> None:
        async with self._sending:
            body = self.board.take()
            if body is not None:
                await self._deliver(body)

    async def _deliver(self, body: dict[str, Any]) -> None:
        is_whole = body.pop("whole")
        types = HEARD | TEXTS if self._is_streamed else HEARD
        try:
            if self._session is not None:
                await self._session.append(body)
                self.board.sent(body, self._session.id)
                return
            run = await self._client.submit(
                submission_of(body, self._name), open=not is_whole, follow=True, types=types
            )
        except Exception as problem:
            self.board.drop(body, as_told(problem))
            raise
        self._runs.append(run)
        self._session = None if is_whole else run
        self.board.sent(body, run.id)
        if self._is_over:
            with contextlib.suppress(ConureError):
                await run.cancel()
            return
        self._reading.append(asyncio.create_task(self._read(run, types)))

    async def _read(self, run: AsyncRun, types: frozenset[EventType]) -> None:
        try:
            async for event in run.events(types=types):
                self.board.hear(event)
        except ConureError as problem:
            self.board.fail(problem)
        except Exception as problem:
            logger.exception("events of %s could not be read", run.id)
            self.board.fail(as_told(problem))

    async def _read_texts(self, run: AsyncRun) -> None:
        with contextlib.suppress(ConureError, RuntimeError):
            async for event in run.events(types=TEXTS):
                if event.type in TEXTS:
                    self.board.hear(event)
