"""The one call behind an OpenAI request: its text, whole or in pieces, and its usage.

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
from ..service import Service
from .connection import draining_error
from .events import DRAINING, PING_S, follow
from .openai_wire import ANSWER, CALL
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


class Final(NamedTuple):
    """How a call ended."""

    content: str
    finish_reason: str
    usage: Usage


class Call:
    """A submitted program of one call."""

    def __init__(self, service: Service, program: str, *, tenant: str) -> None:
        self._service = service
        self._program = program
        self._tenant = tenant

    async def whole(self) -> Final:
        """Waits for the call's end.

        Raises:
            AbsentError: if it gave no answer.
        """
        status = await wait_for(self._service, self._program, ANSWER, tenant=self._tenant)
        return await self._final(status.value)

    async def pieces(self, draining: asyncio.Event) -> AsyncGenerator[str | Final, None]:
        """Yields text as it comes, an empty string now and then, and a Final at the end.

        Raises:
            AbsentError: if the call gave no answer.
            UnavailableError: if the server drains.
        """
        source = self._service.events(self._program, tenant=self._tenant, after=0)
        num_sent = 0
        answer: Json = None
        async with aclosing(follow(source, draining, ping_s=PING_S)) as events:
            async for event in events:
                if event is None:
                    yield ""
                elif event.type == DRAINING:
                    raise draining_error()
                elif event.type == "program.finished":
                    if answer is None:
                        raise await self._absence()
                    yield await self._final(answer)
                    return
                elif event.data.get("variable") == ANSWER:
                    offset, text = 0, ""
                    if event.type == "node.delta":
                        offset, text = event.data["offset"], event.data["text"]
                    elif event.type == "variable.committed":
                        answer = event.data["value"]
                        text = answer["content"]
                    # A gap is filled by the committed text, at the latest.
                    if offset <= num_sent < offset + len(text):
                        yield text[num_sent - offset :]
                        num_sent = offset + len(text)
        raise draining_error()

    async def abandon(self) -> None:
        """Cancels the program, as far as it still runs; never fails."""
        try:
            await self._service.cancel(self._program, tenant=self._tenant)
        except ConureError as exc:
            logger.warning("could not cancel program=%s code=%s", self._program, exc.code)

    async def _absence(self) -> AbsentError:
        status = await self._service.get(self._program, ANSWER, tenant=self._tenant, wait_s=0)
        return AbsentError(status)

    async def _final(self, value: Json) -> Final:
        status = await self._service.status(self._program, tenant=self._tenant)
        node = status.nodes[CALL]
        prompt, output = node.prompt_tokens, node.output_tokens
        num_prompt = 0 if prompt is UNSET else prompt.logical
        num_shared = 0 if prompt is UNSET else prompt.shared
        num_output = 0 if output is UNSET else output.decoded + output.forced
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_shared),
        )
        return Final(value["content"], value.get("finish_reason", "stop"), usage)
