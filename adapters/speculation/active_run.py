"""A context variable for the active run, from which a model call finds its run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class ActiveRunVar(Generic[T]):
    """A context variable with the active run. Frameworks copy it to their tasks and threads."""

    def __init__(self, name: str) -> None:
        self._var: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """Return the active run of the caller's context."""
        return self._var.get()

    @contextlib.contextmanager
    def activate(self, run: T) -> Iterator[None]:
        """Make a run active in the block, and in the tasks and threads that the block starts."""
        token = self._var.set(run)
        try:
            yield
        finally:
            self._var.reset(token)
