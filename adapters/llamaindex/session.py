"""One run of an accelerated app: its calls, those that were planned and those that were not.

Planned calls are submitted at once, and the app's calls get their answers from them; a call
that was not planned is appended to the same program. Knows the plan, and who waits for which
answer. Refuses to know LlamaIndex, how plans are made and how nodes are sent.

Kept true: whoever waits gets an answer or an error, also when the server goes away; after
the end of the run nothing of it is left running on the server, except what somebody still
reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from conure.server.program.errors import RunError, UnavailableError
from conure.server.program.ir import Json
from conure.server.program.status import Event, Problem, Receipt

from ..client import Client
from ..exchange import failure_of
from .call import Call, Text, text_of
from .line import Final
from .plan import Plan, Planned
from .programs import Programs
from .report import CallReport, Report

Listener: TypeAlias = Callable[[str | None], None]


class PlanFellThrough(Exception):  # noqa: N818 - nothing is wrong; the call is made without it
    """A planned call came to nothing; the app's call is made as it would be without a plan."""


class Feed:
    """The text and the end of one answer, for whoever waits for it."""

    def __init__(self) -> None:
        self.final: Future[dict[str, Json]] = Future()
        self._said = ""
        self._text = Text()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def listen(self, listener: Listener) -> None:
        """Hear the text so far, then every piece, then None; from any thread."""
        with self._lock:
            if self._said:
                listener(self._said)
            if self.final.done():
                listener(None)
            else:
                self._listeners.append(listener)

    def add(self, text: str, offset: int) -> None:
        """More text."""
        with self._lock:
            self._say(self._text.more(text, offset))

    def end(self, value: dict[str, Json]) -> None:
        """The answer is there."""
        with self._lock:
            if not self.final.done():
                self._say(self._text.more(text_of(value), 0))
                self.final.set_result(value)
                self._say(None)

    def fail(self, problem: Exception) -> None:
        """There will be no answer; no-op after the end."""
        with self._lock:
            if not self.final.done():
                self.final.set_exception(problem)
                self._say(None)

    def _say(self, piece: str | None) -> None:
        if piece == "":
            return
        self._said += piece or ""
        for listener in self._listeners:
            listener(piece)


class Session:
    """A `Line` into the open programs of one run."""

    def __init__(self, client: Client, report: Report, path: Callable[[], str]) -> None:
        """Submits nothing until there is a call.

        Args:
            client: to the server.
            report: written as the run goes on.
            path: tells which parts of the app are at work in the caller's context.
        """
        self._programs = Programs(client, report.programs, self)
        self._report = report
        self._path = path
        self._plan = Plan()
        self._feeds: dict[str, Feed] = {}
        self._planned: set[str] = set()
        self._num_reading = 0
        self._lock = threading.RLock()
        self._names = 0
        self._is_over = False

    def plan(self, calls: Sequence[Planned]) -> None:
        """Run calls that the app will ask for; does not wait for anything."""
        with self._lock:
            if self._is_over or not calls:
                return
            for planned in calls:
                self._feeds[planned.variable] = Feed()
                self._planned.add(planned.variable)
            self._plan.add(calls)
            self._programs.send([planned.node() for planned in calls])

    def is_planned(self, call: Call) -> bool:
        """Whether the plan has such a call already."""
        with self._lock:
            return self._plan.has(call)

    def fresh(self, hint: str) -> str:
        """A variable that the program does not have yet."""
        with self._lock:
            self._names += 1
            return f"{hint}_{self._names}"

    def answer(self, call: Call) -> Final:
        """Wait for the answer to a call, planned or not; see `Line`."""
        feed = self._take(call)
        try:
            return self._final(feed.final.result())
        except PlanFellThrough as why:
            return self._final(self._call(call, str(why)).final.result())

    async def aanswer(self, call: Call) -> Final:
        """`answer`, with await."""
        try:
            return self._final(await _awaited(self._take(call)))
        except PlanFellThrough as why:
            return self._final(await _awaited(self._call(call, str(why))))

    def stream(self, call: Call) -> Generator[str | Final, None, None]:
        """The answer in pieces. The call is taken now, not when the first piece is read."""
        return self._stream(call, self._take(call))

    def astream(self, call: Call) -> AsyncGenerator[str | Final, None]:
        """`stream`, with await."""
        return self._astream(call, self._take(call))

    def finish(self, *, is_failed: bool = False) -> None:
        """The app has ended; what still runs is stopped, unless somebody reads it."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            left = self._plan.unclaimed()
            self._report.num_wasted += len(left)
            is_left = is_failed or any(not self._feeds[each.variable].final.done() for each in left)
            self._programs.end(is_cancelled=is_left and not self._num_reading)

    def receipt(self) -> Receipt:
        """Wait for the program's end and return what it cost."""
        return self._programs.receipt.result()

    def _take(self, call: Call) -> Feed:
        """The feed of a planned call, or of this one, which is then submitted."""
        with self._lock:
            planned = self._plan.claim(call)
            if planned is not None:
                self._report.calls.append(CallReport(self._path(), is_planned=True))
                return self._feeds[planned.variable]
        return self._call(call, "")

    def _call(self, call: Call, reason: str) -> Feed:
        with self._lock:
            report = CallReport(self._path(), is_planned=False, reason=reason or "not planned")
            if reason:  # it was counted as planned before it fell through
                mine = CallReport(report.path, is_planned=True)
                with contextlib.suppress(ValueError):
                    self._report.calls.remove(mine)
            self._report.calls.append(report)
            variable = self.fresh("call")
            feed = self._feeds[variable] = Feed()
            if self._is_over:  # the server ended the program, or this came too late for it
                feed.fail(RunError("run.ended", "the program of this run has ended"))
            else:
                self._programs.send([call.node(f"{variable}_call", variable)])
            return feed

    def _final(self, value: dict[str, Json]) -> Final:
        return Final(value, self._report.programs[-1] if self._report.programs else "")

    def _stream(self, call: Call, feed: Feed) -> Generator[str | Final, None, None]:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self._reading():
            feed.listen(pieces.put)
            while (piece := pieces.get()) is not None:
                yield piece
            try:
                final = self._final(feed.final.result())
            except PlanFellThrough as why:
                yield from self._stream(call, self._call(call, str(why)))
            else:
                yield final

    async def _astream(self, call: Call, feed: Feed) -> AsyncGenerator[str | Final, None]:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def hear(piece: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        with self._reading():
            feed.listen(hear)
            while (piece := await pieces.get()) is not None:
                yield piece
            try:
                final = self._final(feed.final.result())
            except PlanFellThrough as why:
                async with contextlib.aclosing(
                    self._astream(call, self._call(call, str(why)))
                ) as other:
                    async for each in other:
                        yield each
            else:
                yield final

    @contextlib.contextmanager
    def _reading(self) -> Generator[None, None, None]:
        with self._lock:
            self._num_reading += 1
        is_left = True
        try:
            yield
            is_left = False
        finally:
            with self._lock:
                self._num_reading -= 1
                if is_left and self._is_over and not self._num_reading:
                    # The program was closed and not cancelled, for the one who has left now.
                    self._programs.cancel()

    def hear(self, event: Event) -> None:
        """Something happened in a program of the run; see `programs.Ear`."""
        data: dict[str, Any] = event.data
        if event.type == "node.delta":
            if (feed := self._feeds.get(data["variable"])) is not None:
                feed.add(data["text"], data["offset"])
        elif event.type == "variable.committed":
            feed = self._feeds.get(data["variable"])
            if feed is not None:
                with self._lock:
                    self._plan.learn(data["variable"], data["value"])
                feed.end(data["value"])
        elif event.type in ("node.failed", "node.killed", "node.skipped"):
            problem = failure_of(
                Problem(code=data.get("code", "run.skipped"), message=data.get("message", ""))
            )
            # A planned call may be at fault as a plan, not as a call.
            is_plans_fault = event.type == "node.skipped" or problem.code.startswith(
                ("expr.", "program.", "variable.")
            )
            self._fail(str(data.get("node", "")), problem, is_plans_fault=is_plans_fault)

    def refuse(self, node: str, problem: Exception) -> None:
        """A node was not sent; without a plan the same call may be."""
        self._fail(node, problem, is_plans_fault=not isinstance(problem, UnavailableError))

    def lose(self, nodes: Sequence[str], problem: Exception, *, is_last: bool) -> None:
        """A program is over; what has no answer by now gets none."""
        with self._lock:
            self._is_over = self._is_over or is_last
            lost = list(self._feeds) if is_last else list(map(_variable, nodes))
        for variable in lost:
            self._feeds[variable].fail(problem)

    def _fail(self, node: str, problem: Exception, *, is_plans_fault: bool) -> None:
        variable = _variable(node)
        feed = self._feeds.get(variable)
        if feed is None:
            return
        with self._lock:
            self._plan.forget(variable)
        if variable in self._planned and is_plans_fault:
            why = getattr(problem, "code", type(problem).__name__)
            feed.fail(PlanFellThrough(f"planned, but {why}"))
        else:
            feed.fail(problem)


def _variable(node: str) -> str:
    """Whose answer a node makes."""
    return node.removesuffix("_call")


async def _awaited(feed: Feed) -> dict[str, Json]:
    final = asyncio.wrap_future(feed.final)
    # Whoever waits may be cancelled; a failure that comes afterwards is nobody's to hear.
    final.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(final)
