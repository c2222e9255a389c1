"""One call to a model, and what its program says of it while it runs.

Knows the `generate` node of a call and the events from which its text and its end are
read. Refuses to know LlamaIndex, connections and threads.

Kept true: the pieces of a stream joined are the text of the answer, whatever restarts and
reconnections lie between; two calls have the same key exactly if a server could not tell
them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from conure.server.program.errors import ConureError, RunError
from conure.server.program.expression import evaluate, input_expression
from conure.server.program.ir import Json
from conure.server.program.status import Event, Problem

from ..exchange import failure_of

ANSWER = "answer"
"""The variable of a program with one call."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked of a model: `messages`, or a `prompt` that it continues."""

    model: str
    output: Mapping[str, Json]
    """Sampling fields, and a constraint if there is one."""
    messages: list[dict[str, Json]] | None = None
    prompt: list[dict[str, Json]] | None = None
    """Segments without the output."""
    extra: Mapping[str, Json] = field(default_factory=dict)
    """`tools` and `tool_choice`, where there are any."""
    timeout_s: float | None = None
    """For the call, queueing included."""

    def node(self, node_id: str, variable: str, **common: Json) -> dict[str, Json]:
        """The `generate` node; its value is the whole answer, in the `message` form.

        Args:
            node_id: of the node.
            variable: that gets the value.
            **common: fields that any node has, such as `when`.
        """
        node = {"id": node_id, "op": "generate", "model": self.model, **common, **self.extra}
        if self.timeout_s is not None:
            node["timeout_s"] = self.timeout_s
        output = {**self.output, "as": "message"}
        if self.messages is not None:
            return {**node, "messages": self.messages, "output": {"variable": variable, **output}}
        return {**node, "prompt": [*(self.prompt or []), {"output": variable, **output}]}

    def key(self, values: Mapping[str, Json] | None = None) -> bytes:
        """Equal for equal calls.

        Args:
            values: of the variables that the call reads.

        Raises:
            ExpressionError: if a value is missing or does not suit.
        """
        scope = values or {}
        messages = [
            {**message, "content": _content(message.get("content"), scope)}
            for message in self.messages or []
        ]
        what = [self.model, messages, _content(self.prompt, scope), self.output, self.extra]
        return msgspec.json.encode(what, order="deterministic")


def program_of(call: Call) -> dict[str, Json]:
    """The submission of one call alone."""
    program = {
        "name": "Conure.llamaindex",
        "nodes": [call.node("call", ANSWER)],
        "outputs": [ANSWER],
    }
    options = {} if call.timeout_s is None else {"deadline_s": call.timeout_s}
    return {"program": program, "options": options}


class Text:
    """The text of one answer while it is being written."""

    def __init__(self) -> None:
        self._num_seen = 0

    def more(self, text: str, offset: int) -> str:
        """What `text`, which begins at `offset` of the answer, adds to what was seen.

        A restarted call begins again at 0 and, its seed being the same, says the same: what
        was seen is not said again. Text behind a gap is nothing yet; the answer has it.
        """
        if not offset <= self._num_seen < offset + len(text):
            return ""
        piece = text[self._num_seen - offset :]
        self._num_seen += len(piece)
        return piece


class Answer:
    """The answer of a program with one call, from the program's events."""

    def __init__(self, program: str) -> None:
        self.value: dict[str, Json] | None = None
        """The `message` form, once it is there."""
        self._program = program
        self._text = Text()
        self._failure: ConureError | None = None

    def feed(self, event: Event) -> Iterator[str]:
        """Pieces of text that an event is worth."""
        data = event.data
        if event.type == "node.delta":
            piece = self._text.more(data["text"], data["offset"])
        elif event.type == "variable.committed" and data["variable"] == ANSWER:
            self.value = data["value"]
            piece = self._text.more(text_of(data["value"]), 0)
        else:
            piece = ""
            if event.type in ("node.failed", "node.killed") and self._failure is None:
                self._failure = failure_of(
                    Problem(code=data["code"], message=data.get("message", ""))
                )
        if piece:
            yield piece

    def final(self) -> dict[str, Json]:
        """The whole answer, after the last event.

        Raises:
            ConureError: what the program failed with.
        """
        if self.value is not None:
            return self.value
        raise self._failure or RunError("run.ended", f"program {self._program} has no answer")


def text_of(value: Mapping[str, Json]) -> str:
    """The text of an answer in the `message` form."""
    return value.get("content") or ""


def _content(content: Json, scope: Mapping[str, Json]) -> Json:
    """Text as the server would put it together; other parts as they are."""
    if not isinstance(content, list):
        return content
    made: list[Any] = []
    for segment in content:
        if "text" in segment:
            piece: Any = segment["text"]
        elif "input" in segment:
            piece = evaluate(input_expression(segment["input"]), scope)
        else:
            piece = segment
        if isinstance(piece, str) and made and isinstance(made[-1], str):
            made[-1] += piece
        else:
            made.append(piece)
    return made[0] if len(made) == 1 else made
