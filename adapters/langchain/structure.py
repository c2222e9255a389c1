"""What a chain's structure shows, without running any of it.

Knows every kind of Runnable that has others in it. Refuses to know what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from langchain_core.runnables import (
    RouterRunnable,
    RunnableAssign,
    RunnableBranch,
    RunnableParallel,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEachBase
from langchain_core.runnables.configurable import (
    DynamicRunnable,
    RunnableConfigurableAlternatives,
)

from .chat import ChatConure


def models_of(runnable: Any) -> Iterator[ChatConure]:
    """The models that a chain's structure shows, in order."""
    if isinstance(runnable, ChatConure):
        yield runnable
    for part in parts_of(runnable):
        yield from models_of(part)


def parts_of(runnable: Any) -> Iterable[Any]:
    """The Runnables that stand in another one."""
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
            others = (each for each in runnable.alternatives.values() if not _is_made(each))
            return (runnable.default, *others)
        case DynamicRunnable():
            return (runnable.default,)
        case RunnableBindingBase() | RunnableEachBase():
            return (runnable.bound,)
        case _:
            return ()


def _is_made(alternative: Any) -> bool:
    """Whether an alternative is a function that makes it when it is chosen."""
    return not hasattr(alternative, "invoke")
