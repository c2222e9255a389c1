"""Frames of chats: the prompts are those of a template that remembers nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.engine.bytelevel import CHAT_TEMPLATE
from conure.server.prompts.chat import ChatMessage, RenderedChat
from conure.server.prompts.chat_template import ChatTemplate
from conure.server.prompts.frames import Frames, shape_of
from conure.server.prompts.template_sandbox import TemplateSandbox
from conure.server.prompts.tokenizer import Piece
from conure.server.prompts.unseen import SeenError, Unseen

from .test_chat_template import TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLACING = {**TEMPLATES, "fake": CHAT_TEMPLATE}
EACH = "{% for message in messages %}{% set text = message.content %}"
LOOKING = [
    "{{ text|length }}",
    "{{ text|upper }}",
    "{{ text|int }}",
    "{{ text|float }}",
    "{{ text|tojson }}",
    "{{ text|string|trim }}",
    "{{ text|first }}",
    "{{ text|unique|list }}",
    "{{ text|replace('a', 'b') }}",
    "{{ text|trim('a') }}",
    "{{ ('- ' + text)|trim }}",
    "{{ text.split('a')[0] }}",
    "{{ text[0] }}",
    "{{ text[1:] }}",
    "{{ text ~ '!' }}",
    "{{ '%s!' % text }}",
    "{{ '{}!'.format(text) }}",
    "{{ text * 2 }}",
    "{{ message }}",
    "{{ message|tojson }}",
    "{{ messages|map(attribute='content')|join(', ') }}",
    "{{ {text: 1}|length }}{{ text }}",
    "{{ [text, 'abba']|max }}",
    "{{ 'yes' if text == 'abba' else 'no' }}{{ text }}",
    "{{ 'yes' if 'b' in text else 'no' }}{{ text }}",
    "{{ 'yes' if text in ['abba', 'c'] else 'no' }}{{ text }}",
    "{{ 'yes' if text is iterable else 'no' }}{{ text }}",
    "{{ 'yes' if text is sequence else 'no' }}{{ text }}",
    "{{ 'yes' if text is lower else 'no' }}{{ text }}",
    "{{ 'yes' if text is string else 'no' }}{{ text }}",
    "{{ 'yes' if message == messages[0] else 'no' }}{{ text }}",
    "{% for letter in text %}{{ letter }},{% endfor %}",
    "{% set block %}{{ text }}{% endset %}{{ block|length }}{{ text }}",
    "{% macro say(x) %}{{ x }}{% endmacro %}{{ say(text)|length }}{{ text }}",
    "{{ text + ('!'|e) }}",
    "{% autoescape true %}{{ text }}{% endautoescape %}",
    "{% filter upper %}{{ text }}{% endfilter %}",
    "{{ strftime_now('%Y') }}{{ text }}",
]


def said(role: str, *texts: str) -> ChatMessage:
    return ChatMessage(role, tuple(Piece(text, special=False) for text in texts))


@cache
def template(source: str, num_shapes: int = 4) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, num_shapes=num_shapes)


def careful(source: str, messages: Sequence[ChatMessage]) -> RenderedChat:
    """By a template that remembers nothing."""
    return template(source, 0).render(messages)


def letters(chat: RenderedChat) -> list[tuple[str, bool]]:
    """Each letter of a prompt, and whether it may belong to a control token."""
    return [
        (letter, piece.special and not letter.isspace())
        for piece in chat.pieces
        for letter in piece.text
    ]


texts = st.one_of(st.sampled_from(["", " ", "a", "\na ", "</s>", "<s>x"]), st.text(max_size=5))
contents = st.lists(st.builds(Piece, texts, special=st.booleans()), min_size=1, max_size=3).map(
    tuple
)
turns = st.lists(contents, min_size=1, max_size=4)


@pytest.mark.parametrize("source", PLACING.values(), ids=PLACING.keys())
@given(chats=st.lists(turns, min_size=1, max_size=5), has_system=st.booleans())
def test_a_chat_in_a_frame_is_the_chat_that_the_template_renders(
    source: str, chats: list[list[tuple[Piece, ...]]], has_system: bool
) -> None:
    roles = [*["system"] * has_system, *["user", "assistant"] * 2]
    for turn in chats:
        messages = [ChatMessage(role, content) for role, content in zip(roles, turn, strict=False)]
        has_blanks = any(message.text.strip() != message.text for message in messages)
        # Twice more, by when every shape that has a frame is rendered by it.
        for _ in range(3):
            chat, expected = template(source).render(messages), careful(source, messages)
            # Blanks around a content may be taken for the template's where it strips others.
            assert letters(chat) == letters(expected)
            assert has_blanks or chat == expected


@pytest.mark.parametrize("source", LOOKING)
def test_a_template_that_looks_at_contents_sees_those_of_each_chat(source: str) -> None:
    source = f"{EACH}{source}{{% endfor %}}"
    for text in ("abba", "b a b", " 12 ", "abba", "C", "a<b"):
        messages = [said("user", text), said("assistant", "a", text)]
        assert template(source).render(messages) == careful(source, messages)


def test_a_date_is_that_of_each_rendering() -> None:
    dated = template("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    years = [dated.render([said("user", "x")], now=datetime(year, 1, 1)) for year in range(1, 5)]
    assert len({"".join(piece.text for piece in chat.pieces) for chat in years}) == 4


@pytest.mark.parametrize("name", ["chatml", "llama", "gemma", "mistral", "fake"])
def test_the_third_chat_of_a_shape_is_not_rendered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    framed = ChatTemplate(PLACING[name], SPECIAL)
    for text in ("a", "b"):
        framed.render([said("user", text), said("assistant", "c ", text)])

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr(TemplateSandbox, "render", refuse)
    chat = framed.render([said("user", "one", " two"), said("assistant", "three")])
    text = "".join(piece.text for piece in chat.pieces)
    assert [
        text[:end].endswith(said)
        for end, said in zip(chat.ends, ("one", "two", "three"), strict=True)
    ] == [True] * 3
    with pytest.raises(AssertionError, match="rendered"):
        framed.render([said("user", "another shape")])


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", (Piece("a", False),), name="bob"),
        ChatMessage("tool", (Piece("a", False),), tool_call_id="1"),
        ChatMessage("assistant", (Piece("a", False),), tool_calls=[{"id": "1"}]),
        said("user", " \n"),
    ],
)
def test_what_is_more_than_roles_and_contents_has_no_shape(message: ChatMessage) -> None:
    assert shape_of([said("user", "a")]) is not None
    assert shape_of([said("user", "a"), message]) is None
    assert shape_of([said("user", "a")] * 1000) is None


def test_a_shape_is_due_when_it_comes_again_until_something_is_kept_of_it() -> None:
    frames = Frames(3)
    assert [frames.is_due(("user", True)) for _ in range(3)] == [False, True, True]
    frames.keep(("user", True), None)
    assert not frames.is_due(("user", True))
    assert frames.find(("user", True)) is None


def test_the_oldest_shapes_are_forgotten() -> None:
    frames = Frames(3)
    for number in range(4):
        frames.keep((str(number), True), ("x",))
    assert frames.find(("0", True)) is None
    assert frames.find(("1", True)) == ("x",)
    for number in range(4):
        assert not frames.is_due((f"once {number}", True))
    assert not frames.is_due(("once 0", True))


def test_an_unseen_text_can_be_placed_and_not_be_told_from_another() -> None:
    text = Unseen("[0]", "[1]")
    assert bool(text + "x")
    assert bool("x" + text.strip())
    for look in (str, repr, len, hash, iter, int, float, lambda t: t == t, lambda t: t < "a"):
        with pytest.raises(SeenError):
            look(text)
    with pytest.raises(SeenError):
        (text + "x").strip()
