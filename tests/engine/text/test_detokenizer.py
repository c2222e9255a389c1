"""The detokenizer: pieces of text, stop strings, incomplete characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from conure.engine.text.byte_tokenizer import SPECIAL_IDS, TURN_END, tokenizer_json
from conure.engine.text.detokenizer import NUM_CONTEXT, Detokenizer, load_tokenizer

BYTES = load_tokenizer(tokenizer_json())


def word_tokenizer() -> Tokenizer:
    """Return a SentencePiece-like tokenizer: words start with their space, except the first."""
    words = ["<unk>", "▁one", "▁two", "three", "▁"]
    words += ["<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>", "<0x0A>"]
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
    """Push ids until a stop string is found, then finish. Return all pieces."""
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stop is not None:
            break
    return [*pieces, detokenizer.finish()]


@given(st.text())
def test_pieces_contain_whole_characters(text: str) -> None:
    detokenizer = Detokenizer(BYTES, [], ())
    pieces = feed(detokenizer, list(text.encode()))
    assert "".join(pieces) == detokenizer.text == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
    assert detokenizer.split_at_text_end() == (len(text.encode()), "")


@given(st.lists(st.integers(0, 255), max_size=200))
def test_invalid_utf8_decodes_like_the_tokenizer(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES, [], ())
    assert "".join(feed(detokenizer, ids)) == detokenizer.text == BYTES.decode(ids)


@given(st.text(alphabet="ab<é🦜", max_size=30), st.lists(st.text("ab<é🦜", min_size=1), max_size=3))
@settings(max_examples=300)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, [], stops)
    pieces = feed(detokenizer, list(text.encode()))
    # The first position at which a stop string is complete, and the earliest one there.
    expected = text
    for end in range(len(text) + 1):
        found = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if found:
            expected = text[: min(found)]
            break
    assert "".join(pieces) == detokenizer.text == expected
    num_kept, leftover = detokenizer.split_at_text_end()
    assert BYTES.decode(list(text.encode())[:num_kept]) + leftover == expected
    assert leftover == ""


def test_stop_string_inside_a_token_leaves_a_leftover() -> None:
    tokenizer = word_tokenizer()
    detokenizer = Detokenizer(tokenizer, [1], ("re",))
    assert feed(detokenizer, [2, 3]) == [" two", "th", ""]
    assert detokenizer.split_at_text_end() == (1, "th")


def test_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = word_tokenizer()
    assert feed(Detokenizer(tokenizer, [1], ()), [2]) == [" two", ""]
    assert feed(Detokenizer(tokenizer, [], ()), [2]) == ["two", ""]


def test_byte_tokens_wait_for_the_whole_character() -> None:
    tokenizer = word_tokenizer()
    pieces = feed(Detokenizer(tokenizer, [1], ()), [2, 5, 6, 7, 8, 3])
    assert pieces == [" two", "", "", "", "🦜", "three", ""]


@pytest.mark.parametrize("num_after", range(5))
def test_prompt_is_not_cut_within_a_character(num_after: int) -> None:
    parrot = [5, 6, 7, 8]
    tail = [*parrot, *[9] * num_after][-NUM_CONTEXT:]
    assert "".join(feed(Detokenizer(word_tokenizer(), tail, ()), [*parrot, 3])) == "🦜three"


def test_incomplete_character_at_the_end_spares_the_one_before_it() -> None:
    pieces = feed(Detokenizer(word_tokenizer(), [1], ()), [5, 6, 7, 8, 5, 6])
    assert pieces == ["", "", "", "🦜", "", "", "\ufffd\ufffd"]


@pytest.mark.parametrize("num_invalid", [1, 2, 3, 4, 5, 70])
def test_invalid_bytes_after_a_character_are_replaced_once(num_invalid: int) -> None:
    ids = [5, 6, 7, 8, *[6] * num_invalid, 3, 4]
    text = "".join(feed(Detokenizer(word_tokenizer(), [1], ()), ids))
    rest = word_tokenizer().decode(ids[4:])
    assert text == "🦜" + rest
    assert rest.startswith("\ufffd" * num_invalid + "three")


@given(st.lists(st.integers(1, 9), max_size=100))
def test_every_invalid_byte_is_replaced_once(ids: list[int]) -> None:
    tokenizer = word_tokenizer()
    text = "".join(feed(Detokenizer(tokenizer, [1], ()), ids))
    whole = tokenizer.decode([1, *ids])

    def num_bytes(text: str) -> int:
        return sum(1 if char == "\ufffd" else len(char.encode()) for char in text)

    assert num_bytes(text) == num_bytes(whole) - num_bytes(tokenizer.decode([1]))


@pytest.mark.parametrize("can_stop", [False, True])
def test_stop_string_is_found_before_an_incomplete_character(can_stop: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, ".â": 1}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(tokenizer, [0], (".",))
    assert [detokenizer.push(i, can_stop=can_stop) for i in (0, 1)] == ["a", ""]
    assert detokenizer.finish() == ("" if can_stop else ".\ufffd")
    assert detokenizer.stop == ("." if can_stop else None)


def test_special_tokens_have_no_text() -> None:
    ids = [65, SPECIAL_IDS[TURN_END], 66]
    assert feed(Detokenizer(BYTES, [], ()), ids) == ["A", "", "B", ""]


@pytest.mark.parametrize("num_special", [1, 3])
def test_word_after_special_tokens_keeps_its_space(num_special: int) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens(["<tool>"])
    special = [tokenizer.get_vocab()["<tool>"]] * num_special
    assert feed(Detokenizer(tokenizer, [1], ()), [*special, 2])[num_special:] == [" two", ""]


def test_stop_string_is_ignored_while_it_may_not_stop() -> None:
    detokenizer = Detokenizer(BYTES, [], ("ab",))
    assert [detokenizer.push(i, can_stop=False) for i in b"aba"] == ["a", "b", "a"]
    assert detokenizer.push(ord("b")) == "b"
    assert detokenizer.stop is None
    assert [detokenizer.push(i) for i in b"ab"] == ["", ""]
    assert detokenizer.text == "abab"
    assert detokenizer.stop == "ab"


@pytest.mark.parametrize("held", ["<", "<E", "<EN"])
def test_finish_returns_withheld_text(held: str) -> None:
    detokenizer = Detokenizer(BYTES, [], ("<END>",))
    pieces = feed(detokenizer, list(f"x{held}".encode()))
    assert pieces[0] == "x"
    assert pieces[-1] == held


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=4))
def test_texts_that_share_lengths_are_independent(texts: list[list[int]]) -> None:
    tokenizer, lengths = word_tokenizer(), dict[int, int]()
    for ids in texts:
        shared = Detokenizer(tokenizer, [1], (), lengths)
        assert feed(shared, ids) == feed(Detokenizer(tokenizer, [1], ()), ids)
