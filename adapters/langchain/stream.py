"""One answer as LangChain takes it: in chunks as its events come, or whole.

Knows the events of a call and LangChain's chunks. Refuses to know connections and who
reads the events.

Kept true: the streamed pieces joined are the text of the answer, also where a call began
anew; the last chunk carries the tool calls, the counts and `chunk_position`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from conure.server.program.errors import RunError
from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType, Problem

from ..exchange import failure_of
from .messages import call_chunks_of, from_wire, metadata_of, usage_of


class AnswerStream:
    """The chunks of one answer, from the events of its program."""

    def __init__(self, variable: str, node: str, program: str = "") -> None:
        self.program = program
        """Its id; where it was not given, every event tells it."""
        self._variable = variable
        self._node = node
        self._num_sent = 0
        self.value: dict[str, Json] | None = None
        """The answer, once it is whole."""

    @property
    def is_whole(self) -> bool:
        """The answer has come to its end."""
        return self.value is not None

    def feed(self, event: Event) -> Iterator[ChatGenerationChunk]:
        """Chunks that an event is worth; raises as `hear`."""
        self.hear(event)
        data: dict[str, Any] = event.data
        if event.type == "node.delta" and data["variable"] == self._variable:
            yield from self._text(data["text"], data["offset"])
        elif event.type == "variable.committed" and data["variable"] == self._variable:
            yield from self._last(data["value"])

    def hear(self, event: Event) -> None:
        """Take an event for its answer alone.

        Raises:
            ConureError: if the call failed, or its program ended without it.
        """
        data: dict[str, Any] = event.data
        self.program = data.get("program", self.program)
        if event.type == "variable.committed" and data["variable"] == self._variable:
            self.value = data["value"]
        elif event.type in ENDS and data.get("node") == self._node:
            raise failure_of(Problem(code=data["code"], message=data.get("message", "")))
        elif event.type == "program.finished" and not self.is_whole:
            phase = data["status"]
            raise RunError(f"run.{phase}", f"program {self.program} is {phase} and has no answer")

    def _text(self, text: str, offset: int) -> Iterator[ChatGenerationChunk]:
        # A restarted call begins again at offset 0 and, its seed being the same, says the
        # same: what was sent before is skipped. A gap waits for the committed value.
        if offset <= self._num_sent < offset + len(text):
            piece = text[self._num_sent - offset :]
            self._num_sent += len(piece)
            yield ChatGenerationChunk(message=AIMessageChunk(content=piece))

    def _last(self, value: dict[str, Json]) -> Iterator[ChatGenerationChunk]:
        yield from self._text(value.get("content") or "", 0)
        last = AIMessageChunk(
            content="",
            tool_call_chunks=call_chunks_of(value),
            response_metadata=metadata_of(value, program=self.program),
            usage_metadata=usage_of(value),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=last, generation_info=_generation_info(value))


class Whole(NamedTuple):
    """An answer, whole."""

    value: dict[str, Json]
    program: str
    """That made it."""


ENDS: frozenset[EventType] = frozenset({"node.failed", "node.killed", "node.skipped"})
"""Events that say that a call will have no answer."""


def result_of(answers: Sequence[Whole]) -> ChatResult:
    """What a call came to, whole.

    Of several answers the first one has the counts of the call: the prompt once, and all that
    was said. So they are right for who sums them up, and for who looks at the first alone.

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
    if others:
        given = usage_of(value)["input_tokens"]
        made = sum(usage_of(each)["output_tokens"] for each, _ in answers)
        usage = UsageMetadata(input_tokens=given, output_tokens=made, total_tokens=given + made)
        for index, generation in enumerate(generations):
            message = generation.message
            assert isinstance(message, AIMessage)
            message.usage_metadata = None if index else usage
    return ChatResult(generations=generations, llm_output={"model_name": value.get("model")})


def _generation_info(value: dict[str, Json]) -> dict[str, Json]:
    return {"finish_reason": value.get("finish_reason")}
