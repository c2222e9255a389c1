"""Ids to text, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from conure.engine.bytelevel import SPECIAL_IDS, TURN_END, tokenizer_json
from conure.engine.detokenizer import Detokenizer, load_tokenizer

BYTES = load_tokenizer(tokenizer_json())


def word_tokenizer() -> Tokenizer:
    """Sentencepiece-like: words carry their space in front, the first of a text loses it."""
    words = ["<unk>", "▁one", "▁two", "three", "▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def feed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """Push ids until a stop string is found; finish; return what came, piece by piece."""
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stop is not None:
            break
    return [*pieces, detokenizer.finish()]


@given(st.text())
@settings(deadline=None, database=None)
def test_pieces_join_to_the_text_and_no_piece_holds_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(BYTES, [], ())
    pieces = feed(detokenizer, list(text.encode()))
    assert "".join(pieces) == detokenizer.text == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
    assert detokenizer.kept() == (len(text.encode()), "")


@given(st.lists(st.integers(0, 255), max_size=200))
@settings(deadline=None, database=None)
def test_bytes_that_are_no_text_give_what_the_tokenizer_gives(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES, [], ())
    assert "".join(feed(detokenizer, ids)) == detokenizer.text == BYTES.decode(ids)


@given(st.text(alphabet="ab<é🦜", max_size=30), st.lists(st.text("ab<é🦜", min_size=1), max_size=3))
@settings(deadline=None, database=None, max_examples=300)
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, [], stops)
    pieces = feed(detokenizer, list(text.encode()))
    # The first moment at which any stop string is there, and the earliest one then.
    expected = text
    for end in range(len(text) + 1):
        found = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if found:
            expected = text[: min(found)]
            break
    assert "".join(pieces) == detokenizer.text == expected
    num_kept, leftover = detokenizer.kept()
    assert BYTES.decode(list(text.encode())[:num_kept]) + leftover == expected
    assert leftover == ""


def test_a_stop_string_inside_a_token_leaves_a_rest_behind_the_ids() -> None:
    tokenizer = word_tokenizer()
    detokenizer = Detokenizer(tokenizer, [1], ("re",))
    assert feed(detokenizer, [2, 3]) == [" two", "th", ""]
    assert detokenizer.kept() == (1, "th")


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    tokenizer = word_tokenizer()
    assert feed(Detokenizer(tokenizer, [1], ()), [2]) == [" two", ""]
    assert feed(Detokenizer(tokenizer, [], ()), [2]) == ["two", ""]


def test_raw_bytes_of_one_character_wait_for_the_last() -> None:
    tokenizer = word_tokenizer()
    pieces = feed(Detokenizer(tokenizer, [1], ()), [2, 5, 6, 7, 8, 3])
    assert pieces == [" two", "", "", "", "🦜", "three", ""]


def test_special_tokens_have_no_text() -> None:
    ids = [65, SPECIAL_IDS[TURN_END], 66]
    assert feed(Detokenizer(BYTES, [], ()), ids) == ["A", "", "B", ""]


def test_a_stop_string_is_not_looked_for_before_it_may_be() -> None:
    detokenizer = Detokenizer(BYTES, [], ("ab",))
    assert [detokenizer.push(i, can_stop=False) for i in b"aba"] == ["a", "b", "a"]
    assert detokenizer.push(ord("b")) == "b"
    assert detokenizer.stop is None
    assert [detokenizer.push(i) for i in b"ab"] == ["", ""]
    assert detokenizer.text == "abab"
    assert detokenizer.stop == "ab"


@pytest.mark.parametrize("held", ["<", "<E", "<EN"])
def test_what_was_held_back_comes_at_the_end(held: str) -> None:
    detokenizer = Detokenizer(BYTES, [], ("<END>",))
    pieces = feed(detokenizer, list(f"x{held}".encode()))
    assert pieces[0] == "x"
    assert pieces[-1] == held
