"""One run of an accelerated app on one server: plans in, answers to the app's calls out.

Adds to `speculation` what LlamaIndex needs: a `CallBackend` for threads and coroutines, and a
report of every call. Nothing here blocks except the wait for an answer, as span handlers plan in
the app's event loop.

Invariants: every wait ends with an answer or an exception. After the end of the run nothing runs on
the server, except programs with an answer that the app still reads.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from typing import Final, NamedTuple

from ...call_errors import application_errors
from ...client import Client
from ...client.owned_generator import OwnedGenerator
from ...speculation.answer_stream import AnswerStream
from ...speculation.planned_call import PlannedCall
from ...speculation.registry import CallRecord, PlanFailedError
from ...speculation.run import Resend, SpeculativeRun, TimeLimit
from ..llm.call_backend import FinalAnswer
from ..llm.model_request import ModelRequest
from .prompt_inputs import planned_call
from .report import CallReport, Report


class _ClaimedCall(NamedTuple):
    """The call that answers a call of the app: the arguments of `SpeculativeRun.follow`."""

    record: CallRecord
    resend: Resend
    """Sends the app's call if the planned call fails because of its plan."""
    limit: TimeLimit
    """From the app's call on; the planned call may have waited in the queue before."""


class PlannedRun:
    """A `CallBackend` that answers calls from a plan where it can."""

    def __init__(self, client: Client, report: Report, path: Callable[[], str]) -> None:
        """Submit nothing before the first call.

        Args:
            client: client of the server.
            report: updated during the run.
            path: returns the names of the app's components that are running in the caller's
                context, outermost first.
        """
        self._run = SpeculativeRun(
            client,
            "Conure.llamaindex",
            is_streamed=False,
            may_grow=True,
            has_outputs=False,
            program_ids=report.programs,
        )
        self._registry = self._run.calls
        self._report = report
        self._path = path
        self._num_names = 0
        self._is_over = False
        self.io_thread: Final = client.io_thread
        """Sends the requests of the run, and receives its events."""

    def plan(self, calls: Sequence[PlannedCall]) -> None:
        """Start calls that the app is expected to make."""
        if not self._is_over and calls:
            self._run.plan(calls)

    def is_planned(self, call: PlannedCall) -> bool:
        """Return whether the plan contains an identical call."""
        return self._registry.has_planned(call.node)

    def fresh(self, hint: str) -> str:
        """Return a variable name that the run does not use yet."""
        with self._registry.lock:
            self._num_names += 1
            return f"{hint}_{self._num_names}"

    def answer(self, call: ModelRequest) -> FinalAnswer:
        """Wait for the answer to a call; see `CallBackend`."""
        answer: AnswerStream | None = None
        with self._reading(call), closing(self._run.follow(*self._claim(call))) as events:
            for answer, event in events:
                answer.feed(event)
        return _final(answer)

    async def aanswer(self, call: ModelRequest) -> FinalAnswer:
        """`answer`, with await."""
        answer: AnswerStream | None = None
        with self._reading(call):
            async with OwnedGenerator(self._run.afollow(*self._claim(call))) as events:
                async for answer, event in events:
                    answer.feed(event)
        return _final(answer)

    def stream(self, call: ModelRequest) -> Generator[str | FinalAnswer, None, None]:
        """Yield the answer in pieces. The call is sent now, not when the first piece is read."""
        claimed = self._claim(call)
        self._run.follow_texts()
        stream = self._stream(call, claimed)
        self._release_if_dropped(stream, claimed.record)
        return stream

    def astream(self, call: ModelRequest) -> AsyncGenerator[str | FinalAnswer, None]:
        """`stream`, with await."""
        claimed = self._claim(call)
        self._run.follow_texts()
        stream = self._astream(call, claimed)
        self._release_if_dropped(stream, claimed.record)
        return stream

    def _release_if_dropped(self, stream: object, record: CallRecord) -> None:
        """Let the call of a stream end when the app drops the stream, also without reading it."""

        def release() -> None:
            self._registry.release([record])
            self._run.flush()

        # The I/O thread runs `release`: the garbage collector may run in a thread that holds a lock
        # of the run.
        weakref.finalize(stream, self.io_thread.wake, release).atexit = False

    def finish(self, *, is_failed: bool = False) -> None:
        """End the run with the app: cancel calls that have not ended.

        If the app still reads an answer of a program, the program is cancelled when the app has
        that answer or stops reading. A task of the app may read on after another one has failed.
        """
        with self._registry.lock:
            if self._is_over:
                return
            self._is_over = True
            self._report.num_wasted += len(self._registry.unclaimed())
            is_cancelled = is_failed or not self._registry.is_settled()
            self._run.end(is_cancelled=is_cancelled, keeps_awaited=True)

    def _claim(self, call: ModelRequest) -> _ClaimedCall:
        """Return the planned call for a call of the app; else send the app's call."""
        with self._registry.lock:
            record = self._registry.claim(call.node("", ""))  # ids are not compared
            path = self._path()
            calls = self._report.calls
            index = len(calls)
            if record is None:
                calls.append(CallReport(path, is_planned=False, reason="not planned"))
                record = self._send(call)
            else:
                calls.append(CallReport(path, is_planned=True))

        def resend(failed: CallRecord, failure: PlanFailedError) -> CallRecord:
            calls[index] = CallReport(path, is_planned=False, reason=f"planned, but {failure.code}")
            return self._send(call)

        return _ClaimedCall(record, resend, TimeLimit(call.timeout_s, self._run.clock))

    def _send(self, call: ModelRequest) -> CallRecord:
        return self._run.add_unplanned(planned_call(self.fresh("call"), call))

    def _stream(
        self, call: ModelRequest, claimed: _ClaimedCall
    ) -> Generator[str | FinalAnswer, None, None]:
        answer: AnswerStream | None = None
        with self._reading(call), closing(self._run.follow(*claimed)) as events:
            for answer, event in events:
                if text := answer.feed(event):
                    yield text
        yield _final(answer)

    async def _astream(
        self, call: ModelRequest, claimed: _ClaimedCall
    ) -> AsyncGenerator[str | FinalAnswer, None]:
        answer: AnswerStream | None = None
        with self._reading(call):
            async with OwnedGenerator(self._run.afollow(*claimed)) as events:
                async for answer, event in events:
                    if text := answer.feed(event):
                        yield text
        yield _final(answer)

    @contextlib.contextmanager
    def _reading(self, call: ModelRequest) -> Generator[None, None, None]:
        """Read an answer. After the end of the run, cancel calls that the app no longer reads."""
        try:
            with application_errors(call.timeout_s):
                yield
        finally:
            with self._registry.lock:
                is_over = self._is_over
            if is_over:
                self._run.flush()


def _final(answer: AnswerStream | None) -> FinalAnswer:
    """Return the answer to a call whose events have all been read."""
    assert answer is not None, "the end of an answer is an event"
    return FinalAnswer(answer.result(), answer.program)
