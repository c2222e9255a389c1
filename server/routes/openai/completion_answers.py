"""Responses of `/v1/completions`: complete, or streamed in chunks.

Out of scope: how the text is produced.

Invariant: the concatenated texts of a choice's chunks are the text of the complete choice.
"""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ...program.ir import Json
from .execution import CompletionDelta, RequestResult, Usage
from .streaming import DONE, sse_data


class TextLogprobs(Struct, frozen=True, kw_only=True):
    """The tokens of a text; all lists have one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    """null if no alternatives were requested."""
    text_offset: list[int]
    """Complete characters of the choice's text before the token."""


class TextChoice(Struct, frozen=True, kw_only=True):
    """One answer of a plain completion, or a delta of it."""

    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None


class Completion(Struct, frozen=True, kw_only=True):
    """The response of a plain completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class CompletionResponseBuilder:
    """Builds responses of `/v1/completions`."""

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        with_usage: bool,
        echoes: Sequence[str],
        with_alternatives: bool,
    ) -> None:
        """Start a response.

        Args:
            request_id: id of the response.
            model: its name in the request.
            with_usage: whether a stream ends with the usage.
            echoes: for each answer, the text before the generated text.
            with_alternatives: whether the log probabilities of other tokens were requested.
        """
        self._id = f"cmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._with_usage = with_usage
        self._echoes = echoes
        self._with_alternatives = with_alternatives
        self._offsets = [_TokenOffsets(len(echo)) for echo in echoes]

    def complete(self, final: RequestResult) -> Completion:
        """Return the response of a request that does not stream."""
        choices = [
            TextChoice(
                index=i,
                text=self._echoes[i] + answer.content,
                logprobs=self._logprobs(i, answer.logprobs),
                finish_reason=answer.finish_reason,
            )
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
        """Return a chunk with the prompt for each answer that echoes it."""
        return b"".join(
            self._chunk([TextChoice(index=i, text=echo, finish_reason=None)])
            for i, echo in enumerate(self._echoes)
            if echo
        )

    def delta(self, delta: CompletionDelta) -> bytes:
        """Return a chunk with text, and with the log probabilities of its tokens."""
        choice = TextChoice(
            index=delta.answer,
            text=delta.text,
            logprobs=self._logprobs(delta.answer, delta.logprobs),
            finish_reason=None,
        )
        return self._chunk([choice])

    def end(self, final: RequestResult) -> bytes:
        """Return a chunk with the finish reason for each answer; then the usage, if requested, and
        `[DONE]`.
        """
        last = b"".join(
            self._chunk([TextChoice(index=i, text="", finish_reason=answer.finish_reason)])
            for i, answer in enumerate(final.answers)
        )
        usage = self._chunk([], final.usage) if self._with_usage else b""
        return last + usage + DONE

    def _logprobs(self, answer: int, tokens: list[Json] | None) -> TextLogprobs | None:
        """Return the log probabilities of an answer's next tokens."""
        if not tokens:
            return None
        return TextLogprobs(
            tokens=[token["token"] for token in tokens],
            token_logprobs=[token["logprob"] for token in tokens],
            top_logprobs=[_top(token) for token in tokens] if self._with_alternatives else None,
            text_offset=[self._offsets[answer].add(token) for token in tokens],
        )

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
        return sse_data(chunk)


class _TokenOffsets:
    """Counts the characters before each token of an answer. A character may span tokens."""

    def __init__(self, num_chars: int) -> None:
        self._num_chars = num_chars
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, token: Json) -> int:
        """Return the complete characters before the next token."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(bytes(token["bytes"])))
        return offset


def _top(token: Json) -> dict[str, float]:
    """Return the alternatives of a token, and the token itself."""
    top = {each["token"]: each["logprob"] for each in token["top_logprobs"]}
    return top | {token["token"]: token["logprob"]}
