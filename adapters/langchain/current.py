"""Which accelerated chain a piece of code runs in, if any.

Known to the model, which asks it for answers, and to the chain's parts that stand on its
seams. Follows threads and tasks the way LangChain's own configuration does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from .async_replay import AsyncReplay
from .plan import Plan
from .replay import Replay


@dataclass(frozen=True, slots=True)
class Frame:
    """A run of a chain, and the plan of the part of it that runs here."""

    replay: Replay | AsyncReplay
    plan: Plan


CURRENT: ContextVar[Frame | None] = ContextVar("conure_accelerated", default=None)


@contextlib.contextmanager
def within(frame: Frame) -> Iterator[None]:
    """Run what follows in a frame."""
    token = CURRENT.set(frame)
    try:
        yield
    finally:
        CURRENT.reset(token)
