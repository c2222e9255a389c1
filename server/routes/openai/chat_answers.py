"""Responses of `/v1/chat/completions`: complete, or streamed in chunks.

Out of scope: how the text is produced.

Invariant: the concatenated deltas of a stream are the text of the complete answer.
"""

from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ...program.ir import Json
from .execution import CompletionDelta, RequestResult, Usage
from .streaming import DONE, sse_data


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """The message that the model generated."""

    role: str = "assistant"
    content: str | None
    """null if the message consists of tool calls only."""
    refusal: str | None = None
    tool_calls: list[Json] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer of a chat completion."""

    index: int = 0
    message: AnswerMessage
    logprobs: Json = None
    finish_reason: str


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The response of a chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatResponseBuilder:
    """Builds responses of `/v1/chat/completions`."""

    def __init__(
        self, request_id: str, model: str, *, with_usage: bool, num_answers: int = 1
    ) -> None:
        self._num_answers = num_answers
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._with_usage = with_usage

    def complete(self, final: RequestResult) -> ChatCompletion:
        """Return the response of a request that does not stream."""
        choices = [
            ChatChoice(
                index=i,
                message=AnswerMessage(
                    content=None if answer.tool_calls and not answer.content else answer.content,
                    tool_calls=answer.tool_calls or UNSET,
                ),
                logprobs=_logprobs(answer.logprobs),
                finish_reason=answer.finish_reason,
            )
            for i, answer in enumerate(final.answers)
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=final.usage,
        )

    def start(self) -> bytes:
        """Return a chunk with the role for each answer."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([_chat_delta(i, delta)]) for i in range(self._num_answers))

    def delta(self, delta: CompletionDelta) -> bytes:
        """Return a chunk with text, and with the log probabilities of its tokens."""
        logprobs = _logprobs(delta.logprobs)
        return self._chunk([_chat_delta(delta.answer, {"content": delta.text}, None, logprobs)])

    def end(self, final: RequestResult) -> bytes:
        """Return, for each answer, a chunk with all its tool calls and one with the finish reason;
        then the usage, if requested, and `[DONE]`.
        """
        last = b"".join(
            self._chunk([_chat_delta(i, {"tool_calls": _stream_tool_calls(answer.tool_calls)})])
            for i, answer in enumerate(final.answers)
            if answer.tool_calls
        )
        last += b"".join(
            self._chunk([_chat_delta(i, {}, answer.finish_reason)])
            for i, answer in enumerate(final.answers)
        )
        usage = self._chunk([], final.usage) if self._with_usage else b""
        return last + usage + DONE

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._with_usage:
            chunk["usage"] = usage
        return sse_data(chunk)


def _logprobs(tokens: list[Json] | None) -> Json:
    return {"content": tokens, "refusal": None} if tokens else None


def _stream_tool_calls(calls: list[Json]) -> list[Json]:
    """Return tool calls as stream deltas, which carry their index."""
    return [{"index": i, **call} for i, call in enumerate(calls)]


def _chat_delta(
    index: int, delta: dict[str, Json], finish_reason: str | None = None, logprobs: Json = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
