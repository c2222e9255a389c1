"""Prompts written as one text with `{{name}}` in it.

`{{name}}` is a variable. The name of the node's output marks where the output is; any other name is
an input. If the text does not contain the output's name, the output is at the end. `{{{{` is a
literal `{{`.

Out of scope: values. A value is never searched for placeholders.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from ..content import Output, Sampling, Segment

MAX_SEGMENTS = 10_000

_MARK = re.compile(r"\{\{(?:(\{\{)|[ \t]{0,16}([A-Za-z_]\w*)[ \t]{0,16}\}\})?")


class TextPrompt(list[Segment]):
    """The segments of a prompt that was submitted as one text with an `output` next to it."""


class NamedPlaceholder(NamedTuple):
    """A `{{name}}` in a text."""

    name: str


def segment_paths(prompt: list[Segment]) -> list[str]:
    """Return where each segment of a prompt is in the submission."""
    if not isinstance(prompt, TextPrompt):
        return [f"prompt[{index}]" for index in range(len(prompt))]
    return ["prompt" if segment.output is UNSET else "output" for segment in prompt]


def variable_path(prompt: list[Segment], index: int) -> str:
    """Return where the variable of an input or an output is in the submission."""
    is_input = prompt[index].output is UNSET
    if isinstance(prompt, TextPrompt):
        return "prompt" if is_input else "output.variable"
    return f"prompt[{index}].input" if is_input else f"prompt[{index}].output"


def split_placeholders(text: str) -> list[str | NamedPlaceholder]:
    """Return the literal texts and the placeholders of a text, in order.

    Raises:
        ValueError: if `{{` is not followed by a name and `}}`, or if there are too many parts.
    """
    parts: list[str | NamedPlaceholder] = []
    literal: list[str] = []

    def end_literal() -> None:
        if literal:
            parts.append("".join(literal))
            literal.clear()

    position = 0
    for mark in _MARK.finditer(text):
        if mark.start() > position:
            literal.append(text[position : mark.start()])
        position = mark.end()
        if mark[1]:
            literal.append("{{")
        elif mark[2] is None:
            raise ValueError(
                f"`{{{{` at character {mark.start()} is not followed by a name and "
                "`}}`: write `{{{{` for two literal braces"
            )
        else:
            end_literal()
            parts.append(NamedPlaceholder(mark[2]))
    if position < len(text):
        literal.append(text[position:])
    end_literal()
    if len(parts) >= MAX_SEGMENTS:
        raise ValueError(
            f"the text has {len(parts):,} parts (placeholders and the texts between them); "
            f"the maximum is {MAX_SEGMENTS - 1:,}"
        )
    return parts


def parse_prompt(text: str, output: Output | UnsetType) -> TextPrompt:
    """Return the segments of a prompt that is one text.

    Raises:
        ValueError: if there is no output, if `text` names the output twice, or for the reasons of
            `split_placeholders`.
    """
    if output is UNSET:
        raise ValueError(
            "a `prompt` that is one text needs an `output`: the variable that the model writes"
        )
    parts = split_placeholders(text)
    placeholder = NamedPlaceholder(output.variable)
    if (count := parts.count(placeholder)) > 1:
        raise ValueError(f"the output `{output.variable}` occurs {count} times in `prompt`")
    if placeholder not in parts:
        parts.append(placeholder)
    return TextPrompt(
        Segment(text=part)
        if isinstance(part, str)
        else _output_segment(output)
        if part == placeholder
        else Segment(input=part.name)
        for part in parts
    )


def _output_segment(output: Output) -> Segment:
    sampling = {name: getattr(output, name) for name in Sampling.__struct_fields__}
    return Segment(
        output=output.variable, constraint=output.constraint, form=output.form, **sampling
    )
