"""Copies of chains with the probes that their plans need.

Visits the same structure as `planner` and inserts `probes` where the plan waits for values and
where parts are planned later.

Invariant: the user's chain is not modified.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any, Final

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

from ..compilation.chain_graph import ChainPosition
from ..compilation.traversal import chosen_fields, configurable_ids, is_opaque
from .active_run import current_run
from .plan import ChainPlan
from .planner import plan_of
from .probes import SubchainPlanner, ValueProbe

MAX_PLANS: Final = 256
"""Plans of one chain that are kept for later runs, which use the same prefixes."""


class ChainInstrumenter:
    """Makes the plans of one chain, and its copy with probes."""

    def __init__(self, chain: Runnable[Any, Any], identity: object) -> None:
        self.chain = chain
        self._identity = identity
        self.default_plan = self._new_plan("", None)
        """The plan for configs without configurable fields."""
        self.copy = _Instrumenter(self.default_plan, identity).instrument(
            chain, ChainPosition("chain", "")
        )
        """The chain with probes. If a config changes the plan, a probe may be missing; then the
        calls that wait for its value are misses."""
        self._plans = {"": self.default_plan}
        """By prefix, for configs without configurable fields. Making the plans of a `.map()` over
        twenty items takes longer than the rest of the run before its request."""

    @functools.cached_property
    def _configurable_ids(self) -> frozenset[str]:
        """Ids of the fields that a config can set; they change the plan."""
        return frozenset(configurable_ids(self.chain))

    def plan(self, prefix: str, config: RunnableConfig) -> ChainPlan:
        """Return the plan of one run.

        Args:
            prefix: Prefix of the names in the plan.
            config: Complete config of the chain's run, from `ensure_config`.
        """
        configurable = config.get("configurable")
        fields = chosen_fields(configurable, self._configurable_ids) if configurable else {}
        if fields:
            return self._new_plan(prefix, {"configurable": fields})
        plan = self._plans.get(prefix)
        if plan is None or not plan.is_current():
            plan = self._new_plan(prefix, None)
            if prefix in self._plans or len(self._plans) < MAX_PLANS:
                self._plans[prefix] = plan
        return plan

    def _new_plan(self, prefix: str, config: RunnableConfig | None) -> ChainPlan:
        return plan_of(self.chain, identity=self._identity, prefix=prefix, config=config)


class _Instrumenter:
    """Copies a chain and inserts the probes of a plan."""

    def __init__(self, plan: ChainPlan, identity: object) -> None:
        self._plan = plan
        self._identity = identity

    def instrument(self, runnable: Runnable[Any, Any], place: ChainPosition) -> Runnable[Any, Any]:
        """Return a copy of the Runnable with probes inside and around it."""
        inner = self._copy(runnable, place)
        if place.path in self._plan.awaited:
            return ValueProbe(bound=inner, place=place.path)
        return inner

    def _copy(self, runnable: Runnable[Any, Any], place: ChainPosition) -> Runnable[Any, Any]:
        # Positions must equal those that `planner` assigns.
        if is_opaque(runnable):
            return runnable
        if isinstance(runnable, RunnableSequence):
            steps = [
                self.instrument(each, place.step(i, "")) for i, each in enumerate(runnable.steps)
            ]
            first, *middle, last = steps
            return runnable.model_copy(update={"first": first, "middle": middle, "last": last})
        if isinstance(runnable, RunnableParallel):
            branches = {k: self.instrument(r, place.branch(k)) for k, r in runnable.steps__.items()}
            return runnable.model_copy(update={"steps__": branches})
        if isinstance(runnable, RunnableAssign):
            return runnable.model_copy(update={"mapper": self._copy(runnable.mapper, place)})
        if isinstance(runnable, RunnableBinding):
            return runnable.model_copy(update={"bound": self._copy(runnable.bound, place)})
        return self._copy_control(runnable)

    def _copy_control(self, runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
        if isinstance(runnable, RunnableBranch):
            arms = [(condition, self._plan_later(each)) for condition, each in runnable.branches]
            default = self._plan_later(runnable.default)
            return runnable.model_copy(update={"branches": arms, "default": default})
        if isinstance(runnable, RunnableWithFallbacks):
            fallbacks = [self._plan_later(each) for each in runnable.fallbacks]
            first = self._plan_later(runnable.runnable)
            return runnable.model_copy(update={"runnable": first, "fallbacks": fallbacks})
        if isinstance(runnable, RouterRunnable):
            routes = {key: self._plan_later(each) for key, each in runnable.runnables.items()}
            return runnable.model_copy(update={"runnables": routes})
        if isinstance(runnable, RunnableEachBase | RunnableRetry):
            return runnable.model_copy(update={"bound": self._plan_later(runnable.bound)})
        if isinstance(runnable, RunnableLambda):
            return self._copy_function(runnable)
        return runnable

    def _copy_function(self, function: RunnableLambda[Any, Any]) -> Runnable[Any, Any]:
        """Return a function whose result, if it is a chain that LangChain then runs, is planned."""
        copied = copy.copy(function)
        func: Any = getattr(function, "func", None)
        afunc: Any = getattr(function, "afunc", None)
        if _is_python_function(func):

            @functools.wraps(func)
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._plan_result(func(*args, **kwargs))

            copied.func = call
        if _is_python_function(afunc):

            @functools.wraps(afunc)
            async def acall(*args: Any, **kwargs: Any) -> Any:
                return self._plan_result(await afunc(*args, **kwargs))

            copied.afunc = acall
        return copied

    def _plan_result(self, result: Any) -> Any:
        is_chain = isinstance(result, Runnable) and current_run() is not None
        return self._plan_later(result) if is_chain else result

    def _plan_later(self, runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
        planner = ChainInstrumenter(runnable, self._identity)
        if not planner.default_plan.calls and planner.copy is runnable:
            return runnable
        return SubchainPlanner(planner)


def _is_python_function(function: Any) -> bool:
    """Return whether this is a Python function that is not a generator."""
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return inspect.isroutine(function) and not inspect.isbuiltin(function) and not is_generator
