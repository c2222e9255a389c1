"""`accelerate`: a chain whose calls run ahead of it on the server.

What can be known of a chain before it runs is submitted whole, as a program. Then the chain
itself runs, as it always did, and its calls find their answers being made or made already.
Output, events, tags, retries, fallbacks and parsers are LangChain's own, because nothing of
them is done here; only the waiting goes.

Knows Runnables, and where plans begin and end. Kept true: an accelerated chain gives what
the chain gives; where the plan is wrong, a call is an ordinary one and is counted.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import coerce_to_runnable
from pydantic import PrivateAttr

from conure.server.program.errors import ProgramError

from .async_replay import AsyncReplay
from .chat import ChatConure
from .current import CURRENT, Frame, within
from .gates import Seam, ainside, inside
from .plan import Plan
from .planning import server_of
from .replay import Replay
from .structure import models_of
from .tailor import Tailor
from .tally import Tally

NUM_REMEMBERED = 100
"""Runs whose tallies `explain` tells."""


def accelerate(runnable: Any, *, model: ChatConure | None = None) -> Accelerated:
    """A chain that does what it did, with its model calls running ahead of it.

    Args:
        runnable: a Runnable, or what LangChain takes for one (a dict, a function).
        model: whose server plans it. None: the first `ChatConure` that the chain's
            structure shows.

    Raises:
        ProgramError: `accelerate.no_model` if there is none.
    """
    chain = coerce_to_runnable(runnable)
    if isinstance(chain, Accelerated):
        chain = chain.bound
    found = model or next(models_of(chain), None)
    if found is None:
        raise ProgramError(
            "accelerate.no_model",
            "the chain shows no ChatConure; name the one that runs in it: "
            "accelerate(chain, model=llm)",
        )
    return Accelerated(chain, found)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What of a chain runs ahead, what it waits for, and what became of its latest runs."""

    plan: Plan
    runs: tuple[Tally, ...]

    def __str__(self) -> str:
        lines = ["runs ahead on the server:"]
        lines += [f"  {call.place}" for call in self.plan.calls] or ["  nothing"]
        lines.append("made by the chain, where it stands:")
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


class Accelerated(Seam):
    """A chain with its calls running ahead; a Runnable in the chain's own place."""

    _model: ChatConure = PrivateAttr()
    _planner: Tailor = PrivateAttr()
    _runs: deque[Tally] = PrivateAttr()

    def __init__(self, chain: Runnable[Any, Any], model: ChatConure) -> None:
        super().__init__(bound=chain)
        self._model = model
        self._planner = Tailor(chain, server_of(model))
        self._runs = deque(maxlen=NUM_REMEMBERED)

    def explain(self) -> Explanation:
        """What runs ahead, what does not and why, and how the latest runs went."""
        return Explanation(self._planner.plain, tuple(self._runs))

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the chain."""
        if CURRENT.get() is not None:
            return self.bound.invoke(input, config, **kwargs)
        with self._running(input, config, kwargs, is_streamed=False) as frame, within(frame):
            return self._planner.copy.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the chain."""
        if CURRENT.get() is not None:
            return await self.bound.ainvoke(input, config, **kwargs)
        async with self._arunning(input, config, kwargs, is_streamed=False) as frame:
            with within(frame):
                return await self._planner.copy.ainvoke(input, config, **kwargs)

    def stream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Run the chain, in pieces."""
        if CURRENT.get() is not None:
            yield from self.bound.stream(input, config, **kwargs)
            return
        with self._running(input, config, kwargs, is_streamed=True) as frame:
            yield from inside(frame, self._planner.copy.stream(input, config, **kwargs))

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Run the chain, in pieces."""
        if CURRENT.get() is not None:
            async for piece in self.bound.astream(input, config, **kwargs):
                yield piece
            return
        async with self._arunning(input, config, kwargs, is_streamed=True) as frame:
            pieces = ainside(frame, self._planner.copy.astream(input, config, **kwargs))
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    # What Runnable makes of these: not handed to the chain, which knows no plan.

    def batch(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the chain on each input, none of them waiting for another's step."""
        return Runnable.batch(_Batched(bound=self), *args, **kwargs)

    async def abatch(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the chain on each input, none of them waiting for another's step."""
        return await Runnable.abatch(_Batched(bound=self), *args, **kwargs)

    def batch_as_completed(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run the chain on each input; results come as they are there."""
        yield from Runnable.batch_as_completed(self, *args, **kwargs)

    async def abatch_as_completed(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run the chain on each input; results come as they are there."""
        async for each in Runnable.abatch_as_completed(self, *args, **kwargs):
            yield each

    def transform(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run the chain on what the pieces of the input add up to."""
        yield from Runnable.transform(self, *args, **kwargs)

    async def atransform(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run the chain on what the pieces of the input add up to."""
        async for piece in Runnable.atransform(self, *args, **kwargs):
            yield piece

    def astream_events(self, *args: Any, **kwargs: Any) -> Any:
        """The chain's events; `version="v3"` is the chain's own, without a plan."""
        if kwargs.get("version") == "v3":
            return super().astream_events(*args, **kwargs)
        return Runnable.astream_events(self, *args, **kwargs)

    def one(self, given: Any, config: RunnableConfig | None, kwargs: Mapping[str, Any]) -> Any:
        """Run the chain as a batch of one input, with the runs and errors of a batch."""
        if CURRENT.get() is not None:
            return self.bound.batch([given], config, **kwargs)[0]
        with self._running(given, config, kwargs, is_streamed=False) as frame, within(frame):
            return self._planner.copy.batch([given], config, **kwargs)[0]

    async def aone(
        self, given: Any, config: RunnableConfig | None, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the chain as a batch of one input, with the runs and errors of a batch."""
        if CURRENT.get() is not None:
            return (await self.bound.abatch([given], config, **kwargs))[0]
        async with self._arunning(given, config, kwargs, is_streamed=False) as frame:
            with within(frame):
                return (await self._planner.copy.abatch([given], config, **kwargs))[0]

    @contextlib.contextmanager
    def _running(
        self,
        given: Any,
        config: RunnableConfig | None,
        kwargs: Mapping[str, Any],
        *,
        is_streamed: bool,
    ) -> Iterator[Frame]:
        replay = Replay(self._model._client(), self.get_name(), is_streamed=is_streamed)
        is_failed = True
        try:
            plan = self._planner.plan(replay.board.prefix(), config)
            # Arguments of one call change what its first step asks, which nobody foresaw.
            replay.begin([] if kwargs else [(plan, plan.inputs(given))])
            yield Frame(replay, plan)
            is_failed = False
        finally:
            self._runs.append(replay.end(is_failed=is_failed))

    @contextlib.asynccontextmanager
    async def _arunning(
        self,
        given: Any,
        config: RunnableConfig | None,
        kwargs: Mapping[str, Any],
        *,
        is_streamed: bool,
    ) -> AsyncIterator[Frame]:
        replay = AsyncReplay(self._model._aclient(), self.get_name(), is_streamed=is_streamed)
        is_failed = True
        try:
            plan = self._planner.plan(replay.board.prefix(), config)
            await replay.begin([] if kwargs else [(plan, plan.inputs(given))])
            yield Frame(replay, plan)
            is_failed = False
        finally:
            self._runs.append(await replay.end(is_failed=is_failed))


class _Batched(Seam):
    """An accelerated chain whose inputs are batches of their own."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        assert isinstance(self.bound, Accelerated)
        return self.bound.one(input, config, kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        assert isinstance(self.bound, Accelerated)
        return await self.bound.aone(input, config, kwargs)
