"""Execution of an OpenAI request: its calls run in a new program, or in a session.

Out of scope: HTTP, and the shape of OpenAI's responses.

Invariant: deltas never repeat or skip text, even if an engine dies and the call restarts: each is
cut at the offset that was sent already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from msgspec import UNSET, Struct

from ...program.decoding.bodies import revalidate
from ...program.errors import ConflictError, ConureError
from ...program.ir import Append, Json
from ...program.status import ENDED, Event, ProgramStatus, VariableStatus
from ...service import Service
from ..problem import MissingValueError
from ..programs.events import DRAINING, PING_S, batch_events
from ..programs.waiting import wait_for
from ..request_context import draining_error

logger = logging.getLogger(__name__)

_LOST = frozenset({"node.failed", "node.killed", "node.skipped"})
"""Events after which the variables of a node have no value."""


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """Prompt tokens whose KV was already computed."""

    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionDelta(NamedTuple):
    """More text of an answer. An empty text keeps the connection alive."""

    answer: int
    """Index of the answer."""
    text: str
    logprobs: list[Json] | None = None
    """Log probabilities of the tokens that have become complete, if requested."""
    offset: int = 0
    """Characters of the answer before this text."""


class CompletionResult(NamedTuple):
    """One complete answer."""

    content: str
    finish_reason: str
    logprobs: list[Json] | None = None
    """One entry per token, if requested."""
    tool_calls: list[Json] = []  # noqa: RUF012 - a default that is never modified


class RequestResult(NamedTuple):
    """The complete answers and usage of a request."""

    answers: list[CompletionResult]
    usage: Usage
    engine_s: float
    """Seconds that the calls were on engines, one after another."""


class RequestCall(NamedTuple):
    """The call that generates one answer."""

    node: str
    variable: str


class _Sent:
    """How much of an answer was sent."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0

    def cut(self, answer: int, event: Event) -> CompletionDelta | None:
        """Return what an event adds to the answer; None if that is nothing.

        After a gap in the deltas, the committed message supplies the rest.
        """
        if event.type == "node.delta":
            offset, text = event.data["offset"], event.data["text"]
            first, logprobs = event.data.get("logprobs_offset", 0), event.data.get("logprobs")
        elif event.type == "variable.committed":
            value = event.data["value"]
            offset, text, first, logprobs = 0, value["content"], 0, tokens_of(value)
        else:
            return None
        has_text = offset <= self.num_chars < offset + len(text)
        if not has_text and event.type == "node.delta":
            return None
        text = text[self.num_chars - offset :] if has_text else ""
        if logprobs is not None:
            logprobs = logprobs[self.num_tokens - first :] if first <= self.num_tokens else []
        if not text and not logprobs:
            return None
        delta = CompletionDelta(answer, text, logprobs, self.num_chars)
        self.num_chars += len(text)
        self.num_tokens += len(logprobs or ())
        return delta


def answer_of(message: Json) -> CompletionResult:
    """Return the answer that a committed message is."""
    return CompletionResult(
        message["content"],
        message.get("finish_reason", "stop"),
        tokens_of(message),
        message.get("tool_calls", []),
    )


def tokens_of(message: Json) -> list[Json] | None:
    """Return the log probabilities of a message's tokens; None if they were not requested."""
    logprobs = message.get("logprobs")
    return None if logprobs is None else logprobs["content"]


class RequestExecution:
    """The submitted calls of a request."""

    def __init__(
        self,
        service: Service,
        program: str,
        calls: Sequence[RequestCall],
        *,
        tenant: str,
        num_answers: int = 1,
        owns_program: bool = True,
        after: int = 0,
        kill: Append | None = None,
    ) -> None:
        """Follow calls of a program.

        Args:
            service: runs the program.
            program: its id.
            calls: calls of the request, prompt by prompt.
            tenant: owner of the program.
            num_answers: calls per prompt.
            owns_program: whether the program consists of these calls.
            after: a sequence number before the calls' first events.
            kill: an append that cancels the calls of a program with other calls; None without one.
        """
        self._service = service
        self._program = program
        self._calls = calls
        self._tenant = tenant
        self._num_answers = num_answers
        self.owns_program = owns_program
        """Whether the program ends with the request."""
        self._after = after
        self._kill = kill
        self._variables = [call.variable for call in calls]

    async def result(self) -> RequestResult:
        """Wait for the end of all calls.

        Raises:
            MissingValueError: if one of them failed.
        """
        waits = (
            wait_for(self._service, self._program, variable, tenant=self._tenant)
            for variable in self._variables
        )
        return await self.build_result([(await each).value for each in waits])

    async def stream(
        self, draining: asyncio.Event
    ) -> AsyncGenerator[CompletionDelta | RequestResult, None]:
        """Yield text as it is generated, and the result at the end.

        An empty delta is yielded when no event has arrived for a while.

        Raises:
            MissingValueError: if one of the calls failed.
            UnavailableError: if the server drains.
        """
        source = self._service.events(
            self._program, tenant=self._tenant, after=self._after, texts=self._variables
        )
        answers: dict[str, Json] = {}
        indices = {call.variable: i for i, call in enumerate(self._calls)}
        sent = {variable: _Sent() for variable in indices}
        nodes = {call.node for call in self._calls}
        async with aclosing(batch_events(source, draining, ping_s=PING_S)) as events:
            async for event in _flatten(events):
                if event is None:
                    yield CompletionDelta(0, "")
                elif event.type == DRAINING:
                    raise draining_error()
                elif event.type == "program.finished" or (
                    event.type in _LOST and event.data.get("node") in nodes
                ):
                    raise await self._missing_value_error(
                        [name for name in self._variables if name not in answers]
                    )
                elif (variable := event.data.get("variable")) in indices:
                    delta = sent[variable].cut(indices[variable], event)
                    if delta is not None:
                        yield delta
                    if event.type == "variable.committed":
                        answers[variable] = event.data["value"]
                        if len(answers) == len(indices):
                            values = [answers[name] for name in self._variables]
                            yield await self.build_result(values)
                            return
        raise draining_error()

    async def cancel(self) -> None:
        """Cancel the calls that still run, unless others need them. Never raises."""
        service, program, tenant = self._service, self._program, self._tenant
        try:
            if self.owns_program:
                await service.cancel(program, tenant=tenant)
            elif self._kill is not None and await self._is_running():
                append, body = revalidate(self._kill)
                await service.append(program, append, body=body, tenant=tenant)
        except ConflictError:
            pass  # the session has ended, or takes no more nodes
        except ConureError as exc:
            logger.warning("failed to cancel program=%s code=%s", program, exc.code)

    async def _is_running(self) -> bool:
        """Whether one of the calls has not ended."""
        statuses = await self._statuses([call.variable for call in self._calls])
        return any(status.status not in ENDED for status in statuses)

    async def _statuses(self, variables: list[str]) -> list[VariableStatus]:
        return [
            await self._service.get(self._program, variable, tenant=self._tenant, wait_s=0)
            for variable in variables
        ]

    async def _missing_value_error(self, variables: list[str]) -> MissingValueError:
        """Return the error of the first variable that failed. Others may be missing only because it
        failed.
        """
        statuses = await self._statuses(variables)
        failed = [status for status in statuses if status.status == "failed"]
        return MissingValueError([*failed, *statuses][0])

    async def build_result(self, values: list[Json]) -> RequestResult:
        """Return the answers and usage of calls that have ended; `values` are their messages."""
        nodes = [call.node for call in self._calls]
        status = await self._service.status(self._program, tenant=self._tenant, nodes=nodes)
        return self.result_of(values, status)

    def result_of(self, values: list[Json], status: ProgramStatus) -> RequestResult:
        """Return the answers and usage of calls that have ended.

        Args:
            values: their messages.
            status: the status of their program.
        """
        num_prompt = num_shared = 0
        nodes = [status.nodes[call.node] for call in self._calls]
        # All answers to a prompt share it.
        for i in range(0, len(values), self._num_answers):
            prompt = nodes[i].prompt_tokens
            # More tokens may have been decoded than the message kept: use the message's own count.
            num_tokens = values[i]["usage"]["prompt_tokens"]
            num_prompt += num_tokens
            # The node adds up the shared tokens of all attempts.
            num_shared += 0 if prompt is UNSET else min(prompt.shared, num_tokens)
        num_output = sum(value["usage"]["completion_tokens"] for value in values)
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_shared),
        )
        engine_s = sum(node.prefill_s + node.decode_s for node in nodes)
        return RequestResult([answer_of(value) for value in values], usage, engine_s)


async def _flatten(
    events: AsyncGenerator[list[Event] | None, None],
) -> AsyncGenerator[Event | None, None]:
    """Yield the events of all batches one by one."""
    async for some in events:
        if some is None:
            yield None
            continue
        for event in some:
            yield event
