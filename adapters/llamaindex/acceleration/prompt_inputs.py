"""Prompts with inputs in place of answers that do not exist yet.

LlamaIndex formats a prompt from strings. The caller passes a placeholder in place of an answer;
afterwards `with_inputs` replaces the placeholder by an input of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from conure.server.program.ir import Expression, Json

from ...speculation.planned_call import PlannedCall
from ..llm.model_request import ModelRequest

PLACEHOLDER_FORMAT = "\ue000{}\ue001"
"""Format of placeholders; the characters are from Unicode's private use area."""


class PlaceholderInput(NamedTuple):
    """A placeholder, and the expression of the text that only the server has."""

    placeholder: str
    expression: Expression


def planned_call(
    variable: str,
    call: ModelRequest,
    reads: frozenset[str] = frozenset(),
    when: Expression = None,
    place: str = "",
) -> PlannedCall:
    """Return a planned call.

    Args:
        variable: receives the answer.
        call: the request to the model; its prompt may read answers of other calls.
        reads: variables that the prompt and the condition read.
        when: condition under which the call runs; None: always.
        place: the part of the app that makes the call.
    """
    common = {} if when is None else {"when": when}
    return PlannedCall(place, variable, call.node(f"{variable}_call", variable, **common), reads)


def with_inputs(call: ModelRequest, inputs: Sequence[PlaceholderInput]) -> ModelRequest | None:
    """Return the call with inputs in place of placeholders.

    None if a placeholder does not occur in it.
    """
    found: set[str] = set()

    def split(content: Json) -> Json:
        if isinstance(content, str):
            segments = _split(content, inputs, found)
            return content if len(segments) == 1 and "text" in segments[0] else segments
        return [
            piece
            for segment in content
            for piece in (
                _split(segment["text"], inputs, found) if "text" in segment else [segment]
            )
        ]

    messages = None
    if call.messages is not None:
        messages = [
            {**message, "content": split(message["content"])} if message.get("content") else message
            for message in call.messages
        ]
    prompt = None if call.prompt is None else split(call.prompt)
    made = replace(call, messages=messages, prompt=prompt)
    return made if found == {each.placeholder for each in inputs} else None


def text_read(variable: str) -> Expression:
    """Return the expression for the text of an answer."""
    return {"get": [{"var": variable}, "content"]}


def fits(text: Expression, num_tokens: int) -> Expression:
    """Return a condition that is true only if a text has at most `num_tokens` tokens.

    A byte-level tokenizer makes at most one token per byte, that is at most one per ASCII character
    and four per other character. Other tokenizers may add a few; callers subtract a margin.
    """
    is_ascii = {"eq": [{"find": [text, r"[^\x00-\x7f]"]}, None]}
    return {
        "or": [
            {"not": {"gt": [{"len": text}, num_tokens // 4]}},
            {"and": [{"not": {"gt": [{"len": text}, num_tokens]}}, is_ascii]},
        ]
    }


def _split(text: str, inputs: Sequence[PlaceholderInput], found: set[str]) -> list[dict[str, Json]]:
    segments: list[dict[str, Json]] = [{"text": text}]
    for each in inputs:
        made: list[dict[str, Json]] = []
        for segment in segments:
            pieces = segment["text"].split(each.placeholder) if "text" in segment else []
            if len(pieces) < 2:
                made.append(segment)
                continue
            found.add(each.placeholder)
            for index, piece in enumerate(pieces):
                if index:
                    made.append({"input": each.expression})
                if piece:
                    made.append({"text": piece})
        segments = made
    return segments
