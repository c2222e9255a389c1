"""The accelerated app that runs in the caller's context, if one does.

A run is known by a context variable, which LlamaIndex carries into its tasks and threads,
so an app's calls find their run wherever they are made. Knows runs and which parts of the
app are at work; refuses to know what they do.

Kept true: an app inside an accelerated app belongs to the outer one's run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.instrumentation.span import active_span_id

from ..client import Client
from .report import Report
from .session import Session

_current: ContextVar[Scope | None] = ContextVar("conure_scope", default=None)

OF = "__conure_of__"
"""Where the class of an accelerated app keeps the app's own class."""


def own_kind(app: Any) -> type[Any]:
    """The class of an app, without what makes it accelerated."""
    kind: type[Any] = vars(type(app)).get(OF, type(app))
    return kind


class Scope:
    """One run of an accelerated app."""

    def __init__(self, app: Any) -> None:
        self.app = app
        """Whose run it is."""
        self.report = Report()
        self.is_over = False
        """The app has ended; calls of what it left behind are calls of their own."""
        self.going_on: asyncio.Future[None] | None = None
        """What ends the run, where the app goes on after its method has returned."""
        self._sessions: dict[int, Session] = {}
        self._spans: dict[str, tuple[str, str | None]] = {}
        self._expected: list[tuple[int, list[str]]] = []
        self._lock = threading.RLock()  # a stream that is collected ends its run

    def session(self, client: Client) -> Session:
        """The open program of this run on a client's server."""
        with self._lock:
            session = self._sessions.get(id(client))
            if session is None:
                session = self._sessions[id(client)] = Session(client, self.report, self.path)
            return session

    def entered(self, span: str, name: str, parent: str | None) -> None:
        """A part of the app begins its work."""
        self._spans[span] = (name, parent)

    def path(self) -> str:
        """The parts that are at work in the caller's context, from the outside in."""
        names: list[str] = []
        span = active_span_id.get()
        while span is not None and span in self._spans:
            name, span = self._spans[span]
            names.append(name)
        return " > ".join(reversed(names))

    def expect(self, part: Any, texts: Sequence[str]) -> None:
        """A part that was planned will begin once more, on texts of its own making."""
        with self._lock:
            self._expected.append((id(part), list(texts)))

    def is_expected(self, part: Any, texts: Sequence[str]) -> bool:
        """Whether this is what was expected, which happens once."""
        what = (id(part), list(texts))
        with self._lock:
            if what not in self._expected:
                return False
            self._expected.remove(what)
            return True

    def note(self, what: str) -> None:
        """Something was looked at and not planned."""
        if what not in self.report.notes:
            self.report.notes.append(what)

    def finish(self, *, is_failed: bool = False) -> None:
        """The app has ended; safe to call again."""
        with self._lock:
            self.is_over = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.finish(is_failed=is_failed)


def current() -> Scope | None:
    """The run that the caller belongs to."""
    return _current.get()


@contextmanager
def running(scope: Scope) -> Generator[None, None, None]:
    """What runs in this block, and what it starts, belongs to the run."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)
