"""A chat before and after its template: messages in, one prompt in pieces out.

Records, and the one step that every way of rendering ends with. Refuses to know templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..program.ir import Json
from .tokenizer import Piece


class ChatMessage(NamedTuple):
    """One message, in the shape that templates expect."""

    role: str
    content: tuple[Piece, ...]
    """Segments. Text of one that is `special` counts as the template's own."""
    name: str | None = None
    tool_calls: Sequence[Json] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content, joined."""
        return "".join([piece.text for piece in self.content])


class RenderedChat(NamedTuple):
    """A chat as one prompt."""

    pieces: tuple[Piece, ...]
    ends: tuple[int, ...]
    """Characters of the joined text up to the end of each content segment, in the order of
    the messages. It never decreases; a segment that left no trace ends with the one before.
    """
    prefix_break: bool
    """True: the text up to a segment's end may depend on later ones; every end is the text's."""


def count_segments(messages: Sequence[ChatMessage]) -> int:
    """Content segments of all messages."""
    return sum([len(message.content) for message in messages])


def finish(pieces: Sequence[Piece], ends: Mapping[int, int], num_segments: int) -> RenderedChat:
    """Return pieces with neighbours of one kind joined, and an end for every segment.

    Args:
        pieces: in order.
        ends: characters up to the end of each segment that left a trace, by its number.
        num_segments: of the chat.
    """
    joined: list[Piece] = []
    length = 0
    for piece in pieces:
        if not piece.text:
            continue
        length += len(piece.text)
        if joined and joined[-1].special == piece.special:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.special)
        else:
            joined.append(piece)
    offsets: list[int] = []
    before = 0
    for segment in range(num_segments):
        offset = ends.get(segment, before)
        if offset < before:
            return RenderedChat(tuple(joined), (length,) * num_segments, True)
        offsets.append(offset)
        before = offset
    return RenderedChat(tuple(joined), tuple(offsets), False)
