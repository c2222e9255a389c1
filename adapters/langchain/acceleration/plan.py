"""The plan of a chain: the calls that it will make, and the values that it computes for them.

A planned call needs a value in one or more forms (`WireView`). A value that cannot be encoded as
JSON is left out, with the reason.

Out of scope: how a plan is made (`planner`) and how it runs (`chain_run`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.globals import get_llm_cache
from pydantic import BaseModel

from conure.server.program.ir import Json

from ...speculation.planned_call import PlannedCall
from ..compilation.values import Source


@dataclass(frozen=True, slots=True)
class EncodedViews:
    """A value in the forms that planned calls read."""

    values: dict[str, Json]
    """By variable."""
    reason: str
    """Why forms are missing; empty if none is."""


@dataclass(frozen=True, slots=True)
class AwaitedValue:
    """A value that the chain itself computes and that planned calls wait for."""

    place: str
    what: str
    """Class of the Runnable that computes it."""
    why: str
    """Why the server cannot compute it."""
    source: Source

    def values(self, computed: Any) -> EncodedViews:
        """Return the value in each form that planned calls read."""
        return _encode(self.source, computed)


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The planned calls of one chain, and the values that they wait for."""

    calls: tuple[PlannedCall, ...]
    awaited: Mapping[str, AwaitedValue]
    """By place."""
    root: Source
    """The chain's input."""
    may_grow: bool
    """Whether parts of the chain are planned later, when the chain reaches them."""
    is_direct: bool
    """Whether the plan has one call, which cannot start before the chain reaches it. The chain
    sends it as without a plan, which takes less time."""
    names: frozenset[str] = frozenset()
    """Names of its nodes and variables, which other calls of the run must not have."""
    models: tuple[tuple[BaseModel, dict[str, Any]], ...] = ()
    """The models of the chain, and their fields when the plan was made."""
    has_cache: bool = False
    """Whether LangChain had a global cache of answers when the plan was made. Models that use the
    cache are not planned."""

    def is_current(self) -> bool:
        """Return whether a new plan would have the same calls."""
        if self.has_cache != (get_llm_cache() is not None):
            return False
        return all(vars(model) == fields for model, fields in self.models)

    def inputs(self, given: Any) -> dict[str, Json]:
        """Return the variables that the chain's input gives values to."""
        return _encode(self.root, given).values


NO_PLAN: Final = ChainPlan((), {}, Source("input"), may_grow=False, is_direct=False)
"""The plan of a chain that is called with arguments. LangChain passes them to a part of the chain,
and plans do not include them."""


def _is_read_once(computed: Any) -> bool:
    parts = computed.values() if isinstance(computed, dict) else (computed,)
    return any(isinstance(part, Iterator | AsyncIterator) for part in parts)


def _encode(source: Source, computed: Any) -> EncodedViews:
    if _is_read_once(computed):
        return EncodedViews({}, "it can be read only once, and the chain reads it")
    values: dict[str, Json] = {}
    reason = ""
    for view in source.views:
        try:
            values[view.variable] = view.encode(computed)
        except Exception as error:  # the chain itself raises the error
            reason = f"{type(error).__name__}: {error}"
    return EncodedViews(values, reason)
