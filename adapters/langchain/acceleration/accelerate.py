"""`accelerate`: a chain whose model calls run ahead of it on the server.

The calls that are known before the chain runs are submitted as one program. Then the chain runs as
usual, and its calls receive answers that the server is already computing. Outputs, events, tags,
retries, fallbacks and parsers remain LangChain's own.

Invariant: an accelerated chain returns what the chain returns. Where the plan is wrong, the call is
sent as usual and counted as a miss.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import coerce_to_runnable
from langchain_core.runnables.config import ensure_config
from langchain_core.runnables.graph import Graph
from pydantic import PrivateAttr

from ...client.owned_generator import OwnedGenerator
from ..chat.call_meta import session_of_run
from ..chat.model import ChatConure
from ..compilation.traversal import models_of
from .active_run import ACTIVE_RUN, ActiveRun, current_run
from .chain_run import ChainRun
from .instrument import ChainInstrumenter
from .plan import NO_PLAN, ChainPlan
from .planner import identity_of
from .probes import PassthroughRunnable, aiterate_in, iterate_in
from .run_stats import RunStats

MAX_EXPLAINED_RUNS = 100
"""Runs that `explain` reports."""


def accelerate(runnable: Any, *, model: ChatConure | None = None) -> Accelerated:
    """Return the chain so that its model calls are submitted to the server in advance.

    Args:
        runnable: a Runnable, or an object that LangChain coerces to one (a dict, a function).
        model: a model of the server whose calls are planned; calls to other servers are not.
            None: the first `ChatConure` that is visible in the structure of the chain. If none is
            visible, nothing is planned, and the run uses the server of the first model that is
            called.
    """
    chain = coerce_to_runnable(runnable)
    if isinstance(chain, Accelerated):
        model, chain = model or chain._model, chain.bound
    return Accelerated(chain, model or next(models_of(chain), None))


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan of a chain and the statistics of its latest runs."""

    plan: ChainPlan
    runs: tuple[RunStats, ...]

    def __str__(self) -> str:
        is_direct = self.plan.is_direct
        lines = ["sent when the chain reaches it:" if is_direct else "runs ahead on the server:"]
        lines += [f"  {call.place}" for call in self.plan.calls] or ["  nothing"]
        lines.append("computed by the chain itself:")
        for each in self.plan.awaited.values():
            lines.append(f"  {each.place} ({each.what}): {each.why}")
        if not self.plan.awaited:
            lines.append("  nothing")
        for run in self.runs:
            lines.append(
                f"run {run.program or '-'}: {run.num_planned} planned, {run.num_served} served, "
                f"{len(run.misses)} missed, {len(run.wasted)} wasted"
            )
            lines += [f"  missed: {miss.why}" for miss in run.misses]
            lines += [f"  wasted: {place}" for place in run.wasted]
            lines += [f"  refused: {reason}" for reason in run.refusals]
        return "\n".join(lines)


class Accelerated(PassthroughRunnable):
    """A chain whose model calls are submitted in advance; replaces the chain anywhere."""

    _model: ChatConure | None = PrivateAttr()
    _instrumenter: ChainInstrumenter = PrivateAttr()
    _runs: deque[RunStats] = PrivateAttr()

    def __init__(self, chain: Runnable[Any, Any], model: ChatConure | None) -> None:
        super().__init__(bound=chain, name=getattr(chain, "name", None))
        self._model = model
        identity = None if model is None else identity_of(model)
        self._instrumenter = ChainInstrumenter(chain, identity)
        self._runs = deque(maxlen=MAX_EXPLAINED_RUNS)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the chain, such as a graph's `get_state` or `checkpointer`."""
        if name.startswith("_"):
            # A private attribute belongs to this object. pydantic raises if there is none.
            return super().__getattr__(name)  # type: ignore[misc]  # pydantic defines it
        return getattr(self.bound, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Accelerated, (self.bound, self._model)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Accelerated:
        return Accelerated(deepcopy(self.bound, memo), self._model)

    def get_graph(self, *args: Any, **kwargs: Any) -> Graph:
        """Return the drawing of the chain, with the arguments that its class accepts."""
        return self.bound.get_graph(*args, **kwargs)

    def explain(self) -> Explanation:
        """Return the plan, why parts of the chain are not planned, and the statistics of the latest
        runs.
        """
        return Explanation(self._instrumenter.default_plan, tuple(self._runs))

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the chain."""
        if current_run() is not None:
            return self.bound.invoke(input, config, **kwargs)
        with (
            self._running(input, config, kwargs, is_streamed=False) as active,
            ACTIVE_RUN.activate(active),
        ):
            return self._instrumenter.copy.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the chain."""
        if current_run() is not None:
            return await self.bound.ainvoke(input, config, **kwargs)
        async with self._arunning(input, config, kwargs, is_streamed=False) as active:
            with ACTIVE_RUN.activate(active):
                return await self._instrumenter.copy.ainvoke(input, config, **kwargs)

    def stream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Run the chain and yield its chunks."""
        if current_run() is not None:
            yield from self.bound.stream(input, config, **kwargs)
            return
        with self._running(input, config, kwargs, is_streamed=True) as active:
            yield from iterate_in(active, self._instrumenter.copy.stream(input, config, **kwargs))

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Run the chain and yield its chunks."""
        if current_run() is not None:
            async for chunk in self.bound.astream(input, config, **kwargs):
                yield chunk
            return
        async with self._arunning(input, config, kwargs, is_streamed=True) as active:
            chunks = aiterate_in(active, self._instrumenter.copy.astream(input, config, **kwargs))
            async with OwnedGenerator(chunks) as owned:
                async for chunk in owned:
                    yield chunk

    # `Runnable` implements the methods below with `invoke` and `stream`. The chain's own
    # implementations would run without a plan.

    def batch(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the chain on each input independently."""
        return Runnable.batch(_BatchOfOne(bound=self), *args, **kwargs)

    async def abatch(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the chain on each input independently."""
        return await Runnable.abatch(_BatchOfOne(bound=self), *args, **kwargs)

    def batch_as_completed(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run the chain on each input; yield results as they complete."""
        yield from Runnable.batch_as_completed(self, *args, **kwargs)

    async def abatch_as_completed(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run the chain on each input; yield results as they complete."""
        async for each in Runnable.abatch_as_completed(self, *args, **kwargs):
            yield each

    def transform(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run the chain on the sum of the input's chunks."""
        yield from Runnable.transform(self, *args, **kwargs)

    async def atransform(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run the chain on the sum of the input's chunks."""
        async for chunk in Runnable.atransform(self, *args, **kwargs):
            yield chunk

    def astream_events(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the chain's events. With `version="v3"` the chain runs without a plan."""
        if kwargs.get("version") == "v3":
            return super().astream_events(*args, **kwargs)
        return Runnable.astream_events(self, *args, **kwargs)

    def run_as_batch(
        self, given: Any, config: RunnableConfig | None, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the chain as a batch of one input, with the events and errors of a batch."""
        if current_run() is not None:
            return self.bound.batch([given], config, **kwargs)[0]
        with (
            self._running(given, config, kwargs, is_streamed=False) as active,
            ACTIVE_RUN.activate(active),
        ):
            return self._instrumenter.copy.batch([given], config, **kwargs)[0]

    async def arun_as_batch(
        self, given: Any, config: RunnableConfig | None, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the chain as a batch of one input, with the events and errors of a batch."""
        if current_run() is not None:
            return (await self.bound.abatch([given], config, **kwargs))[0]
        async with self._arunning(given, config, kwargs, is_streamed=False) as active:
            with ACTIVE_RUN.activate(active):
                return (await self._instrumenter.copy.abatch([given], config, **kwargs))[0]

    def _new_run(self, config: RunnableConfig, *, is_streamed: bool) -> ChainRun:
        client = None if self._model is None else self._model.connection()
        session = session_of_run(config)
        return ChainRun(client, self.get_name(), is_streamed=is_streamed, session=session)

    @contextlib.contextmanager
    def _running(
        self,
        given: Any,
        config: RunnableConfig | None,
        kwargs: Mapping[str, Any],
        *,
        is_streamed: bool,
    ) -> Iterator[ActiveRun]:
        full = ensure_config(config)
        run = self._new_run(full, is_streamed=is_streamed)
        is_failed = True
        try:
            yield self._begin(run, given, full, kwargs)
            is_failed = False
        finally:
            self._runs.append(run.end(is_failed=is_failed))

    def _arunning(
        self,
        given: Any,
        config: RunnableConfig | None,
        kwargs: Mapping[str, Any],
        *,
        is_streamed: bool,
    ) -> _AwaitedRun:
        full = ensure_config(config)
        run = self._new_run(full, is_streamed=is_streamed)
        return _AwaitedRun(run, partial(self._begin, run, given, full, kwargs), self._runs)

    def _begin(
        self, run: ChainRun, given: Any, config: RunnableConfig, kwargs: Mapping[str, Any]
    ) -> ActiveRun:
        if kwargs:
            return ActiveRun(run, NO_PLAN)
        plan = self._instrumenter.plan(run.prefix(), config)
        run.begin([(plan, plan.inputs(given))], is_start=True)
        return ActiveRun(run, plan)


class _AwaitedRun:
    """Begins a run and ends it, around a block.

    This is not an async generator, because streams use it; `owned_generator` gives the reason.
    """

    def __init__(
        self, run: ChainRun, begin: Callable[[], ActiveRun], runs: deque[RunStats]
    ) -> None:
        """Args: `begin` starts the planned calls of `run`; `runs` receives its statistics."""
        self._run = run
        self._begin = begin
        self._runs = runs

    async def __aenter__(self) -> ActiveRun:
        try:
            return self._begin()
        except BaseException:
            await self._end(is_failed=True)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._end(is_failed=kind is not None)

    async def _end(self, *, is_failed: bool) -> None:
        self._runs.append(await self._run.aend(is_failed=is_failed))


class _BatchOfOne(PassthroughRunnable):
    """Runs each input of an accelerated chain as a batch of one.

    `Runnable.batch` calls `invoke` for each input, but events and errors of `chain.batch` differ
    from those of `chain.invoke`. A batch of one has the events and errors of a batch, and its own
    plan.
    """

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        assert isinstance(self.bound, Accelerated)
        return self.bound.run_as_batch(input, config, kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        assert isinstance(self.bound, Accelerated)
        return await self.bound.arun_as_batch(input, config, kwargs)
