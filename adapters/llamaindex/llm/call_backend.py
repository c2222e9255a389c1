"""The backend of model calls, `CallBackend`, and the one that submits each call as a program.

Invariant: if a stream is closed early or a wait is interrupted, the program is cancelled. Nothing
is submitted for a stream before its first item is read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from conure.server.program.ir import Json

from ...call_errors import application_errors
from ...client import AsyncClient, AsyncRun, Client, Run
from ...client.cancellation import (
    acancel_unless_completed,
    acancel_unless_submitted,
    cancel_unless_completed,
    cancel_unless_submitted,
)
from ...client.connection import attach_arguments
from ...client.owned_generator import OwnedGenerator
from ...speculation.answer_stream import AnswerStream
from .model_request import ANSWER, CALL, ModelRequest, program_of


class FinalAnswer(NamedTuple):
    """The answer to a call."""

    value: dict[str, Json]
    """In the `message` form; see `ModelRequest.node`."""
    program: str
    """Id of its program."""


class CallBackend(Protocol):
    """What answers calls: the server directly, or the run of an accelerated app."""

    def answer(self, call: ModelRequest) -> FinalAnswer:
        """Wait for the answer to a call.

        Raises:
            ConureError: why there is none.
        """
        ...

    async def aanswer(self, call: ModelRequest) -> FinalAnswer:
        """`answer`, with await."""
        ...

    def stream(self, call: ModelRequest) -> Generator[str | FinalAnswer, None, None]:
        """Yield the answer's text in pieces, then the answer."""
        ...

    def astream(self, call: ModelRequest) -> AsyncGenerator[str | FinalAnswer, None]:
        """`stream`, with await."""
        ...


class DirectBackend:
    """Submits each call as a program."""

    def __init__(self, client: Client, async_client: AsyncClient) -> None:
        self._client = client
        self._async_client = async_client

    def answer(self, call: ModelRequest) -> FinalAnswer:
        with application_errors(call.timeout_s):
            run = self._submit(call, **attach_arguments(call.timeout_s))
            with cancel_unless_completed(run):
                return FinalAnswer(run.result(wait_s=call.timeout_s)[ANSWER], run.id)

    async def aanswer(self, call: ModelRequest) -> FinalAnswer:
        with application_errors(call.timeout_s):
            run = await self._asubmit(call, **attach_arguments(call.timeout_s))
            async with acancel_unless_completed(run):
                return FinalAnswer((await run.result(wait_s=call.timeout_s))[ANSWER], run.id)

    def stream(self, call: ModelRequest) -> Generator[str | FinalAnswer, None, None]:
        with application_errors(call.timeout_s):
            run = self._submit(call, follow=True)
            stream = AnswerStream(ANSWER, CALL, run.id)
            with cancel_unless_completed(run):
                with closing(run.events()) as events:
                    for event in events:
                        if text := stream.feed(event):
                            yield text
                yield FinalAnswer(stream.result(), run.id)

    async def astream(self, call: ModelRequest) -> AsyncGenerator[str | FinalAnswer, None]:
        with application_errors(call.timeout_s):
            run = await self._asubmit(call, follow=True)
            stream = AnswerStream(ANSWER, CALL, run.id)
            async with acancel_unless_completed(run):
                async with OwnedGenerator(run.events()) as events:
                    async for event in events:
                        if text := stream.feed(event):
                            yield text
                yield FinalAnswer(stream.result(), run.id)

    def _submit(self, call: ModelRequest, **arguments: Any) -> Run:
        """Submit a call, and cancel it if the caller is interrupted before the server answers.

        Args:
            call: the call.
            **arguments: further arguments of `Client.submit`.
        """
        program = program_of(call)
        with cancel_unless_submitted(self._client, program["id"]):
            return self._client.submit(program, retry_within_s=call.timeout_s, **arguments)

    async def _asubmit(self, call: ModelRequest, **arguments: Any) -> AsyncRun:
        """`_submit`, with await."""
        client, program = self._async_client, program_of(call)
        async with acancel_unless_submitted(client, program["id"]):
            return await client.submit(program, retry_within_s=call.timeout_s, **arguments)
