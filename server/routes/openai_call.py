"""The calls behind an OpenAI request, one for each answer: text, whole or in pieces, and usage.

Knows events and statuses of programs. Refuses to know HTTP and OpenAI's shapes.

Kept true: pieces never repeat or skip text, also when an engine dies and the call starts
anew: they are cut by offset against what was handed out already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from msgspec import UNSET, Struct

from ..program.errors import ConureError
from ..program.ir import Json
from ..program.status import Event
from ..service import Service
from .connection import draining_error
from .events import DRAINING, PING_S, follow
from .openai_wire import answer_of, call_of
from .paper import wait_for
from .problem import AbsentError

logger = logging.getLogger(__name__)


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """Of the prompt's tokens, those whose KV was there already."""

    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Piece(NamedTuple):
    """More text of an answer; nothing, now and then, so that the connection shows life."""

    answer: int
    """Which one it belongs to."""
    text: str


class Answer(NamedTuple):
    """One answer, whole."""

    content: str
    finish_reason: str
    logprobs: Json = None
    tool_calls: list[Json] = []  # noqa: RUF012 - a tuple's default; nobody writes into it


class Final(NamedTuple):
    """How a request ended."""

    answers: list[Answer]
    usage: Usage


class Call:
    """A submitted program of one call, or of several to one prompt."""

    def __init__(
        self, service: Service, program: str, *, tenant: str, num_answers: int = 1
    ) -> None:
        self._service = service
        self._program = program
        self._tenant = tenant
        self._variables = [answer_of(i) for i in range(num_answers)]

    async def whole(self) -> Final:
        """Waits for the end of all calls.

        Raises:
            AbsentError: if one gave no answer.
        """
        waits = (
            wait_for(self._service, self._program, variable, tenant=self._tenant)
            for variable in self._variables
        )
        return await self._final([(await each).value for each in waits])

    async def pieces(self, draining: asyncio.Event) -> AsyncGenerator[Piece | Final, None]:
        """Yields text as it comes, an empty piece now and then, and a Final at the end.

        Raises:
            AbsentError: if the call gave no answer.
            UnavailableError: if the server drains.
        """
        source = self._service.events(self._program, tenant=self._tenant, after=0)
        num_sent = dict.fromkeys(self._variables, 0)
        answers: dict[str, Json] = {}
        async with aclosing(follow(source, draining, ping_s=PING_S)) as events:
            async for event in _each(events):
                if event is None:
                    yield Piece(0, "")
                elif event.type == DRAINING:
                    raise draining_error()
                elif event.type == "program.finished":
                    missing = [name for name in self._variables if name not in answers]
                    if missing:
                        raise await self._absence(missing)
                    yield await self._final([answers[name] for name in self._variables])
                    return
                elif (variable := event.data.get("variable")) in num_sent:
                    offset, text = 0, ""
                    if event.type == "node.delta":
                        offset, text = event.data["offset"], event.data["text"]
                    elif event.type == "variable.committed":
                        answers[variable] = event.data["value"]
                        text = answers[variable]["content"]
                    # A gap is filled by the committed text, at the latest.
                    sent = num_sent[variable]
                    if offset <= sent < offset + len(text):
                        yield Piece(self._variables.index(variable), text[sent - offset :])
                        num_sent[variable] = offset + len(text)
        raise draining_error()

    async def abandon(self) -> None:
        """Cancels the program, as far as it still runs; never fails."""
        try:
            await self._service.cancel(self._program, tenant=self._tenant)
        except ConureError as exc:
            logger.warning("could not cancel program=%s code=%s", self._program, exc.code)

    async def _absence(self, variables: list[str]) -> AbsentError:
        """The error of the first of these that failed; one may miss only because another did."""
        statuses = [
            await self._service.get(self._program, variable, tenant=self._tenant, wait_s=0)
            for variable in variables
        ]
        failed = [status for status in statuses if status.status == "failed"]
        return AbsentError([*failed, *statuses][0])

    async def _final(self, values: list[Json]) -> Final:
        status = await self._service.status(self._program, tenant=self._tenant)
        # The prompt is one, however many answers there are to it.
        prompt = status.nodes[call_of(0)].prompt_tokens
        # What was decoded may be more than what was kept: a message counts its own tokens.
        num_prompt = values[0]["usage"]["prompt_tokens"]
        num_output = sum(value["usage"]["completion_tokens"] for value in values)
        # Of a call that ran again, the node adds up what every try found.
        num_shared = 0 if prompt is UNSET else min(prompt.shared, num_prompt)
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_shared),
        )
        answers = [
            Answer(
                value["content"],
                value.get("finish_reason", "stop"),
                value.get("logprobs"),
                value.get("tool_calls", []),
            )
            for value in values
        ]
        return Final(answers, usage)


async def _each(
    events: AsyncGenerator[list[Event] | None, None],
) -> AsyncGenerator[Event | None, None]:
    """Events one by one."""
    async for some in events:
        if some is None:
            yield None
            continue
        for event in some:
            yield event
