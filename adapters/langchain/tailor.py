"""A chain, copied with the seams that its plan wants.

Walks the same structure as `planning` and puts `gates` where the plan awaits values and
where parts are planned later. Knows Runnables of LangChain and how to copy them. Refuses to
know runs. Kept true: the user's chain is left as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEachBase
from langchain_core.runnables.retry import RunnableRetry

from .current import CURRENT
from .gates import Entered, Watched
from .graph import Place
from .plan import Plan
from .planning import plan_of


class Tailor:
    """A chain that gets a plan for every run, and the copy of it that has the seams."""

    def __init__(self, chain: Runnable[Any, Any], server: object) -> None:
        self.chain = chain
        self._server = server
        self.plain = plan_of(chain, server=server, prefix="", config=None)
        """The plan for configs that configure nothing."""
        self.copy = _Sewing(self.plain, server).sew(chain, Place("chain", ""))
        """The chain with seams. A plan that a config changes may miss some, and then waits."""

    def plan(self, prefix: str, config: RunnableConfig | None) -> Plan:
        """The plan of one run.

        Args:
            prefix: of its names.
            config: that the chain runs with.
        """
        if not prefix and not (config and config.get("configurable")):
            return self.plain
        return plan_of(self.chain, server=self._server, prefix=prefix, config=config)


class _Sewing:
    """Copies a chain, with seams where a plan wants them."""

    def __init__(self, plan: Plan, server: object) -> None:
        self._plan = plan
        self._server = server

    def sew(self, runnable: Runnable[Any, Any], place: Place) -> Runnable[Any, Any]:
        """The Runnable with seams in it and around it."""
        inner = self._inside(runnable, place)
        if place.path in self._plan.awaited:
            return Watched(bound=inner, place=place.path)
        return inner

    def _inside(self, runnable: Runnable[Any, Any], place: Place) -> Runnable[Any, Any]:
        # The places are those of the walk.
        if isinstance(runnable, RunnableSequence):
            steps = [self.sew(each, place.step(i, "")) for i, each in enumerate(runnable.steps)]
            first, *middle, last = steps
            return runnable.model_copy(update={"first": first, "middle": middle, "last": last})
        if isinstance(runnable, RunnableParallel):
            branches = {k: self.sew(r, place.branch(k)) for k, r in runnable.steps__.items()}
            return runnable.model_copy(update={"steps__": branches})
        if isinstance(runnable, RunnableAssign):
            return runnable.model_copy(update={"mapper": self._inside(runnable.mapper, place)})
        if isinstance(runnable, RunnableBinding):
            return runnable.model_copy(update={"bound": self._inside(runnable.bound, place)})
        return self._resolved(runnable)

    def _resolved(self, runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
        if isinstance(runnable, RunnableBranch):
            arms = [(condition, self._entered(each)) for condition, each in runnable.branches]
            default = self._entered(runnable.default)
            return runnable.model_copy(update={"branches": arms, "default": default})
        if isinstance(runnable, RunnableWithFallbacks):
            fallbacks = [self._entered(each) for each in runnable.fallbacks]
            first = self._entered(runnable.runnable)
            return runnable.model_copy(update={"runnable": first, "fallbacks": fallbacks})
        if isinstance(runnable, RouterRunnable):
            routes = {key: self._entered(each) for key, each in runnable.runnables.items()}
            return runnable.model_copy(update={"runnables": routes})
        if isinstance(runnable, RunnableEachBase | RunnableRetry):
            return runnable.model_copy(update={"bound": self._entered(runnable.bound)})
        if isinstance(runnable, RunnableLambda):
            return self._with_planned_results(runnable)
        return runnable

    def _with_planned_results(self, function: RunnableLambda[Any, Any]) -> Runnable[Any, Any]:
        """The function; a chain that it returns, which LangChain then runs, gets a plan."""
        sewn = copy.copy(function)
        func: Any = getattr(function, "func", None)
        afunc: Any = getattr(function, "afunc", None)
        if _is_plain(func):

            @functools.wraps(func)
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._planned(func(*args, **kwargs))

            sewn.func = call
        if _is_plain(afunc):

            @functools.wraps(afunc)
            async def acall(*args: Any, **kwargs: Any) -> Any:
                return self._planned(await afunc(*args, **kwargs))

            sewn.afunc = acall
        return sewn

    def _planned(self, made: Any) -> Any:
        return self._entered(made) if isinstance(made, Runnable) and CURRENT.get() else made

    def _entered(self, runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
        planner = Tailor(runnable, self._server)
        if not planner.plain.calls and planner.copy is runnable:
            return runnable
        return Entered(planner)


def _is_plain(function: Any) -> bool:
    """Whether there is a function, and it returns its value; generators yield it."""
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return inspect.isroutine(function) and not inspect.isbuiltin(function) and not is_generator
