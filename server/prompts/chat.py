"""Records of a chat before and after its template: messages, and the rendered prompt in pieces.

Out of scope: templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ..program.ir import Json
from .tokenizer import PromptPiece


class TemplateMessage(NamedTuple):
    """One message in the form that templates expect."""

    role: str
    content: tuple[PromptPiece, ...]
    """Segments. Like the template's own text, the text of a `special` piece may become control
    tokens."""
    name: str | None = None
    tool_calls: Sequence[Json] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """Return the joined content."""
        return "".join([piece.text for piece in self.content])

    def as_json(self) -> dict[str, Json]:
        """Return the message in the form of OpenAI's API."""
        others = {
            "name": self.name,
            "tool_calls": None if self.tool_calls is None else list(self.tool_calls),
            "tool_call_id": self.tool_call_id,
        }
        given = {name: value for name, value in others.items() if value is not None}
        return {"role": self.role, "content": self.text, **given}


class RenderedChat(NamedTuple):
    """A chat rendered as one prompt."""

    pieces: tuple[PromptPiece, ...]
    ends: tuple[int, ...]
    """For each content segment, in the order of the messages, the number of characters of the
    joined text up to its end. The numbers never decrease; a segment that is not in the text has the
    end of the previous segment."""
    prefix_break: bool
    """Whether the text up to a segment's end may depend on later segments. If so, every number in
    `ends` is the length of the text."""


def count_segments(messages: Sequence[TemplateMessage]) -> int:
    """Return the number of content segments of all messages."""
    return sum([len(message.content) for message in messages])


def build_rendered_chat(
    pieces: Sequence[PromptPiece], ends: Mapping[int, int], num_segments: int
) -> RenderedChat:
    """Join neighbouring pieces of one kind, and determine the end of every segment.

    Args:
        pieces: in order.
        ends: number of characters up to the end of each segment that is in the text, by segment
            index.
        num_segments: number of content segments of the chat.
    """
    joined: list[PromptPiece] = []
    for special, run in groupby((piece for piece in pieces if piece.text), attrgetter("special")):
        joined.append(PromptPiece("".join([piece.text for piece in run]), special))
    length = sum([len(piece.text) for piece in joined])
    offsets: list[int] = []
    before = 0
    for segment in range(num_segments):
        offset = ends.get(segment, before)
        if offset < before:
            return RenderedChat(tuple(joined), (length,) * num_segments, True)
        offsets.append(offset)
        before = offset
    return RenderedChat(tuple(joined), tuple(offsets), False)
