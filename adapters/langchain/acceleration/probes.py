"""Pass-through Runnables inside an accelerated chain.

An accelerated chain is a copy of the user's chain with two kinds of wrappers around its Runnables.
A `ValueProbe` reports the value of its Runnable to the active run. A `SubchainPlanner` plans its
Runnable when the chain calls it, and therefore with the actual input. Neither appears in
LangChain's events: both pass the call, the config and the result through. A plan *awaits* a value
that the chain itself computes and planned calls read (see `planner`).

Invariant: outside an accelerated run, a wrapper only passes the call through.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config
from pydantic import PrivateAttr

from ...client.owned_generator import OwnedGenerator
from .active_run import ACTIVE_RUN, ActiveRun, current_run
from .chain_run import ChainRun
from .plan import NO_PLAN, ChainPlan


class PassthroughRunnable(RunnableBindingBase[Any, Any]):
    """Runs another Runnable unchanged."""

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return False: a wrapper refers to objects of this process."""
        return False


class ValueProbe(PassthroughRunnable):
    """Reports the value of its Runnable to the active run, if the plan awaits it."""

    place: str
    """The key of the value in `ChainPlan.awaited`."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the Runnable."""
        computed = self.bound.invoke(input, config, **kwargs)
        self._report(computed)
        return computed

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the Runnable."""
        computed = await self.bound.ainvoke(input, config, **kwargs)
        self._report(computed)
        return computed

    def batch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the Runnable for each input."""
        computed = self.bound.batch(inputs, *args, **kwargs)
        self._report(*computed)
        return computed

    async def abatch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the Runnable for each input."""
        computed = await self.bound.abatch(inputs, *args, **kwargs)
        self._report(*computed)
        return computed

    def stream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Run the Runnable, and report the sum of its chunks."""
        yield from self._summed(self.bound.stream(input, config, **kwargs))

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Run the Runnable, and report the sum of its chunks."""
        async for chunk in self._asummed(self.bound.astream(input, config, **kwargs)):
            yield chunk

    def transform(
        self,
        input: Iterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Run the Runnable, and report the sum of its chunks."""
        yield from self._summed(self.bound.transform(input, config, **kwargs))

    async def atransform(
        self,
        input: AsyncIterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Run the Runnable, and report the sum of its chunks."""
        async for chunk in self._asummed(self.bound.atransform(input, config, **kwargs)):
            yield chunk

    def _summed(self, chunks: Iterator[Any]) -> Iterator[Any]:
        total = _ChunkSum()
        for chunk in chunks:
            total.add(chunk)
            yield chunk
        self._report(total.value)

    async def _asummed(self, chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
        total = _ChunkSum()
        async for chunk in chunks:
            total.add(chunk)
            yield chunk
        self._report(total.value)

    def _report(self, *computed: Any) -> None:
        active = current_run()
        awaited = active.plan.awaited.get(self.place) if active is not None else None
        if active is None or awaited is None:
            return
        for value in computed:
            if not isinstance(value, BaseException):
                active.run.observe(awaited, value)


class _ChunkSum:
    """The sum of chunks by LangChain's rules: a chunk that `+` does not accept replaces the sum."""

    def __init__(self) -> None:
        self.value: Any = None
        self._is_empty = True

    def add(self, chunk: Any) -> None:
        if self._is_empty:
            self.value, self._is_empty = chunk, False
            return
        try:
            self.value = self.value + chunk
        except TypeError:
            self.value = chunk


class ChainPlanner(Protocol):
    """Creates the plans of one chain, one for each run."""

    copy: Runnable[Any, Any]
    """The chain with the probes whose values the plans await."""

    def plan(self, prefix: str, config: RunnableConfig) -> ChainPlan:
        """Return the plan of one run.

        Args:
            prefix: Prefix of the names in the plan.
            config: Complete config of the chain's run, from `ensure_config`.
        """
        ...


class SubchainPlanner(PassthroughRunnable):
    """Plans its Runnable when the chain calls it."""

    _planner: ChainPlanner = PrivateAttr()

    def __init__(self, planner: ChainPlanner) -> None:
        super().__init__(bound=planner.copy)
        self._planner = planner

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Plan the Runnable and run it."""
        with _activated(self._plan([input], config, kwargs)[0]):
            return self.bound.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Plan the Runnable and run it."""
        with _activated(self._plan([input], config, kwargs)[0]):
            return await self.bound.ainvoke(input, config, **kwargs)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Plan the Runnable for all inputs at once, then run it for each one independently."""
        runs = self._plan(inputs, config, kwargs)
        return Runnable.batch(
            _RunInContext(bound=self.bound),
            list(zip(runs, inputs, strict=True)),
            config,
            return_exceptions=return_exceptions,
            **kwargs,
        )

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Plan the Runnable for all inputs at once, then run it for each one independently."""
        runs = self._plan(inputs, config, kwargs)
        return await Runnable.abatch(
            _RunInContext(bound=self.bound),
            list(zip(runs, inputs, strict=True)),
            config,
            return_exceptions=return_exceptions,
            **kwargs,
        )

    def stream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Plan the Runnable and run it."""
        (active,) = self._plan([input], config, kwargs)
        chunks = self.bound.stream(input, config, **kwargs)
        yield from chunks if active is None else iterate_in(active, chunks)

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Plan the Runnable and run it."""
        (active,) = self._plan([input], config, kwargs)
        chunks = self.bound.astream(input, config, **kwargs)
        async for chunk in chunks if active is None else aiterate_in(active, chunks):
            yield chunk

    def transform(
        self,
        input: Iterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Plan the Runnable for the whole input, and run it.

        The input of a Runnable without planned calls is passed on as it arrives.
        """
        outer = current_run()
        if outer is None:
            yield from self.bound.transform(input, config, **kwargs)
            return
        (plan,) = self._new_plans(outer.run, 1, config, kwargs)
        if plan.calls:
            given = list(input)
            _begin_with_sum(outer.run, plan, given)
            pieces: Iterator[Any] = iter(given)
        else:
            outer.run.begin([(plan, {})])
            pieces = iterate_in(outer, input)  # earlier parts of the chain compute the input
        yield from iterate_in(
            ActiveRun(outer.run, plan), self.bound.transform(pieces, config, **kwargs)
        )

    async def atransform(
        self,
        input: AsyncIterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Plan the Runnable and run it, as `transform` does."""
        outer = current_run()
        if outer is None:
            async for chunk in self.bound.atransform(input, config, **kwargs):
                yield chunk
            return
        (plan,) = self._new_plans(outer.run, 1, config, kwargs)
        if plan.calls:
            given = [chunk async for chunk in input]
            _begin_with_sum(outer.run, plan, given)
            pieces = _each(given)
        else:
            outer.run.begin([(plan, {})])
            pieces = aiterate_in(outer, input)
        chunks = self.bound.atransform(pieces, config, **kwargs)
        async for chunk in aiterate_in(ActiveRun(outer.run, plan), chunks):
            yield chunk

    def _plan(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None,
        kwargs: Mapping[str, Any],
    ) -> list[ActiveRun | None]:
        """Plan each input and start the planned calls; return the active run of each input."""
        active = current_run()
        if active is None or not inputs:
            return [None] * len(inputs)
        run = active.run
        plans = self._new_plans(run, len(inputs), config, kwargs)
        run.begin([(plan, plan.inputs(given)) for plan, given in zip(plans, inputs, strict=True)])
        return [ActiveRun(run, plan) for plan in plans]

    def _new_plans(
        self,
        run: ChainRun,
        num_plans: int,
        config: RunnableConfig | list[RunnableConfig] | None,
        kwargs: Mapping[str, Any],
    ) -> list[ChainPlan]:
        if kwargs:
            return [NO_PLAN] * num_plans
        first: Any = config[0] if isinstance(config, list) and config else config
        full = ensure_config(first)
        return [self._planner.plan(run.prefix(), full) for _ in range(num_plans)]


class _RunInContext(PassthroughRunnable):
    """Runs inputs that are paired with their active runs, each as a batch of one.

    `batch` rather than `invoke`, because the two differ in LangChain: `batch` nests callback runs
    differently and, if several errors occur, raises a different one of them than `invoke`.
    """

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        active, given = input
        with _activated(active):
            return self.bound.batch([given], config, **kwargs)[0]

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        active, given = input
        with _activated(active):
            return (await self.bound.abatch([given], config, **kwargs))[0]


async def _each(chunks: list[Any]) -> AsyncGenerator[Any, None]:
    for chunk in chunks:
        yield chunk


def _begin_with_sum(run: ChainRun, plan: ChainPlan, chunks: list[Any]) -> None:
    """Start the calls of a plan whose input consists of these chunks."""
    total = _ChunkSum()
    for chunk in chunks:
        total.add(chunk)
    if chunks:
        run.begin([(plan, plan.inputs(total.value))])


def _activated(active: ActiveRun | None) -> Any:
    return nullcontext() if active is None else ACTIVE_RUN.activate(active)


def iterate_in(active: ActiveRun, chunks: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield chunks that are computed within an active run; the consumer runs outside of it."""
    try:
        while True:
            with ACTIVE_RUN.activate(active):
                try:
                    chunk = next(chunks)
                except StopIteration:
                    return
            yield chunk
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


async def aiterate_in(active: ActiveRun, chunks: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """Yield chunks as `iterate_in` does, from an asynchronous iterator."""
    owner: AbstractAsyncContextManager[AsyncIterator[Any]] = nullcontext(chunks)
    if isinstance(chunks, AsyncGenerator):
        owner = OwnedGenerator(chunks)
    async with owner as source:
        while True:
            with ACTIVE_RUN.activate(active):
                try:
                    chunk = await anext(source)
                except StopAsyncIteration:
                    return
            yield chunk
            source = chunks  # `owner` swaps the hooks of the loop; the first step alone needs it
