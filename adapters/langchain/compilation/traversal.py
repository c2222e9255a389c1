"""Inspection of the Runnables in a chain, without running them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partialmethod
from types import FunctionType
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableBranch,
    RunnableParallel,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEachBase
from langchain_core.runnables.configurable import (
    DynamicRunnable,
    RunnableConfigurableAlternatives,
    RunnableConfigurableFields,
)
from langchain_core.runnables.retry import RunnableRetry

from ..chat.model import ChatConure

_KNOWN_PACKAGES = frozenset({"conure", "langchain", "langchain_core", "langgraph", "pydantic"})
"""Packages whose Runnables the compiler supports as they are. `conure` contains this adapter."""


def is_opaque(runnable: Any) -> bool:
    """Return whether the class of a Runnable overrides a method of a class in a known package.

    The override may change the behaviour in any way, for example change a prompt before it is
    sent. Only the application runs such a Runnable, as a whole. A `RunnableAssign` is run with its
    mapper.
    """
    if isinstance(runnable, RunnableAssign) and is_opaque(runnable.mapper):
        return True
    kinds = type(runnable).__mro__
    known = [kind for kind in kinds if _is_known(kind)]
    own_methods = {
        name
        for kind in kinds
        if not _is_known(kind)
        for name, member in vars(kind).items()
        if _is_behaviour(name, member)
    }
    return any(hasattr(base, name) for base in known for name in own_methods)


def is_other_model(runnable: Any) -> bool:
    """Return whether a Runnable is a model of another provider."""
    return isinstance(runnable, BaseLanguageModel) and not isinstance(runnable, ChatConure)


def _is_known(kind: type[Any]) -> bool:
    return kind is object or kind.__module__.partition(".")[0] in {
        *_KNOWN_PACKAGES,
        "typing",
        "abc",
    }


def _is_behaviour(name: str, member: Any) -> bool:
    """Return whether a member of a class may change how the class runs: whether it is a method."""
    is_method = isinstance(member, FunctionType | staticmethod | classmethod | partialmethod)
    return is_method and not name.startswith(("__", "model_"))


def models_of(runnable: Any) -> Iterator[ChatConure]:
    """Yield the models in a chain, in order."""
    if isinstance(runnable, ChatConure):
        yield runnable
    for part in parts_of(runnable):
        yield from models_of(part)


def parts_of(runnable: Any) -> Iterable[Any]:
    """Return the Runnables directly inside a Runnable."""
    match runnable:
        case RunnableSequence():
            return runnable.steps
        case RunnableParallel():
            return runnable.steps__.values()
        case RunnableAssign():
            return (runnable.mapper,)
        case RunnableBranch():
            pairs = (part for pair in runnable.branches for part in pair)
            return (*pairs, runnable.default)
        case RunnableWithFallbacks():
            return runnable.runnables
        case RouterRunnable():
            return runnable.runnables.values()
        case RunnableConfigurableAlternatives():
            others = (each for each in runnable.alternatives.values() if not _is_factory(each))
            return (runnable.default, *others)
        case DynamicRunnable():
            return (runnable.default,)
        case RunnableBindingBase() | RunnableEachBase():
            return (runnable.bound,)
        case _:
            return ()


def with_arguments(
    runnable: Runnable[Any, Any], kwargs: Mapping[str, Any]
) -> Runnable[Any, Any] | None:
    """Return a copy of a Runnable whose parts have the arguments that it passes on to them.

    None if LangChain passes the arguments of such a Runnable to none of its parts.
    """

    def bind(part: Runnable[Any, Any]) -> Runnable[Any, Any]:
        return RunnableBinding(bound=part, kwargs=kwargs)

    changes: dict[str, Any]
    match runnable:
        case RunnableSequence():
            changes = {"first": bind(runnable.first)}
        case RunnableBranch():
            arms = [(condition, bind(arm)) for condition, arm in runnable.branches]
            changes = {"branches": arms, "default": bind(runnable.default)}
        case RunnableWithFallbacks():
            others = [bind(each) for each in runnable.fallbacks]
            changes = {"runnable": bind(runnable.runnable), "fallbacks": others}
        case RunnableRetry():
            changes = {"kwargs": {**runnable.kwargs, **kwargs}}
        case RunnableEachBase():
            changes = {"bound": bind(runnable.bound)}
        case _:
            return None
    return runnable.model_copy(update=changes)


def configurable_ids(runnable: Any) -> Iterator[str]:
    """Yield the ids of the fields that a config can set in a chain."""
    if isinstance(runnable, RunnableConfigurableFields):
        yield from (field.id for field in runnable.fields.values())
    if isinstance(runnable, RunnableConfigurableAlternatives):
        yield runnable.which.id
    for part in parts_of(runnable):
        yield from configurable_ids(part)


def chosen_fields(configurable: Mapping[str, Any], ids: Container[str]) -> dict[str, Any]:
    """Return the entries of a config that set fields of a chain; others are for LangGraph.

    Args:
        configurable: by name, which may have a prefix: `alternative==key/id`.
        ids: ids of the fields.
    """
    return {
        name: value
        for name, value in configurable.items()
        if name in ids or name.rpartition("/")[2] in ids
    }


def _is_factory(alternative: Any) -> bool:
    """Return whether an alternative is a function that creates the Runnable when chosen."""
    return not hasattr(alternative, "invoke")
