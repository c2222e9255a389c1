"""What a template writes around the contents of chats that differ in their contents only.

Sibling calls have messages with the same roles and segments. The first such chat is rendered with
marks, which show the text of the template. For another one, the plain rendering is enough: if it
consists of the same texts around the new contents, the origin of each of its parts is known.

Invariant: a chat that an outline describes has the same pieces as a rendering with marks, because
an outline is kept only if it gives the pieces of the chat that it was taken from, and a template's
text counts as the template's own only where the template has written it around such a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

from .chat import RenderedChat, TemplateMessage, build_rendered_chat
from .tokenizer import PromptPiece

MAX_OUTLINES: Final = 256
MAX_MESSAGES: Final = 32
"""Messages of a chat with an outline. Longer chats are histories, of which no two are alike."""

ChatShape: TypeAlias = tuple[object, ...]
"""All of a chat but the texts of its contents."""


class ChatOutline(NamedTuple):
    """The texts of a template before the first content, between contents, and after the last."""

    texts: tuple[str, ...]

    def fill(self, messages: Sequence[TemplateMessage], text: str) -> RenderedChat | None:
        """Return the pieces of a chat's plain rendering `text`; None if it has another outline."""
        pieces = [PromptPiece(self.texts[0], special=True)]
        ends: dict[int, int] = {}
        offset = len(self.texts[0])
        for message, after in zip(messages, self.texts[1:], strict=True):
            for piece in message.content:
                offset += len(piece.text)
                ends[len(ends)] = offset
            pieces += message.content
            pieces.append(PromptPiece(after, special=True))
            offset += len(after)
        if "".join([piece.text for piece in pieces]) != text:
            return None
        return build_rendered_chat(pieces, ends, len(ends))


class ChatOutlines:
    """The outlines of one template, by shape. Any number of threads may use them."""

    def __init__(self) -> None:
        self._outlines: dict[ChatShape, ChatOutline] = {}

    def find(self, shape: ChatShape) -> ChatOutline | None:
        """Return the outline of chats with a shape, if it is known."""
        return self._outlines.get(shape)

    def learn(
        self,
        shape: ChatShape,
        messages: Sequence[TemplateMessage],
        text: str,
        rendered: RenderedChat,
    ) -> None:
        """Keep the outline of a chat that was rendered with marks, unless it is ambiguous."""
        outline = _outline_of(messages, text, rendered)
        if outline is None or outline.fill(messages, text) != rendered:
            return
        if len(self._outlines) >= MAX_OUTLINES:
            self._outlines.clear()
        self._outlines[shape] = outline


def shape_of(messages: Sequence[TemplateMessage]) -> ChatShape | None:
    """Return the shape of a chat; None if its outline would not be kept.

    A template may test whether a content is empty or has outer blanks.
    """
    if len(messages) > MAX_MESSAGES:
        return None
    parts: list[object] = []
    for message in messages:
        others = (message.name, message.tool_calls, message.tool_call_id)
        text = message.text
        if others != (None, None, None) or not text or text.strip() != text:
            return None
        parts.append((message.role, tuple([piece.special for piece in message.content])))
    return tuple(parts)


def _outline_of(
    messages: Sequence[TemplateMessage], text: str, rendered: RenderedChat
) -> ChatOutline | None:
    """Return the texts around the contents, by the ends of the contents' last segments."""
    if rendered.prefix_break:
        return None
    texts: list[str] = []
    begin, last_segment = 0, -1
    for message in messages:
        last_segment += len(message.content)
        end = rendered.ends[last_segment]
        start = end - len(message.text)
        if start < begin or text[start:end] != message.text:
            return None
        texts.append(text[begin:start])
        begin = end
    return ChatOutline(tuple(chain(texts, (text[begin:],))))
