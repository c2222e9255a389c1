"""The tokenizer, compared with Hugging Face's own encoding on tokenizers trained by the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from conure.engine.text.byte_tokenizer import EOS_IDS, SPECIAL_TOKENS, tokenizer_json
from conure.server.program.errors import PromptError
from conure.server.prompts import tokenizer as tokenizer_module
from conure.server.prompts.tokenizer import (
    LONG_TEXT_CHARS,
    PromptPiece,
    Tokenizer,
    TooManyTokensError,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "User: what is a map-reduce?\nAssistant: first map, then reduce; <b>both</b> in order.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 你好, 世界!",
    "im_start im_end user assistant system </s> <s> [INST] the end of the text",
] * 4
MARKERS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]"]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level(*, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    add_markers(tokenizer)
    return tokenizer


def add_markers(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    # Control tokens without a flag, then two tokens that are only text.
    tokenizer.add_tokens([AddedToken("[INST]", normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("    ")])


def metaspace_bpe(scheme: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Training registers the bytes as special tokens; a SentencePiece model does not.
    layout = json.loads(tokenizer.to_str())
    layout["added_tokens"] = [t for t in layout["added_tokens"] if "<0x" not in t["content"]]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(layout))
    add_markers(tokenizer)
    return tokenizer


def prepend_bpe() -> tokenizers.Tokenizer:
    tokenizer = metaspace_bpe("never")
    layout = json.loads(tokenizer.to_str())
    layout["pre_tokenizer"] = None
    layout["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    return tokenizers.Tokenizer.from_str(json.dumps(layout))


def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    add_markers(tokenizer)
    return tokenizer


def lower_case() -> tokenizers.Tokenizer:
    """Return a tokenizer whose control tokens are found in normalized text and absorb blanks."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    tokenizer.add_special_tokens([AddedToken("<|sep|>", normalized=True)])
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level with prefix space": lambda: byte_level(add_prefix_space=True),
    "metaspace first": lambda: metaspace_bpe("first"),
    "metaspace always": lambda: metaspace_bpe("always"),
    "metaspace never": lambda: metaspace_bpe("never"),
    "prepend": prepend_bpe,
    "unigram": unigram,
    "lower case": lower_case,
    "bytes": lambda: tokenizers.Tokenizer.from_str(tokenizer_json()),
}


@cache
def pair(kind: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    theirs = KINDS[kind]()
    text = theirs.to_str()
    names = SPECIAL_TOKENS if kind == "bytes" else SPECIALS
    ours = Tokenizer(text, bos_id=theirs.token_to_id("<s>"), special_tokens=names)
    return tokenizers.Tokenizer.from_str(text), ours


def control_ids(theirs: tokenizers.Tokenizer) -> set[int]:
    plain = {"<think>", "    ", "<unk>"}
    added = theirs.get_added_tokens_decoder()
    return {token_id for token_id, token in added.items() if token.content not in plain}


def special(text: str) -> PromptPiece:
    return PromptPiece(text, special=True)


def plain(text: str) -> PromptPiece:
    return PromptPiece(text, special=False)


kinds = pytest.mark.parametrize("kind", KINDS)
words = st.sampled_from(
    ["the ", " dog", "\n", "  ", "     ", "é", "e\u0301", "你好", "<think>", "<b>", "<", "|>",
     "im_end", "<|im_", "end|>", "\U0001f642", "User:", "\x00", "\u2581", "1234"]
)  # fmt: skip
plain_texts = st.lists(words | st.text(max_size=4), max_size=8).map("".join)
wild_texts = st.lists(
    words | st.sampled_from([*MARKERS, "<|user|>", "<|SEP|>"]) | st.text(max_size=3), max_size=8
).map("".join)
frames = st.lists(words | st.sampled_from([*MARKERS, "<|user|>"]), max_size=5).map("".join)


@kinds
@given(pieces=st.lists(st.builds(PromptPiece, frames, st.just(True)) | st.builds(plain, words)))
def test_ids_match_hugging_face_without_spelled_tokens(
    kind: str, pieces: list[PromptPiece]
) -> None:
    theirs, ours = pair(kind)
    text = "".join(piece.text for piece in pieces)
    # Two halves may form a token across a boundary; such cases are skipped.
    expected = theirs.encode(text, add_special_tokens=False).ids
    num_allowed = sum(num_controls(theirs, piece.text) for piece in joined(pieces) if piece.special)
    if num_controls(theirs, text) == num_allowed:
        assert ours.encode(pieces, bos=False).ids == expected


def joined(pieces: list[PromptPiece]) -> list[PromptPiece]:
    result: list[PromptPiece] = []
    for piece in pieces:
        if result and (result[-1].special == piece.special or not piece.text):
            result[-1] = PromptPiece(result[-1].text + piece.text, result[-1].special)
        else:
            result.append(piece)
    return result


def num_controls(theirs: tokenizers.Tokenizer, text: str) -> int:
    controls = control_ids(theirs)
    return sum(1 for each in theirs.encode(text, add_special_tokens=False).ids if each in controls)


@kinds
@given(text=plain_texts)
def test_text_encodes_like_hugging_face(kind: str, text: str) -> None:
    theirs, ours = pair(kind)
    expected = theirs.encode(text, add_special_tokens=False).ids
    if control_ids(theirs).isdisjoint(expected):
        assert ours.encode_text(text) == expected


@kinds
@given(text=wild_texts)
def test_plain_text_yields_no_control_token(kind: str, text: str) -> None:
    theirs, ours = pair(kind)
    assert control_ids(theirs).isdisjoint(ours.encode_text(text))


@kinds
@given(pieces=st.lists(st.builds(PromptPiece, wild_texts, st.booleans()), max_size=6))
def test_control_tokens_only_in_special_pieces(kind: str, pieces: list[PromptPiece]) -> None:
    theirs, ours = pair(kind)
    controls = control_ids(theirs)
    allowed = [
        token_id
        for piece in joined(pieces)
        if piece.special
        for token_id in theirs.encode(piece.text, add_special_tokens=False).ids
        if token_id in controls
    ]
    found = [each for each in ours.encode(pieces, bos=False).ids if each in controls]
    assert found == allowed


@kinds
@given(pieces=st.lists(st.builds(PromptPiece, wild_texts, st.booleans()), max_size=6))
def test_ends_never_decrease_and_cover_the_text(kind: str, pieces: list[PromptPiece]) -> None:
    _, ours = pair(kind)
    text = "".join(piece.text for piece in pieces)
    encoded = ours.encode(pieces, bos=False)
    assert len(encoded.ends) == len(encoded.ids)
    assert encoded.ends == sorted(encoded.ends)
    assert all(0 <= end <= len(text) for end in encoded.ends)
    assert encoded.tokens_before(len(text)) == len(encoded.ids)
    assert encoded.tokens_before(0) == 0 or not text


@kinds
@given(text=wild_texts)
def test_bound_holds_for_any_text(kind: str, text: str) -> None:
    theirs, ours = pair(kind)
    bound = ours.max_tokens(text)
    if bound is not None:
        assert len(theirs.encode(text, add_special_tokens=False).ids) <= bound
        assert len(ours.encode_text(text)) <= bound


@cache
def without_inst(kind: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """Return the same tokenizer with [INST] as a word, and its ids in terms of the original."""
    theirs, _ = pair(kind)
    layout = json.loads(theirs.to_str())
    layout["added_tokens"] = [t for t in layout["added_tokens"] if t["content"] != "[INST]"]
    oracle = tokenizers.Tokenizer.from_str(json.dumps(layout))
    added = {t["content"]: t["id"] for t in layout["added_tokens"]}
    vocab = oracle.get_vocab()
    return oracle, {vocab[text]: token_id for text, token_id in added.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes"])
@given(
    pieces=st.lists(
        st.builds(special, st.lists(words | st.sampled_from(["<s>", "<|user|>"])).map("".join))
        | st.builds(plain, st.lists(words | st.just("[INST]"), max_size=5).map("".join)),
        max_size=6,
    )
)
def test_spelled_token_encodes_as_plain_text(kind: str, pieces: list[PromptPiece]) -> None:
    theirs, ours = pair(kind)
    oracle, ids = without_inst(kind)
    text = "".join(piece.text for piece in pieces)
    expected = [ids.get(each, each) for each in oracle.encode(text, add_special_tokens=False).ids]
    controls = control_ids(theirs)
    allowed = sum(num_controls(theirs, each.text) for each in joined(pieces) if each.special)
    if sum(1 for each in expected if each in controls) == allowed:
        assert ours.encode(pieces, bos=False).ids == expected


def test_marker_across_pieces_is_not_a_token() -> None:
    theirs, ours = pair("byte-level")
    marker = theirs.token_to_id("<|im_end|>")
    assert marker not in ours.encode([plain("<|im_"), special("end|>")], bos=False).ids
    assert marker not in ours.encode([special("<|im_"), plain("end|>")], bos=False).ids
    assert ours.encode([special("<|im_"), special("end|>")], bos=False).ids == [marker]
    assert ours.encode([special("<|im_"), plain(""), special("end|>")], bos=False).ids == [marker]


def test_overlapping_marker_does_not_absorb_allowed_one() -> None:
    theirs, ours = pair("byte-level")
    ids = ours.encode([plain("</s"), special("><s>")], bos=False).ids
    assert ids[-1] == theirs.token_to_id("<s>")
    assert theirs.token_to_id("</s>") not in ids


def test_unflagged_markers_are_control_tokens_but_tags_are_not() -> None:
    theirs, ours = pair("byte-level")
    assert theirs.token_to_id("[INST]") not in ours.encode_text("[INST]")
    assert theirs.token_to_id("<think>") in ours.encode_text("<think>")
    assert theirs.token_to_id("    ") in ours.encode_text("a    b")
    assert ours.spells_special("say [INST]")
    assert not ours.spells_special("say <think>")


def test_unknown_text_is_not_a_control_token() -> None:
    theirs, ours = pair("unigram")
    unknown = theirs.token_to_id("<unk>")
    assert unknown in ours.encode_text("\U0001f642")
    assert unknown in ours.encode([special("<s>"), plain("\U0001f642 </s>")], bos=False).ids
    assert ours.spells_special("<unk>")
    assert not ours.spells_special("\U0001f642")


def test_blanks_absorbed_by_marker_may_be_untrusted() -> None:
    theirs, ours = pair("lower case")
    pieces = [plain("dog  "), special("<|user|>"), plain("  dog")]
    expected = theirs.encode("dog  <|user|>  dog", add_special_tokens=False).ids
    assert ours.encode(pieces, bos=False).ids == expected
    spelled = ours.encode([plain("</s>  "), special("<|user|>"), plain("  dog")], bos=False)
    assert spelled.ids[-3:] == expected[-3:]
    assert 16 in spelled.ends


def test_bos_is_prepended_once() -> None:
    theirs, ours = pair("byte-level")
    bos = theirs.get_vocab()["<s>"]
    with_bos = ours.encode([plain("dog")], bos=True)
    assert with_bos.ids == [bos, *ours.encode_text("dog")]
    assert with_bos.tokens_before(0) == 1
    assert ours.encode([special("<s>dog")], bos=True).ids.count(bos) == 1
    assert ours.encode([plain("<s>dog")], bos=True).ids.count(bos) == 1
    assert ours.encode([plain("<s>dog")], bos=True).ids[0] == bos
    assert ours.encode([], bos=True).ids == [bos]


def test_model_without_bos_gets_none() -> None:
    _, ours = pair("bytes")
    assert ours.encode([plain("A")], bos=True).ids == [65]


def test_tokens_before_counts_whole_tokens_only() -> None:
    _, ours = pair("bytes")
    encoded = ours.encode([plain("aäb"), special("<|im_end|>")], bos=False)
    assert encoded.ids == [97, 0xC3, 0xA4, 98, EOS_IDS[0]]
    assert [encoded.tokens_before(offset) for offset in range(5)] == [0, 1, 3, 4, 4]
    assert encoded.tokens_before(13) == 5


def test_offsets_refer_to_text_with_spelled_marker() -> None:
    _, ours = pair("bytes")
    encoded = ours.encode(
        [special("<|im_end|>"), plain("<|im_end|>"), special("<|im_end|>a")], bos=False
    )
    assert encoded.ids == [EOS_IDS[0], *b"<|im_end|>", EOS_IDS[0], 97]
    assert encoded.ends == [10, *range(11, 21), 30, 31]


def test_trailing_blanks_belong_to_their_token() -> None:
    # The tokenizer's own post-processor would exclude them from the offsets.
    theirs, ours = pair("byte-level")
    assert theirs.encode("a    b").offsets[1] != (1, 5)
    assert ours.encode([plain("a    b")], bos=False).ends == [1, 5, 6]


def test_decode_omits_special_tokens() -> None:
    _, ours = pair("bytes")
    assert ours.decode([*"ä!".encode(), EOS_IDS[0]]) == "ä!"


def test_half_a_surrogate_pair_is_rejected() -> None:
    _, ours = pair("bytes")
    with pytest.raises(PromptError) as refused:
        ours.encode_text("a\ud800")
    assert refused.value.code == "prompt.encoding"


@pytest.mark.parametrize("kind", KINDS)
def test_long_text_encodes_like_hugging_face(kind: str) -> None:
    theirs, ours = pair(kind)
    text = "The quick brown fox, 你好 <b>dog</b>.\n" * 300
    assert len(text) > LONG_TEXT_CHARS
    expected = theirs.encode(text, add_special_tokens=False)
    encoded = ours.encode([plain(text)], bos=False)
    assert encoded.ids == expected.ids
    assert encoded.ends[-1] == len(text)
    with pytest.raises(PromptError, match="surrogate"):
        ours.encode_text(text + "\ud800")


@pytest.mark.parametrize("num_chars", [11, 39, 41, 1_000, 10_000])
def test_text_with_too_many_tokens_is_refused(num_chars: int) -> None:
    _, ours = pair("bytes")
    with pytest.raises(TooManyTokensError, match="more than 10 tokens"):
        ours.encode([plain("a" * num_chars)], bos=False, max_tokens=10)
    assert len(ours.encode([plain("a" * 10)], bos=False, max_tokens=10).ids) == 10


def test_of_a_long_text_only_beginnings_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair("bytes")
    lengths = []

    def encode(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        lengths.append(len(text))
        return tokenizer.encode(text, add_special_tokens=False)

    monkeypatch.setattr(tokenizer_module, "_encode", encode)
    with pytest.raises(TooManyTokensError):
        ours.encode([plain("a" * 1_000_000)], bos=False, max_tokens=100)
    assert lengths == [400]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "Nonsense"}}'])
def test_invalid_tokenizer_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Tokenizer(text, bos_id=None, special_tokens={})


def test_truncation_and_padding_settings_are_ignored() -> None:
    layout: dict[str, Any] = json.loads(tokenizer_json())
    layout["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    ours = Tokenizer(json.dumps(layout), bos_id=None, special_tokens={})
    assert ours.encode_text("abcd") == [97, 98, 99, 100]
    assert ours.encode_text("<|im_end|>") == list(b"<|im_end|>")


def test_threads_get_the_same_ids() -> None:
    theirs, _ = pair("metaspace first")
    ours = Tokenizer(theirs.to_str(), bos_id=None, special_tokens=SPECIALS)
    rows = [[special("<s>"), plain(f"the </s> dog {n % 5}")] for n in range(200)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda pieces: ours.encode(pieces, bos=False).ids, rows))
    assert found == [ours.encode(pieces, bos=False).ids for pieces in rows]


@kinds
@pytest.mark.parametrize("tail", ["dog", " dog", "im_end of the text", "  the", "\nAssistant: a"])
def test_continued_text_has_no_prefix_space(kind: str, tail: str) -> None:
    _, ours = pair(kind)
    before = ours.encode_text("the")
    continued = ours.encode([plain(tail)], bos=False, continues=True)
    read = ours.decode(before + continued.ids).removeprefix(ours.decode(before))
    assert read == (tail.lower() if kind == "lower case" else tail)
    assert continued.ends[-1] == len(tail)


@kinds
@pytest.mark.parametrize("before", ["", "dog"])
def test_text_after_control_token_encodes_unchanged(kind: str, before: str) -> None:
    theirs, ours = pair(kind)
    end = theirs.token_to_id("<|im_end|>")
    assert end is not None
    pieces = [plain(before), special("<|im_end|>the"), plain("<|im_end|> dog")]
    whole = ours.encode(pieces, bos=False)
    continued = ours.encode(pieces, bos=False, continues=True)
    behind = whole.ids[whole.ids.index(end) :]
    assert continued.ids[-len(behind) :] == behind
    assert continued.ids.count(end) == whole.ids.count(end) == 1
    assert continued.ends[-1] == whole.ends[-1]


@kinds
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    theirs, ours = pair(kind)
    ids = ours.encode_text("The dog, 你好 ä 🦜 <b>both</b> x")
    joined = b"".join(ours.token_bytes(token_id) for token_id in ids)
    assert joined.decode().strip() == theirs.decode(ids, skip_special_tokens=False).strip()
    assert ours.num_tokens == theirs.get_vocab_size()
    end = theirs.token_to_id("<|im_end|>")
    assert end is not None
    assert ours.token_bytes(end) == b"<|im_end|>"
