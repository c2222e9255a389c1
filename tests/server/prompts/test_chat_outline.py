"""Outlines of chats: a chat after its siblings has the pieces of a chat alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.prompts.chat import RenderedChat, TemplateMessage
from conure.server.prompts.chat_outline import MAX_OUTLINES, ChatOutlines, shape_of
from conure.server.prompts.chat_template import ChatTemplate
from conure.server.prompts.tokenizer import PromptPiece

from .test_chat_template import (
    MARKERS,
    SPECIALS,
    TEMPLATES,
    chats,
    message,
    names,
    template,
    texts,
    tokenizer,
)


def fresh(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIALS, spells_special=tokenizer().spells_special)


def refilled(chat: list[TemplateMessage], text: str) -> list[TemplateMessage]:
    """Return a sibling: the same roles and numbers of segments with another text."""
    return [
        each._replace(content=tuple(PromptPiece(text, special=False) for _ in each.content))
        for each in chat
    ]


@names
@given(messages=chats(texts | st.sampled_from(MARKERS)), earlier=st.sampled_from(["x", *MARKERS]))
def test_chat_after_a_sibling_has_the_pieces_of_a_chat_alone(
    name: str, messages: list[TemplateMessage], earlier: str
) -> None:
    used = template(name)
    used.render(refilled(messages, earlier))
    assert used.render(messages) == fresh(TEMPLATES[name]).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.content }}|{{ m.content }}]{% endfor %}",
        "{% for m in messages | reverse %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content | upper }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content if 'b' not in m.content else '<s>' }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content.replace('b', '') }}]{% endfor %}",
    ],
)
def test_templates_that_change_contents_keep_their_pieces(source: str) -> None:
    used = fresh(source)
    for first, second in [("a", "c"), ("b", "a"), ("abc", "b"), ("c", "c"), ("b]", "[b")]:
        chat = [message("user", first), message("assistant", second)]
        assert used.render(chat) == fresh(source).render(chat)


def test_sibling_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used = fresh(TEMPLATES["chatml"])
    assert used._sandbox is not None
    render, texts_made = used._sandbox.render, []

    def counted(*args: Any, **options: Any) -> str:
        texts_made.append(render(*args, **options))
        return texts_made[-1]

    monkeypatch.setattr(used._sandbox, "render", counted)
    used.render([message("user", "first")])
    assert len(texts_made) == 2
    used.render([message("user", "second")])
    assert len(texts_made) == 3


def test_histories_and_blank_contents_have_no_shape() -> None:
    assert shape_of([message("user", "a")] * 100) is None
    for content in ("", " a", "a\n"):
        assert shape_of([message("user", content)]) is None
    assert shape_of([message("user", "a", name="Ada")]) is None


def test_number_of_outlines_is_bounded() -> None:
    outlines = ChatOutlines()
    chat = [message("user", "a")]
    rendered = RenderedChat((PromptPiece("a", special=False),), (1,), prefix_break=False)
    for number in range(3 * MAX_OUTLINES):
        outlines.learn((number,), chat, "a", rendered)
    assert len(outlines._outlines) <= MAX_OUTLINES
