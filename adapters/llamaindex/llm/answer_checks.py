"""Checks of an answer before LlamaIndex reads it.

Invariant: an answer that was cut before it matched its constraint, its parser or its tool is an
error, never a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from conure.server.program.decoding.typed_json import decode_record
from conure.server.program.errors import RunError
from conure.server.program.ir import Json

from ...cut_answers import cut_message
from .call_backend import FinalAnswer
from .model_request import ModelRequest


class CutAnswerError(RunError, ValueError):
    """An answer was cut by its maximum length, under a constraint, a parser or a tool.

    LlamaIndex treats it as any answer that cannot be parsed: as a ValueError.
    """


def checked(final: FinalAnswer, call: ModelRequest, *, has_parser: bool) -> FinalAnswer:
    """Return a checked answer; with at most one tool call if the application allows only one.

    Args:
        final: the answer.
        call: the request of the application.
        has_parser: whether the LLM has an output parser.

    Raises:
        CutAnswerError: `output.incomplete`.
    """
    value = final.value
    if value.get("finish_reason") == "length":
        if has_parser or "json_schema" in (call.output.get("constraint") or {}):
            raise _cut(value, "it was complete")
        if call.output.get("constraint"):
            raise _cut(value, "it satisfied its constraint")
        if call.extra.get("tools") and _has_cut_call(value, call.extra.get("tool_choice")):
            raise _cut(value, "its tool call was complete")
    tool_calls = value.get("tool_calls") or []
    if call.extra.get("parallel_tool_calls") is False and len(tool_calls) > 1:
        return final._replace(value={**value, "tool_calls": tool_calls[:1]})
    return final


def arguments_of(function: Mapping[str, Json]) -> dict[str, Any]:
    """Return the arguments of a tool call.

    Raises:
        RunError: `output.not_json` if the model did not write a JSON object.
    """
    text = function.get("arguments") or "{}"
    try:
        return decode_record(text, dict[str, Any])
    except msgspec.DecodeError as problem:
        raise RunError(
            "output.not_json",
            f"the model called {function.get('name')} with arguments that are not a JSON object "
            f"({problem}): {text[:80]!r}",
        ) from problem


def _has_cut_call(value: Mapping[str, Json], choice: Json) -> bool:
    tool_calls = value.get("tool_calls") or []
    if not tool_calls:
        return choice not in (None, "auto", "none")
    try:
        for call in tool_calls:
            arguments_of(call["function"])
    except RunError:
        return True
    return False


def _cut(value: Mapping[str, Json], before: str) -> CutAnswerError:
    num_tokens = (value.get("usage") or {}).get("completion_tokens")
    return CutAnswerError("output.incomplete", cut_message(num_tokens, before))
