"""Streams of responses, made from the pieces of an answer.

Invariant: the last chunk has the whole answer, and no other chunk has token counts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing
from typing import TypeAlias

from llama_index.core.base.llms.types import (
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)

from ...client.owned_generator import OwnedGenerator
from .call_backend import FinalAnswer
from .messages import answer_message, chat_response

AnswerCheck: TypeAlias = Callable[[FinalAnswer], FinalAnswer]
"""Raises if LlamaIndex may not read the whole answer."""


def chat_chunks(
    stream: Generator[str | FinalAnswer, None, None], check: AnswerCheck
) -> ChatResponseGen:
    """Yield the chunks of a streamed chat."""
    text = ""
    with closing(stream):
        for piece in stream:
            if isinstance(piece, str):
                text += piece
            yield _chat_chunk(piece, text, check)


async def achat_chunks(
    stream: AsyncGenerator[str | FinalAnswer, None], check: AnswerCheck
) -> ChatResponseAsyncGen:
    """`chat_chunks` for asyncio."""
    text = ""
    async with OwnedGenerator(stream) as pieces:
        async for piece in pieces:
            if isinstance(piece, str):
                text += piece
            yield _chat_chunk(piece, text, check)


def completion_chunks(
    stream: Generator[str | FinalAnswer, None, None], check: AnswerCheck
) -> CompletionResponseGen:
    """Yield the chunks of a streamed completion."""
    for piece in chat_chunks(stream, check):
        yield _completion_chunk(piece)


async def acompletion_chunks(
    stream: AsyncGenerator[str | FinalAnswer, None], check: AnswerCheck
) -> CompletionResponseAsyncGen:
    """`completion_chunks` for asyncio."""
    async with OwnedGenerator(achat_chunks(stream, check)) as pieces:
        async for piece in pieces:
            yield _completion_chunk(piece)


def _chat_chunk(piece: str | FinalAnswer, text: str, check: AnswerCheck) -> ChatResponse:
    if isinstance(piece, str):
        return ChatResponse(message=answer_message(text), delta=piece)
    final = check(piece)
    last = chat_response(final.value, program=final.program)
    last.delta = ""
    return last


def _completion_chunk(piece: ChatResponse) -> CompletionResponse:
    return CompletionResponse(
        text=piece.message.content or "",
        delta=piece.delta,
        raw=piece.raw,
        logprobs=piece.logprobs,
        additional_kwargs=piece.additional_kwargs,
    )
