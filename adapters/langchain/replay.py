"""A run of a chain beside its program: what is sent, what is read, how calls wait.

For threads; `async_replay` is for coroutines. Both keep a `Board` and speak with one session
of the server. The first plan travels while the chain begins. Knows connections and
waiting. Refuses to know Runnables.

Kept true: a plan that the server refuses is forgotten, and its calls are made as if there
had been none; whatever happens, the session is closed or cancelled at the end, and one whose
client is gone dies of its lease.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.outputs import ChatGenerationChunk, ChatResult

from conure.server.program.errors import ConureError, UnavailableError
from conure.server.program.ir import Json
from conure.server.program.status import Event

from ..client import Client, NotReadyError, Run
from .board import HEARD, TEXTS, Answer, Board, NotPlannedError
from .plan import Awaited, Plan
from .stream import AnswerStream, Whole, result_of
from .tally import Tally

logger = logging.getLogger(__name__)

LEAVING_S = 5.0
"""How long a chain that is over waits for its first plan to arrive, so that it can be ended."""

CLOSE: dict[str, Json] = {"close": True}


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
            return self._whole(self._claim_alone(answer, node), node, timeout_s)
        raise AssertionError("events of a call end with its answer or an error")

    def chunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> Generator[ChatGenerationChunk, None, None]:
        """The answer to a call of the chain, in pieces; raises as `result`."""
        (answer,) = self._claim([node])
        self._stream()
        yield from self._pieces(answer, node, timeout_s)

    def _pieces(
        self, answer: Answer, node: dict[str, Json], timeout_s: float | None
    ) -> Generator[ChatGenerationChunk, None, None]:
        stream = AnswerStream(answer.variable, answer.node)
        try:
            for event in self._events(answer, timeout_s):
                yield from stream.feed(event)
                if stream.is_whole:
                    return
        except NotPlannedError:
            yield from self._pieces(self._claim_alone(answer, node), node, timeout_s)

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
                with quietly():
                    self.board.stopped(run.cancel())
        elif self._session is not None:
            threading.Thread(target=self._close, args=(self._session,), daemon=True).start()
        return tally

    def _close(self, session: Run) -> None:
        with quietly():
            session.append(CLOSE)

    def _claim(self, nodes: Sequence[dict[str, Json]]) -> list[Answer]:
        answers = [self.board.claim(node) for node in nodes]
        if self.board.has_calls_to_send():
            with contextlib.suppress(ConureError):  # it is told to whoever waits for the calls
                self._send()
        return answers

    def _claim_alone(self, before: Answer, node: dict[str, Json]) -> Answer:
        answer, body = self.board.claim_alone(before, node)
        with self._sending:
            self._deliver(body)
        return answer

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
                raise late(timeout_s) from None
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
            tell_dropped(self._name, problem)
        finally:
            self._sending.release()

    def _send_plan(self) -> None:
        try:
            self._send()
        except Exception as problem:
            tell_dropped(self._name, problem)

    def _send(self) -> None:
        """Send what has come together; whoever comes meanwhile sends along."""
        with self._sending:
            body = self.board.take()
            if body is not None:
                self._deliver(body)

    def _deliver(self, body: dict[str, Any]) -> None:
        is_whole = body.pop("whole")
        types = HEARD | TEXTS if self._is_streamed else HEARD
        try:
            if self._session is not None:
                self._session.append(body)
                self.board.sent(body, self._session.id)
                return
            run = self._client.submit(
                submission_of(body, self._name), open=not is_whole, follow=True, types=types
            )
        except Exception as problem:
            self.board.drop(body, as_told(problem))
            raise
        self._runs.append(run)
        self._session = None if is_whole else run
        self.board.sent(body, run.id)
        if self._is_over:  # it took too long: nobody is there to end it
            with quietly():
                run.cancel()
            return
        # Taken here: whoever asks for texts next has a stream of its own.
        events = run.events(types=types)
        threading.Thread(target=self._read, args=(run, events), daemon=True).start()

    def _read(self, run: Run, events: Generator[Event, None, None]) -> None:
        try:
            for event in events:
                self.board.hear(event)
        except ConureError as problem:
            self.board.fail(problem)
        except Exception as problem:
            if not self._is_over:  # else the client may be closed by now
                logger.exception("events of %s could not be read", run.id)
            self.board.fail(as_told(problem))

    def _read_texts(self, run: Run) -> None:
        # What else happens, and what goes wrong, is the other reader's to tell: an answer
        # is whole when it is committed.
        with contextlib.suppress(ConureError, RuntimeError):
            for event in run.events(types=TEXTS):
                if event.type in TEXTS:
                    self.board.hear(event)


def submission_of(body: dict[str, Any], name: str) -> dict[str, Json]:
    """What a board gives to be sent first, as a submission."""
    program = {k: body[k] for k in ("variables", "nodes", "outputs")} | {"name": name[:256]}
    # Attached: a session whose client is gone is nobody's.
    return {"program": program, "inputs": body["inputs"], "options": {"detach": False}}


def quietly() -> contextlib.AbstractContextManager[None]:
    """Ends a session, if that can be."""
    # A client that its owner has closed raises RuntimeError; then the lease ends the session.
    return contextlib.suppress(ConureError, RuntimeError)


def late(timeout_s: float | None) -> NotReadyError:
    """The error of a call whose time is over."""
    return NotReadyError("client.not_ready", f"the call has no answer after {timeout_s:g} s")


def tell_dropped(name: str, problem: Exception) -> None:
    """Tell the log of a plan that the server did not take."""
    logger.info("plan of %s dropped: %s", name, problem)


def as_told(problem: Exception) -> ConureError:
    """What a call is told of it."""
    if isinstance(problem, ConureError):
        return problem
    return UnavailableError("client.stream", f"the connection was lost: {problem!r}")
