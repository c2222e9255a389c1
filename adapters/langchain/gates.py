"""Seams in a chain: where it tells its plan what it made, and where parts get plans.

An accelerated chain is a copy of the user's with two kinds of seams put around some of its
parts. `Watched` passes on what its part makes and tells the plan; `Entered` makes a plan of
its part when the chain gets there, with the input that it gets. Both have no run of their
own in LangChain's events: they hand on call, config and result as they are.

Knows Runnables and frames. Refuses to know what plans consist of. Kept true: outside of an
accelerated run a seam does nothing at all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import PrivateAttr

from .async_replay import AsyncReplay
from .current import CURRENT, Frame, within
from .plan import Plan
from .replay import Replay


class Seam(RunnableBindingBase[Any, Any]):
    """A part of a chain that is run as it is."""

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """No: it belongs to one chain in memory."""
        return False


class Watched(Seam):
    """A part whose result the plan waits for."""

    place: str

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the part."""
        made = self.bound.invoke(input, config, **kwargs)
        self._tell(made)
        return made

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Run the part."""
        made = await self.bound.ainvoke(input, config, **kwargs)
        await self._atell(made)
        return made

    def batch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the part for each input."""
        made = self.bound.batch(inputs, *args, **kwargs)
        for each in made:
            if not isinstance(each, BaseException):
                self._tell(each)
        return made

    async def abatch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the part for each input."""
        made = await self.bound.abatch(inputs, *args, **kwargs)
        for each in made:
            if not isinstance(each, BaseException):
                await self._atell(each)
        return made

    def stream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Run the part; the plan gets what its pieces add up to."""
        yield from self._told(self.bound.stream(input, config, **kwargs))

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Run the part; the plan gets what its pieces add up to."""
        async for piece in self._atold(self.bound.astream(input, config, **kwargs)):
            yield piece

    def transform(
        self,
        input: Iterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Run the part; the plan gets what its pieces add up to."""
        yield from self._told(self.bound.transform(input, config, **kwargs))

    async def atransform(
        self,
        input: AsyncIterator[Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Run the part; the plan gets what its pieces add up to."""
        async for piece in self._atold(self.bound.atransform(input, config, **kwargs)):
            yield piece

    def _told(self, pieces: Iterator[Any]) -> Iterator[Any]:
        total = _Total()
        for piece in pieces:
            total.add(piece)
            yield piece
        self._tell(total.value)

    async def _atold(self, pieces: AsyncIterator[Any]) -> AsyncIterator[Any]:
        total = _Total()
        async for piece in pieces:
            total.add(piece)
            yield piece
        await self._atell(total.value)

    def _tell(self, made: Any) -> None:
        frame = CURRENT.get()
        if frame is not None and isinstance(frame.replay, Replay):
            awaited = frame.plan.awaited.get(self.place)
            if awaited is not None:
                frame.replay.observe(awaited, made)

    async def _atell(self, made: Any) -> None:
        frame = CURRENT.get()
        if frame is not None and isinstance(frame.replay, AsyncReplay):
            awaited = frame.plan.awaited.get(self.place)
            if awaited is not None:
                await frame.replay.observe(awaited, made)


class _Total:
    """What pieces add up to, by LangChain's rules."""

    def __init__(self) -> None:
        self.value: Any = None
        self._is_empty = True

    def add(self, piece: Any) -> None:
        if self._is_empty:
            self.value, self._is_empty = piece, False
            return
        try:
            self.value = self.value + piece
        except TypeError:
            self.value = piece


class Planner(Protocol):
    """Makes plans of one chain, and has the copy of it that has their seams."""

    copy: Runnable[Any, Any]

    def plan(self, prefix: str, config: RunnableConfig | None) -> Plan:
        """The plan of one run.

        Args:
            prefix: of its names.
            config: that the chain runs with.
        """
        ...


class Entered(Seam):
    """A part that is planned when the chain gets there."""

    _planner: Planner = PrivateAttr()

    def __init__(self, planner: Planner) -> None:
        super().__init__(bound=planner.copy)
        self._planner = planner

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Plan the part and run it."""
        frames = self._enter([input], config)
        if frames is None:
            return self.bound.invoke(input, config, **kwargs)
        with within(frames[0]):
            return self.bound.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Plan the part and run it."""
        frames = await self._aenter([input], config)
        if frames is None:
            return await self.bound.ainvoke(input, config, **kwargs)
        with within(frames[0]):
            return await self.bound.ainvoke(input, config, **kwargs)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Plan the part for all inputs at once, then run each as fast as it goes."""
        first = config[0] if isinstance(config, list) and config else config
        frames = self._enter(inputs, first) if inputs else None  # type: ignore[arg-type]  # one config
        pairs = [(None if frames is None else frames[i], each) for i, each in enumerate(inputs)]
        return Runnable.batch(
            _InFrame(bound=self.bound),
            pairs,
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
        """Plan the part for all inputs at once, then run each as fast as it goes."""
        first = config[0] if isinstance(config, list) and config else config
        frames = await self._aenter(inputs, first) if inputs else None  # type: ignore[arg-type]  # one config
        pairs = [(None if frames is None else frames[i], each) for i, each in enumerate(inputs)]
        return await Runnable.abatch(
            _InFrame(bound=self.bound),
            pairs,
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
        """Plan the part and run it."""
        frames = self._enter([input], config)
        pieces = self.bound.stream(input, config, **kwargs)
        yield from pieces if frames is None else inside(frames[0], pieces)

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Plan the part and run it."""
        frames = await self._aenter([input], config)
        pieces = self.bound.astream(input, config, **kwargs)
        async for piece in pieces if frames is None else ainside(frames[0], pieces):
            yield piece

    def _enter(self, inputs: list[Any], config: RunnableConfig | None) -> list[Frame] | None:
        frame = CURRENT.get()
        if frame is None or not isinstance(frame.replay, Replay):
            return None
        plans = self._plans(frame, inputs, config)
        frame.replay.begin(plans)
        return [Frame(frame.replay, plan) for plan, _ in plans]

    async def _aenter(self, inputs: list[Any], config: RunnableConfig | None) -> list[Frame] | None:
        frame = CURRENT.get()
        if frame is None or not isinstance(frame.replay, AsyncReplay):
            return None
        plans = self._plans(frame, inputs, config)
        await frame.replay.begin(plans)
        return [Frame(frame.replay, plan) for plan, _ in plans]

    def _plans(
        self, frame: Frame, inputs: list[Any], config: RunnableConfig | None
    ) -> list[tuple[Plan, dict[str, Any]]]:
        plans = []
        for each in inputs:
            plan = self._planner.plan(frame.replay.board.prefix(), config)
            plans.append((plan, plan.inputs(each)))
        return plans


class _InFrame(Seam):
    """Runs inputs that bring their frames along, each as a batch of its own: LangChain's
    batches nest runs otherwise than its single calls, and raise another one of several errors.
    """

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        frame, given = input
        with nullcontext() if frame is None else within(frame):
            return self.bound.batch([given], config, **kwargs)[0]

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        frame, given = input
        with nullcontext() if frame is None else within(frame):
            return (await self.bound.abatch([given], config, **kwargs))[0]


def inside(frame: Frame, pieces: Iterator[Any]) -> Generator[Any, None, None]:
    """Pieces that are made within a frame; between them the caller is outside of it."""
    try:
        while True:
            with within(frame):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


async def ainside(frame: Frame, pieces: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """`inside`, for coroutines."""
    try:
        while True:
            with within(frame):
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            await close()
