"""Answers as LangChain's chunks and results.

Invariant: the last chunk of an answer carries its tool calls, its token counts and
`chunk_position`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    message_chunk_to_message,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from conure.server.program.errors import ConureError, RunError
from conure.server.program.ir import Json
from conure.server.program.status import Event

from ...cut_answers import cut_message
from ...speculation.answer_stream import AnswerStream
from .messages import call_chunks_of, from_wire, metadata_of, usage_of

ALLOW_CUT_ANSWERS: Final = "allow_cut_answers"
"""Argument of a call: an answer that was cut or is invalid raises no error, because the parser of
the call reports it."""
INVALID: Final = "invalid"
"""Finish reason of an answer that does not match its schema. Its metadata has the `error`."""


class CompletenessCheck(NamedTuple):
    """What `max_tokens` may not cut in the answers of a call."""

    has_tools: bool = False
    """A tool call may not be cut."""
    is_call_required: bool = False
    """The answer may not end before its tool call."""
    is_constrained: bool = False
    """The answer may not end before it satisfies its constraint."""


class CompleteAnswer(NamedTuple):
    """An answer in the `message` form."""

    value: dict[str, Json]
    program: str
    """Id of the program that it comes from."""


def chunks_of(stream: AnswerStream, event: Event) -> Iterator[ChatGenerationChunk]:
    """Pass an event to the stream and yield the chunks that it adds.

    Raises:
        ConureError: as `AnswerStream.feed`.
    """
    text = stream.feed(event)
    if text:
        yield ChatGenerationChunk(message=AIMessageChunk(content=text))
    value = stream.value
    if value is not None and event.type == "variable.committed":
        last = AIMessageChunk(
            content="",
            tool_call_chunks=call_chunks_of(value),
            response_metadata=metadata_of(value, program=stream.program),
            usage_metadata=usage_of(value),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=last, generation_info=_generation_info(value))


def result_of(answers: Sequence[CompleteAnswer]) -> ChatResult:
    """Return the result of one call with one or more answers.

    The first of several answers carries the counts of the whole call: the prompt once, and the
    output tokens of all answers. This is right both for code that adds up the counts of all
    answers and for code that reads the first answer only.

    Args:
        answers: at least one.
    """
    generations = [
        ChatGeneration(
            message=from_wire(value, program=program), generation_info=_generation_info(value)
        )
        for value, program in answers
    ]
    (value, _), *others = answers
    output: dict[str, Json] = {"model_name": value.get("model")}
    if others:  # LangChain copies the output of a single answer to its message
        usage = usage_of(value)  # also has the cached tokens of the prompt
        num_input = usage["input_tokens"]
        num_output = sum(usage_of(each)["output_tokens"] for each, _ in answers)
        num_total = num_input + num_output
        usage |= {"output_tokens": num_output, "total_tokens": num_total}
        for index, generation in enumerate(generations):
            message = generation.message
            assert isinstance(message, AIMessage)
            message.usage_metadata = None if index else usage
        output["token_usage"] = {
            "prompt_tokens": num_input,
            "completion_tokens": num_output,
            "total_tokens": num_total,
        }
    return ChatResult(generations=generations, llm_output=output)


def completeness_check(kwargs: Mapping[str, Any]) -> CompletenessCheck:
    """Return the check of a call's answers.

    Args:
        kwargs: arguments of the call. The parser of a structured output has its own error.
    """
    if kwargs.get(ALLOW_CUT_ANSWERS):
        return CompletenessCheck()
    formats = (None, {"type": "text"})
    has_tools = bool(kwargs.get("tools"))
    return CompletenessCheck(
        has_tools=has_tools,
        is_call_required=has_tools and kwargs.get("tool_choice") not in (None, "auto", "none"),
        is_constrained=bool(kwargs.get("constraint"))
        or kwargs.get("response_format") not in formats,
    )


def check_answers(answer: ChatResult | ChatGenerationChunk, kwargs: Mapping[str, Any]) -> None:
    """Check that `max_tokens` cut no answer in a tool call, or before it met its constraint.

    Args:
        answer: the answers of a call, or a chunk of one.
        kwargs: arguments of the call.

    Raises:
        RunError: `output.incomplete`.
    """
    check = completeness_check(kwargs)
    generations = answer.generations if isinstance(answer, ChatResult) else [answer]
    for message in (generation.message for generation in generations):
        if message.response_metadata.get("finish_reason") != "length":
            continue
        is_call_missing = check.is_call_required and not _has_call(message)
        if check.has_tools and (is_call_missing or _has_cut_call(message)):
            what = "its tool call was complete"
        elif check.is_constrained:
            what = "it satisfied its constraint"
        else:
            continue
        usage = getattr(message, "usage_metadata", None) or {}
        raise RunError("output.incomplete", cut_message(usage.get("output_tokens"), what))


def check_message(message: BaseMessage, kwargs: Mapping[str, Any]) -> None:
    """`check_answers`, for a call with one answer."""
    assert isinstance(message, AIMessage)
    check_answers(ChatResult(generations=[ChatGeneration(message=message)]), kwargs)


def invalid_answer(problem: ConureError, kwargs: Mapping[str, Any]) -> AIMessageChunk:
    """Return an empty answer with an error, for a parser that reports the error itself.

    Args:
        problem: error of the call.
        kwargs: arguments of the call.

    Raises:
        ConureError: `problem`, if it is another error, or if no parser reports it.
    """
    if problem.code != "output.invalid" or not kwargs.get(ALLOW_CUT_ANSWERS):
        raise problem
    metadata = {"finish_reason": INVALID, "error": problem.message}
    return AIMessageChunk(content="", response_metadata=metadata, chunk_position="last")


def invalid_result(problem: ConureError, kwargs: Mapping[str, Any]) -> ChatResult:
    """Return `invalid_answer` as the result of a call; raises as it does."""
    message = message_chunk_to_message(invalid_answer(problem, kwargs))
    return ChatResult(generations=[ChatGeneration(message=message)])


def _has_call(message: BaseMessage) -> bool:
    chunks = message.tool_call_chunks if isinstance(message, AIMessageChunk) else ()
    return bool(chunks or (isinstance(message, AIMessage) and message.tool_calls))


def _has_cut_call(message: BaseMessage) -> bool:
    if isinstance(message, AIMessageChunk):
        texts = [chunk["args"] or "" for chunk in message.tool_call_chunks]
        return not all(map(_is_json, texts))
    return bool(isinstance(message, AIMessage) and message.invalid_tool_calls)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _generation_info(value: dict[str, Json]) -> dict[str, Json]:
    return {"finish_reason": value.get("finish_reason")}
