"""Pass-through Runnables inside an accelerated chain.

An accelerated chain is a copy of the user's chain with two kinds of wrappers around its Runnables.
A `ValueProbe` reports the value of its Runnable to the active run. A `SubchainPlanner` plans its
Runnable when the chain calls it, and therefore with the actual input. Neither appears in
LangChain's events: both pass the call, the config and the result through. A plan *awaits* a value
that the chain itself computes and planned calls read (see `planner`).

Invariant: outside an accelerated run, a wrapper only passes the call through.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, nullcontext
from typing import Any, Protocol

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import PrivateAttr

from .active_run import ACTIVE_RUN, ActiveRun, current_run
from .plan import ChainPlan


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

    def plan(self, prefix: str, config: RunnableConfig | None) -> ChainPlan:
        """Return the plan of one run.

        Args:
            prefix: Prefix of the names in the plan.
            config: Config of the chain's run.
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
        with _activated(self._plan([input], config)[0]):
            return self.bound.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Plan the Runnable and run it."""
        with _activated(self._plan([input], config)[0]):
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
        runs = self._plan(inputs, config)
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
        runs = self._plan(inputs, config)
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
        (active,) = self._plan([input], config)
        chunks = self.bound.stream(input, config, **kwargs)
        yield from chunks if active is None else iterate_in(active, chunks)

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Plan the Runnable and run it."""
        (active,) = self._plan([input], config)
        chunks = self.bound.astream(input, config, **kwargs)
        async for chunk in chunks if active is None else aiterate_in(active, chunks):
            yield chunk

    def transform(
        self,
        input: Iterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Plan the Runnable for the whole input, and run it."""
        if current_run() is None:
            yield from self.bound.transform(input, config, **kwargs)
            return
        given = list(input)
        active = self._plan_sum(given, config)
        chunks = self.bound.transform(iter(given), config, **kwargs)
        yield from chunks if active is None else iterate_in(active, chunks)

    async def atransform(
        self,
        input: AsyncIterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Plan the Runnable for the whole input, and run it."""
        if current_run() is None:
            async for chunk in self.bound.atransform(input, config, **kwargs):
                yield chunk
            return
        given = [chunk async for chunk in input]
        active = self._plan_sum(given, config)
        chunks = self.bound.atransform(_each(given), config, **kwargs)
        async for chunk in chunks if active is None else aiterate_in(active, chunks):
            yield chunk

    def _plan_sum(self, chunks: list[Any], config: RunnableConfig | None) -> ActiveRun | None:
        """Plan the input that consists of these chunks; return its active run."""
        if not chunks:
            return None
        total = _ChunkSum()
        for chunk in chunks:
            total.add(chunk)
        return self._plan([total.value], config)[0]

    def _plan(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None,
    ) -> list[ActiveRun | None]:
        """Plan each input and start the planned calls; return the active run of each input."""
        active = current_run()
        if active is None or not inputs:
            return [None] * len(inputs)
        run = active.run
        first_config: Any = config[0] if isinstance(config, list) and config else config
        plans = [self._planner.plan(run.prefix(), first_config) for _ in inputs]
        run.begin([(plan, plan.inputs(given)) for plan, given in zip(plans, inputs, strict=True)])
        return [ActiveRun(run, plan) for plan in plans]


class _RunInContext(PassthroughRunnable):
    """Runs inputs that are paired with their active runs, each as a batch of one.

    `batch` rather than `invoke`, because the two differ in LangChain: `batch` nests callback runs
    differently, and raises another one of several errors.
    """

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        active, given = input
        with _activated(active):
            return self.bound.batch([given], config, **kwargs)[0]

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        active, given = input
        with _activated(active):
            return (await self.bound.abatch([given], config, **kwargs))[0]


async def _each(chunks: list[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk


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
    close = getattr(chunks, "aclose", None)
    async with nullcontext() if close is None else aclosing(chunks):  # type: ignore[type-var]  # has `aclose`
        while True:
            with ACTIVE_RUN.activate(active):
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
            yield chunk
