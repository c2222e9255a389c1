"""The run of an accelerated app that the caller's context belongs to.

LlamaIndex copies context variables to its tasks and threads, so that calls find their run.

Invariants: an app inside an accelerated app belongs to the run of the outer app. A run ends when
the app's method has returned and every stream that the app left open has ended. A forked process
is outside of the run.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

from llama_index.core.instrumentation.span import active_span_id

from ...client import Client
from ...speculation.active_run import ActiveRunVar
from .planned_run import PlannedRun
from .report import Report

APP_CLASS = "__conure_of__"
"""Attribute of an accelerated app's class: the class of the app itself."""


def app_class(app: Any) -> type[Any]:
    """Return the class of an app without acceleration."""
    kind: type[Any] = vars(type(app)).get(APP_CLASS, type(app))
    return kind


class Scope:
    """One run of an accelerated app."""

    def __init__(self, app: Any = None) -> None:
        """Start a run with one hold.

        Args:
            app: the outermost accelerated app; None for the code of a `with` block.
        """
        self.app = app
        self.pid = os.getpid()
        """The process of the run. A forked process inherits the object, but not the answers."""
        self.report = Report()
        self.is_over = False
        """The app has ended. Code that it left running makes calls outside of the run."""
        self.ending: asyncio.Future[None] | None = None
        """The task that ends the run, if the app continues after its method has returned."""
        self._runs: dict[int, PlannedRun] = {}
        self._spans: dict[str, tuple[str, str | None]] = {}
        self._expected: list[tuple[int, list[str]]] = []
        self._num_holds = 1
        self._has_failed = False
        self.lock = threading.RLock()  # a stream that is garbage collected ends its run

    def run_on(self, client: Client) -> PlannedRun:
        """Return the part of this run that uses a client's server."""
        with self.lock:
            run = self._runs.get(id(client))
            if run is None:
                run = self._runs[id(client)] = PlannedRun(client, self.report, self.path)
            return run

    def enter(self, span: str, name: str, parent: str | None) -> None:
        """Record that a part of the app starts."""
        self._spans[span] = (name, parent)

    def path(self) -> str:
        """Return the active parts of the app in the caller's context, outermost first."""
        names: list[str] = []
        span = active_span_id.get()
        while span is not None and span in self._spans:
            name, span = self._spans[span]
            names.append(name)
        return " > ".join(reversed(names))

    def expect(self, part: Any, texts: Sequence[str]) -> None:
        """Record that a planned part will call its own method once more, on these texts."""
        with self.lock:
            self._expected.append((id(part), list(texts)))

    def is_expected(self, part: Any, texts: Sequence[str]) -> bool:
        """Return whether this call was expected. It is not expected again."""
        call = (id(part), list(texts))
        with self.lock:
            if call not in self._expected:
                return False
            self._expected.remove(call)
            return True

    def note(self, text: str) -> None:
        """Add to the report why a part was not planned."""
        if text not in self.report.notes:
            self.report.notes.append(text)

    @property
    def is_in_collection(self) -> bool:
        """Whether the garbage collector runs on the current thread, and the run is not over."""
        runs = list(self._runs.values())  # without the lock: another thread may hold it
        return not self.is_over and any(run.io_thread.is_in_collection for run in runs)

    def hold(self) -> None:
        """Keep the run open until one more `release`."""
        with self.lock:
            self._num_holds += 1

    def release(self, *, has_failed: bool = False) -> None:
        """End one hold. The last one ends the run.

        Args:
            has_failed: the app or one of its streams raised; planned calls are cancelled.
        """
        if self.pid != os.getpid():
            return
        with self.lock:
            self._num_holds -= 1
            self._has_failed |= has_failed
            if self._num_holds:
                return
            self.is_over = True
            runs = list(self._runs.values())
        for run in runs:
            run.finish(is_failed=self._has_failed)


ACTIVE_SCOPE = ActiveRunVar[Scope]("conure_scope")


def active_scope() -> Scope | None:
    """Return the run of the caller's context.

    None outside of a run, after its end, and in a forked process.
    """
    scope = ACTIVE_SCOPE.get()
    if scope is None or scope.is_over or scope.pid != os.getpid():
        return None
    return scope
