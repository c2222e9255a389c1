"""OpenAI's answers: whole, in chunks, and as errors.

Knows shapes only. A dialect turns one call's text and end into the answer of one endpoint;
it refuses to know where they come from.

Kept true: the pieces of a stream joined are the text of the whole answer.
"""

from __future__ import annotations

import re
import time
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..program.ir import Json
from .openai_call import Final, Piece, Usage
from .problem import Failure

DONE = b"data: [DONE]\n\n"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {"prompt.too_long": "context_length_exceeded"}
"""Codes that clients of OpenAI know by another name."""


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: str = "assistant"
    content: str | None
    """null: the model said nothing but tool calls."""
    refusal: str | None = None
    tool_calls: list[Json] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """An answer of a chat."""

    index: int = 0
    message: AnswerMessage
    logprobs: Json = None
    finish_reason: str


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer of a chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Struct, frozen=True, kw_only=True):
    """An answer of a plain completion, or a piece of it."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: str | None


class Completion(Struct, frozen=True, kw_only=True):
    """The answer of a plain completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Model(Struct, frozen=True, kw_only=True):
    """A model that requests can name."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "conure"
    max_model_len: int
    description: str = ""
    capabilities: list[str] = []


class ModelList(Struct, frozen=True, kw_only=True):
    """All models."""

    object: str = "list"
    data: list[Model]


class ErrorBody(Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """OpenAI's error answer."""

    error: ErrorBody


def error_answer(failure: Failure) -> ErrorAnswer:
    """A failure in OpenAI's shape."""
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    # A path into the program that a request was lowered to says nothing to its sender.
    path = failure.path or ""
    if path.startswith("program.") and path.endswith(".constraint"):
        path = "response_format"
    if found := re.search(r"^program\.nodes\[\d+\]\.(tools|tool_choice)\b.*", path):
        path = found[0].split(".", 2)[2]
    param = None if path.startswith("program.") else path or None
    body = ErrorBody(
        message=failure.message,
        type=_TYPES.get(failure.status, kind),
        param=param,
        code=_CODES.get(failure.code, failure.code),
    )
    return ErrorAnswer(error=body)


def event(content: Struct | dict[str, Any]) -> bytes:
    """One event of a stream; OpenAI's have data alone."""
    return b"data: %s\n\n" % msgspec.json.encode(content)


class Dialect(Protocol):
    """How one endpoint tells one call."""

    def __init__(
        self, program: str, model: str, *, with_usage: bool, num_answers: int = 1
    ) -> None: ...

    def whole(self, final: Final) -> Struct:
        """The answer of a request that does not stream."""
        ...

    def start(self) -> bytes:
        """What a stream says before its first piece."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """A piece of an answer."""
        ...

    def end(self, final: Final) -> bytes:
        """What a stream says after its last piece."""
        ...


class ChatDialect:
    """`/v1/chat/completions`."""

    def __init__(self, program: str, model: str, *, with_usage: bool, num_answers: int = 1) -> None:
        self._num_answers = num_answers
        self._id = f"chatcmpl-{program}"
        self._model = model
        self._created = int(time.time())
        self._with_usage = with_usage

    def whole(self, final: Final) -> ChatCompletion:
        """A `chat.completion`."""
        choices = [
            ChatChoice(
                index=i,
                message=AnswerMessage(
                    content=None if answer.tool_calls and not answer.content else answer.content,
                    tool_calls=answer.tool_calls or UNSET,
                ),
                logprobs=answer.logprobs,
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
        """A chunk with the role, for each answer."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([_chat_delta(i, delta)]) for i in range(self._num_answers))

    def piece(self, piece: Piece) -> bytes:
        """A chunk with text."""
        return self._chunk([_chat_delta(piece.answer, {"content": piece.text})])

    def end(self, final: Final) -> bytes:
        """For each answer a chunk with its tool calls, whole, and one with reason and logprobs;
        one with the usage if it was asked for, and the mark.
        """
        last = b"".join(
            self._chunk([_chat_delta(i, {"tool_calls": _told(answer.tool_calls)})])
            for i, answer in enumerate(final.answers)
            if answer.tool_calls
        )
        last += b"".join(
            self._chunk([_chat_delta(i, {}, answer.finish_reason, answer.logprobs)])
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
        return event(chunk)


def _told(calls: list[Json]) -> list[Json]:
    """Tool calls as pieces of a stream, where each says which one it is of."""
    return [{"index": i, **call} for i, call in enumerate(calls)]


def _chat_delta(
    index: int, delta: dict[str, Json], finish_reason: str | None = None, logprobs: Json = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class TextDialect:
    """`/v1/completions`."""

    def __init__(self, program: str, model: str, *, with_usage: bool, num_answers: int = 1) -> None:
        self._id = f"cmpl-{program}"
        self._model = model
        self._created = int(time.time())
        self._with_usage = with_usage

    def whole(self, final: Final) -> Completion:
        """A `text_completion`."""
        choices = [
            TextChoice(index=i, text=answer.content, finish_reason=answer.finish_reason)
            for i, answer in enumerate(final.answers)
        ]
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=final.usage,
        )

    def start(self) -> bytes:
        """Nothing: plain text has no role."""
        return b""

    def piece(self, piece: Piece) -> bytes:
        """A chunk with text."""
        choice = TextChoice(index=piece.answer, text=piece.text, finish_reason=None)
        return self._chunk([choice])

    def end(self, final: Final) -> bytes:
        """A chunk with the reason for each answer, one with the usage if it was asked for, and
        the mark.
        """
        last = b"".join(
            self._chunk([TextChoice(index=i, text="", finish_reason=answer.finish_reason)])
            for i, answer in enumerate(final.answers)
        )
        usage = self._chunk([], final.usage) if self._with_usage else b""
        return last + usage + DONE

    def _chunk(self, choices: list[TextChoice], usage: Usage | None = None) -> bytes:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._with_usage:
            chunk["usage"] = usage
        return event(chunk)
