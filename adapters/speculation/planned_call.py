"""Planned calls, and the canonical key of a call.

A planned call is a `generate` node whose prompt may read variables that have no value yet. Once the
values are known, its prompt is rendered here as the server renders it. The planned call and the
application's call are then the same call exactly if their keys are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from conure.server.program.errors import ExpressionError
from conure.server.program.expressions.evaluate import evaluate, input_expression
from conure.server.program.expressions.values import is_true, text_of
from conure.server.program.ir import Expression, Json
from conure.server.program.seed import seed_of_answer

_IGNORED_FIELDS: Final = frozenset({"id", "meta", "when", "on_error", "timeout_s"})
"""Fields of a node that do not change the request to the model."""
SEED_BITS: Final = 56
"""As many as the server's own seeds have."""
_SPLICED: Final = ("role", "content", "name", "tool_calls", "tool_call_id")
"""Fields of a message that a spliced value contributes to a prompt."""


@dataclass(frozen=True, eq=False, slots=True)
class PlannedCall:
    """A model call that the application is expected to make."""

    place: str
    """The part of the application that makes it, for reports."""
    variable: str
    """Receives the answer."""
    node: dict[str, Json]
    """The `generate` node. Its `when` is the condition under which the call runs."""
    reads: frozenset[str]
    """Variables in its prompt and its condition."""


def request_key(node: Mapping[str, Json], values: Mapping[str, Json]) -> bytes:
    """Return a key that is equal for `generate` nodes with the same request to the model.

    Args:
        node: names, metadata, condition and timeout are ignored.
        values: values of the variables that the prompt reads.

    Raises:
        ExpressionError: if a value is missing or has the wrong type.
        ValueError: if a text cannot be encoded as UTF-8.
    """
    request = {name: value for name, value in node.items() if name not in _IGNORED_FIELDS}
    if "messages" in request:
        request["messages"] = _rendered_messages(request["messages"], values)
        request["output"] = {k: v for k, v in request["output"].items() if k != "variable"}
    else:
        unnamed = [
            {**each, "output": ""} if "output" in each else each for each in request["prompt"]
        ]
        request["prompt"] = _rendered_content(unnamed, values)
    return msgspec.json.encode(request, order="deterministic")


def seeded_node(node: Mapping[str, Json], seed: int) -> dict[str, Json]:
    """Return a `generate` node whose sampled outputs all have seeds.

    A server derives a missing seed from the id of the program. The text of a call would be another
    one in another program.

    Args:
        node: its own seeds are kept.
        seed: for the outputs without one; further outputs get seeds derived from it.
    """
    if "output" in node:
        return {**node, "output": _seeded(node["output"], seed)}
    segments = [
        _seeded(each, seed_of_answer(seed, index)) if "output" in each else each
        for index, each in enumerate(node["prompt"])
    ]
    return {**node, "prompt": segments}


def _seeded(output: dict[str, Json], seed: int) -> dict[str, Json]:
    is_greedy = output.get("temperature") == 0
    return output if is_greedy or output.get("seed") is not None else {**output, "seed": seed}


def holds(condition: Expression, values: Mapping[str, Json]) -> bool:
    """Return whether a condition is true of the values; False if it cannot be evaluated.

    Args:
        condition: None is always true.
        values: values of the variables that it reads.
    """
    if condition is None:
        return True
    try:
        return is_true(evaluate(condition, values))
    except ExpressionError:
        return False


def _rendered_messages(messages: list[Json], values: Mapping[str, Json]) -> list[Json]:
    """Return messages with values in place of variables."""
    rendered: list[Json] = []
    for message in messages:
        if "splice" in message:
            value = values[message["splice"]]
            rendered += [
                {name: each[name] for name in _SPLICED if each.get(name) is not None}
                for each in (value if isinstance(value, list) else [value])
            ]
        else:
            content = _rendered_content(message.get("content"), values)
            rendered.append({**message, "content": content})
    return rendered


def _rendered_content(content: Json, values: Mapping[str, Json]) -> Json:
    """Return the text of segments as the server joins them; other segments stay as they are."""
    if not isinstance(content, list):
        return content
    pieces: list[Any] = []
    for segment in content:
        if "text" in segment:
            piece: Any = segment["text"]
        elif "input" in segment:
            piece = text_of(evaluate(input_expression(segment["input"]), values))
        else:
            piece = segment
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else pieces
