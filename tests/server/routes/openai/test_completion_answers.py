"""Tests of the log probabilities in responses of `/v1/completions`."""

from __future__ import annotations

from typing import Any

import msgspec

from conure.server.routes.openai.completion_answers import CompletionResponseBuilder
from conure.server.routes.openai.execution import CompletionDelta


def token(raw: bytes, *alternatives: bytes) -> dict[str, Any]:
    entry = {"token": raw.decode(errors="replace"), "logprob": -1.0, "bytes": list(raw)}
    return {**entry, "top_logprobs": [token(each) for each in alternatives]}


def streamed_logprobs(*deltas: list[Any], with_alternatives: bool = False) -> list[Any]:
    """Return the `logprobs` of the chunks of these deltas."""
    builder = CompletionResponseBuilder(
        "id", "m", with_usage=False, echoes=[""], with_alternatives=with_alternatives
    )
    chunks = [builder.delta(CompletionDelta(0, "text", tokens)) for tokens in deltas]
    return [
        msgspec.json.decode(chunk.removeprefix(b"data: "))["choices"][0]["logprobs"]
        for chunk in chunks
    ]


def test_offsets_count_characters_that_span_tokens_once() -> None:
    smiley = "\U0001f600".encode()
    deltas = [[token(b"b"), token(smiley[:2])], [token(smiley[2:]), token(b"a"), token(b"c")]]
    offsets = [logprobs["text_offset"] for logprobs in streamed_logprobs(*deltas)]
    assert offsets == [[0, 1], [1, 2, 3]]


def test_chunks_have_alternatives_if_the_request_has() -> None:
    deltas = [[token(b"a", b"a", b"b")], [token(b"forced")]]
    chosen, forced = streamed_logprobs(*deltas, with_alternatives=True)
    assert chosen["top_logprobs"] == [{"a": -1.0, "b": -1.0}]
    assert forced["top_logprobs"] == [{"forced": -1.0}]
    assert streamed_logprobs([token(b"a")])[0]["top_logprobs"] is None
