"""The answer to one call, read from the events of its program.

Invariant: the pieces of text joined are the text of the answer, across restarts of the call and
reconnections of the event stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conure.server.program.errors import ConureError, RunError
from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType, Problem

from ..client.connection import FAILURE_EVENTS
from ..client.exchange.problems import failure_of

RESULT_EVENTS: Final[frozenset[EventType]] = frozenset({*FAILURE_EVENTS, "variable.committed"})
"""Events that end a call."""
TEXT_EVENTS: Final[frozenset[EventType]] = frozenset({"node.delta"})
"""Events that are needed only where an answer is streamed."""


LEASE_LOST: Final = "program.lease_lost"
"""Code of a program that ended because its client could not reach the server for some time."""


class AnswerTextStream:
    """The text of one answer while the model writes it."""

    def __init__(self) -> None:
        self._num_seen = 0

    def more(self, text: str, offset: int) -> str:
        """Return the part of `text` after the text that was returned before.

        `text` starts at `offset` of the answer. A restarted call starts again at offset 0. Its seed
        is the same, so its text is the same, and the part that was returned before is skipped.
        Text after a gap is dropped; the committed value contains it.
        """
        if not offset <= self._num_seen < offset + len(text):
            return ""
        piece = text[self._num_seen - offset :]
        self._num_seen += len(piece)
        return piece


class AnswerStream:
    """Collects one answer from events."""

    def __init__(self, variable: str, node: str, program: str = "") -> None:
        """Start before the first event.

        Args:
            variable: receives the answer.
            node: the `generate` node.
            program: id of the program. An event with a `program` field overrides this id.
        """
        self.program = program
        self.value: dict[str, Json] | None = None
        """The answer in the `message` form, once it is committed."""
        self._variable = variable
        self._node = node
        self._text = AnswerTextStream()

    @property
    def is_complete(self) -> bool:
        """Whether the answer is committed."""
        return self.value is not None

    def result(self) -> dict[str, Json]:
        """Return the answer, after the last event.

        Raises:
            RunError: if the program has no answer.
        """
        if self.value is None:
            raise RunError("run.ended", f"program {self.program} has no answer")
        return self.value

    def feed(self, event: Event) -> str:
        """Process an event and return the text that it adds.

        Raises:
            ConureError: if the call failed, or its program ended without the answer.
        """
        data: dict[str, Any] = event.data
        self.program = data.get("program", self.program)
        if event.type == "node.delta" and data["variable"] == self._variable:
            return self._text.more(data["text"], data["offset"])
        if event.type == "variable.committed" and data["variable"] == self._variable:
            value: dict[str, Json] = data["value"]
            self.value = value
            return self._text.more(answer_text(value), 0)
        if event.type in FAILURE_EVENTS and data.get("node") == self._node:
            raise call_failure(event)
        if event.type == "program.finished" and not self.is_complete:
            raise program_failure(event)
        return ""


def answer_text(value: Mapping[str, Json]) -> str:
    """Return the text of an answer in the `message` form."""
    return value.get("content") or ""


def call_failure(event: Event) -> ConureError:
    """Return the error of a call from the event of its failure."""
    data: dict[str, Any] = event.data
    return failure_of(
        Problem(code=data.get("code", "run.skipped"), message=data.get("message", ""))
    )


def program_failure(event: Event) -> RunError:
    """Return the error of a call whose program finished without its answer."""
    program, status = event.data.get("program", ""), event.data["status"]
    if event.data.get("code") == LEASE_LOST:
        return RunError(LEASE_LOST, f"program {program}: {event.data['message']}")
    return RunError(f"run.{status}", f"program {program} ended ({status}) without this answer")
