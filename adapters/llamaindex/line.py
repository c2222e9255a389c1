"""Where a call goes: alone, as a program of one node, or into the run of an accelerated app.

Knows both kinds of client and what a call needs of them. Refuses to know LlamaIndex.

Kept true: a stream that is left early, or a wait that is interrupted, is cancelled on the
server; nothing is submitted for a stream that nobody begins to read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import NamedTuple, Protocol

from conure.server.program.ir import Json

from ..client import AsyncClient, Client
from ..connection import following
from ..leaving import acancelled_unless_done, cancelled_unless_done
from .call import ANSWER, Answer, Call, program_of


class Final(NamedTuple):
    """An answer in the `message` form, and the program that made it."""

    value: dict[str, Json]
    program: str


class Line(Protocol):
    """Takes calls; each method is one call from its beginning to its end."""

    def answer(self, call: Call) -> Final:
        """Wait for the answer.

        Raises:
            ConureError: why there is none.
        """
        ...

    async def aanswer(self, call: Call) -> Final:
        """`answer`, with await."""
        ...

    def stream(self, call: Call) -> Generator[str | Final, None, None]:
        """The answer's text in pieces, then the answer."""
        ...

    def astream(self, call: Call) -> AsyncGenerator[str | Final, None]:
        """`stream`, with await."""
        ...


class Direct:
    """Every call is a program of its own."""

    def __init__(self, client: Client, asynchronous: AsyncClient) -> None:
        self._client = client
        self._asynchronous = asynchronous

    def answer(self, call: Call) -> Final:
        run = self._client.submit(program_of(call), **following(call.timeout_s))
        with cancelled_unless_done(run):
            return Final(run.result(wait_s=call.timeout_s)[ANSWER], run.id)

    async def aanswer(self, call: Call) -> Final:
        run = await self._asynchronous.submit(program_of(call), **following(call.timeout_s))
        async with acancelled_unless_done(run):
            return Final((await run.result(wait_s=call.timeout_s))[ANSWER], run.id)

    def stream(self, call: Call) -> Generator[str | Final, None, None]:
        run = self._client.submit(program_of(call), follow=True)
        answer = Answer(run.id)
        with cancelled_unless_done(run):
            with closing(run.events()) as events:
                for event in events:
                    yield from answer.feed(event)
            yield Final(answer.final(), run.id)

    async def astream(self, call: Call) -> AsyncGenerator[str | Final, None]:
        run = await self._asynchronous.submit(program_of(call), follow=True)
        answer = Answer(run.id)
        async with acancelled_unless_done(run):
            async with aclosing(run.events()) as events:
                async for event in events:
                    for piece in answer.feed(event):
                        yield piece
            yield Final(answer.final(), run.id)
