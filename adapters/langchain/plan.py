"""The plan of a chain: calls that it will make, and values that it makes between them.

Records alone. How they come out of a chain is `planning`'s business, what becomes of them
`board`'s. Kept true: what a value is to a plan is what calls need of it, in the form in
which they need it; what cannot travel is left out, and said.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

from conure.server.program.ir import Json

from .values import Source


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call that the chain will make."""

    place: str
    variable: str
    node: dict[str, Json]
    reads: frozenset[str]
    """Variables that its prompt is made of."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A value that the chain will make where it stands."""

    place: str
    what: str
    """Class of the Runnable."""
    why: str
    """Why the server does not make it."""
    source: Source

    def values(self, made: Any) -> tuple[dict[str, Json], str]:
        """What calls need of the value, by variable, and why some of it cannot travel."""
        return _encoded(self.source, made)


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of one chain, and the values between them that the chain makes itself."""

    calls: tuple[PlannedCall, ...]
    awaited: Mapping[str, Awaited]
    """By place."""
    root: Source
    has_parts: bool
    """Parts of the chain get plans of their own when it enters them."""

    def inputs(self, given: Any) -> dict[str, Json]:
        """Variables that the chain's input gives values to, as far as it can be read."""
        return _encoded(self.root, given)[0]

    def declared(self) -> Iterator[str]:
        """Variables that no call makes."""
        for source in (self.root, *(each.source for each in self.awaited.values())):
            for view in source.views:
                yield view.variable


def _encoded(source: Source, made: Any) -> tuple[dict[str, Json], str]:
    if _is_read_once(made):
        return {}, "it can be read only once, and the chain reads it"
    # Parsers and templates compute some of it. What they do here is no part of the run that
    # LangChain's callbacks are told about.
    context = copy_context()
    context.run(var_child_runnable_config.set, None)
    return context.run(_encode, source, made)


def _is_read_once(made: Any) -> bool:
    parts = made.values() if isinstance(made, dict) else (made,)
    return any(isinstance(part, Iterator | AsyncIterator) for part in parts)


def _encode(source: Source, made: Any) -> tuple[dict[str, Json], str]:
    values: dict[str, Json] = {}
    reason = ""
    for view in source.views:
        try:
            values[view.variable] = view.encode(made)
        except Exception as error:  # the chain will raise it where it belongs
            reason = f"{type(error).__name__}: {error}"
    return values, reason
