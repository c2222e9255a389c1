"""What a template writes around contents, kept for the next chat of the same shape.

Programs ask alike: a hundred calls of a map differ in what is said and not in who says it.
Where a template only places contents and never looks at them (`unseen`), what it writes
around them is a *frame*, and a chat of the same shape is the frame with its own contents.

A chat has a shape if it consists of roles and contents alone, each content either empty or
more than blanks. Which shapes have a frame is found out by `chat_template`, when one comes for
the second time: most shapes of long chats come once.

Refuses to know templates. Kept true: so many shapes are remembered and no more, those that
came last. Safe in any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from .chat import ChatMessage, RenderedChat, count_segments, finish
from .tokenizer import Piece

T = TypeVar("T")

MAX_MESSAGES: Final = 64

Shape: TypeAlias = tuple[str | bool, ...]
"""Role, and whether something is said, of every message."""


class Place(NamedTuple):
    """Where a content goes."""

    message: int
    is_stripped: bool
    """Without its outer blanks."""


Frame: TypeAlias = tuple[str | Place, ...]
"""Texts of the template, and places between them."""


class Frames:
    """The frames of one template."""

    def __init__(self, num_shapes: int) -> None:
        """Remember so many shapes; 0 remembers none."""
        self._num_shapes = num_shapes
        self._frames: dict[Shape, Frame | None] = {}
        """None: there is none."""
        self._once: dict[Shape, None] = {}
        """Came once."""
        self._lock = threading.Lock()

    def find(self, shape: Shape) -> Frame | None:
        """The frame of a shape, if it is known and there is one."""
        return self._frames.get(shape)

    def is_due(self, shape: Shape) -> bool:
        """Note that a shape came; True if it came before, and nobody has looked for its frame."""
        with self._lock:
            if shape in self._frames:
                return False
            if shape in self._once:
                return True
            self._put(self._once, shape, None)
            return False

    def keep(self, shape: Shape, frame: Frame | None) -> None:
        """Remember the frame of a shape, or that it has none."""
        with self._lock:
            self._once.pop(shape, None)
            self._put(self._frames, shape, frame)

    def _put(self, known: dict[Shape, T], shape: Shape, what: T) -> None:
        """Remember one more, and forget the oldest where there are too many."""
        known[shape] = what
        if len(known) > self._num_shapes:
            del known[next(iter(known))]


def shape_of(messages: Sequence[ChatMessage]) -> Shape | None:
    """The shape of a chat; None if it has none."""
    if len(messages) > MAX_MESSAGES:
        return None
    shape: list[str | bool] = []
    for message in messages:
        is_plain = message.name is message.tool_calls is message.tool_call_id is None
        text = message.text
        if not is_plain or text.isspace():
            return None
        shape += (message.role, bool(text))
    return tuple(shape)


def fill(frame: Frame, messages: Sequence[ChatMessage]) -> RenderedChat:
    """A chat in the frame of its shape."""
    pieces: list[Piece] = []
    ends: dict[int, int] = {}
    offset = 0
    for part in frame:
        if isinstance(part, str):
            pieces.append(Piece(part, special=True))
            offset += len(part)
            continue
        message = messages[part.message]
        number = count_segments(messages[: part.message])
        for piece in _stripped(message) if part.is_stripped else message.content:
            pieces.append(piece)
            offset += len(piece.text)
            ends.setdefault(number, offset)
            number += 1
    return finish(pieces, ends, count_segments(messages))


def _stripped(message: ChatMessage) -> list[Piece]:
    """The segments of a content without the blanks around the whole of it."""
    text = message.text
    low = len(text) - len(text.lstrip())
    high = low + len(text.strip())
    stripped: list[Piece] = []
    at = 0
    for piece in message.content:
        end = at + len(piece.text)
        stripped.append(Piece(text[max(at, low) : max(min(end, high), low)], piece.special))
        at = end
    return stripped
