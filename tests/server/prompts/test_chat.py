"""The rendered prompt: its pieces and the ends of its segments."""

from __future__ import annotations

from conure.server.prompts.chat import build_rendered_chat
from conure.server.prompts.tokenizer import PromptPiece


def test_pieces_are_joined_once() -> None:
    built = 0

    class Text(str):
        __slots__ = ()

        def __add__(self, other: str) -> str:
            return self._count(str(self) + str(other))

        def __radd__(self, other: str) -> str:
            return self._count(str(other) + str(self))

        def _count(self, text: str) -> str:
            nonlocal built
            built += len(text)
            return text

    text, control = PromptPiece(Text("abcd"), False), PromptPiece(Text("<e>"), True)
    chat = build_rendered_chat([text] * 1_000 + [control, control], {0: 4, 999: 4_000}, 1_000)
    assert chat.pieces == (PromptPiece("abcd" * 1_000, False), PromptPiece("<e><e>", True))
    assert (chat.ends[0], chat.ends[-1]) == (4, 4_000)
    assert built <= 4_006
