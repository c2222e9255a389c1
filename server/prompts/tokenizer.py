"""A model's tokenizer, with protection against text that spells control tokens.

A prompt is a sequence of pieces. The pieces are joined and tokenised as one text, exactly as
Hugging Face's tokenizers do. This module only decides where control tokens may occur: in `special`
pieces, and never in other pieces or across their boundaries. Control tokens are the added tokens
that steer a model: all flagged special, all that the model's configuration names (BOS, EOS, ...),
and all others that are neither blanks nor a plain tag. (DeepSeek's `<|User|>` has no flag and still
opens a turn, whereas `<think>` is text that models write and clients send back.)

There are two ways with one result. Usually the joined text is encoded, and the origin of each
control id is checked. If one is in a plain piece, the text is encoded again by a second tokenizer,
in which control tokens are spelled by unguessable stand-ins, and only permitted occurrences are
replaced by these. Normalizers, prefix spaces and stripping then see tokens in the same places as
before, and `<|im_end|>` in a value is ten ordinary characters. (Encoding the text between tokens
separately would be simpler, but wrong if a prefix space is added only at the start of a text.)

Out of scope: programs, templates and models.

Invariant: the same pieces give the same ids, in every thread.
"""

from __future__ import annotations

import re
import secrets
import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec
import tokenizers

from ..program.errors import PromptError
from .token_bound import TokenExpansionBound, find_expansion_bound

_PLAIN_TOKEN = re.compile(r"[\s\u2581]+|</?\w+>")
"""Added tokens that are text: blanks (also SentencePiece's) and tags such as `<think>`."""


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte in vocabularies that spell rare characters as bytes."""
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {
    chr(byte if byte in _PRINTED else 0x100 + byte - sum(other < byte for other in _PRINTED)): byte
    for byte in range(256)
}
"""GPT-2's table: the character that represents each byte in byte-level vocabularies."""


class PromptPiece(NamedTuple):
    """A part of a prompt's text."""

    text: str
    special: bool
    """Whether the program or the template wrote the text, so that it may yield control tokens."""


LONG_TEXT_CHARS: Final = 8_192
"""Characters from which a text is encoded by the method for several texts. Only that method lets
other threads run: `encode` took 0.3 s from them for 300,000 characters."""
CHARS_PER_TOKEN: Final = 4
"""A text with at most this many characters per allowed token is encoded whole; of a longer one,
ever longer beginnings are encoded first."""


class TooManyTokensError(Exception):
    """A text has more tokens than may be encoded."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(f"more than {max_tokens} tokens")
        self.max_tokens = max_tokens


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text, and the position in the text where each token ends."""

    ids: list[int]
    ends: list[int]
    """Number of characters of the text up to the end of each token; never decreases. 0 for a
    BOS."""

    def tokens_before(self, offset: int) -> int:
        """Return how many leading tokens end at or before a character offset of the text.

        A BOS that was prepended counts as before every offset.
        """
        return bisect_right(self.ends, offset)


class _TokenSpan(NamedTuple):
    start: int
    end: int


class _ControlToken(NamedTuple):
    """An occurrence of a control token in a text."""

    id: int
    span: _TokenSpan


class Tokenizer:
    """A model's tokenizer.json, safe to use from any number of threads."""

    def __init__(
        self, tokenizer_json: str, *, bos_id: int | None, special_tokens: Mapping[str, str]
    ) -> None:
        """Load a tokenizer.

        Args:
            tokenizer_json: content of a tokenizer.json.
            bos_id: id that starts a prompt, or None if the model does not use one.
            special_tokens: text of tokens by the names that templates use (`eos_token`, ...).

        Raises:
            ValueError: if the content is not a tokenizer.
        """
        layout = _read_layout(tokenizer_json)
        self._json = tokenizer_json
        self._bos_id = bos_id
        self._tokenizer = _load(tokenizer_json)
        named = set(special_tokens.values())
        self._controls = {
            token_id: token
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
            or token_id == bos_id
            or token.content in named
            or not _PLAIN_TOKEN.fullmatch(token.content)
        }
        self._unknown_id = _unknown_id(layout, self._tokenizer)
        self._expansion_bound: TokenExpansionBound | None = find_expansion_bound(layout)
        self._literal_tokenizers: dict[bool, _LiteralTokenizer] = {}
        self._literal_lock = threading.Lock()
        self._has_prefix = _drop_prefix(layout)
        self._added = frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(
        self,
        pieces: Sequence[PromptPiece],
        *,
        bos: bool,
        continues: bool = False,
        max_tokens: int | None = None,
    ) -> EncodedText:
        """Encode pieces as one text.

        Args:
            pieces: joined in order; empty ones have no effect.
            bos: whether to prepend the model's BOS, unless the ids start with it or the model has
                none.
            continues: whether the text follows other tokens, so that the tokenizer's prefix space
                is omitted.
            max_tokens: bounds time and memory, which a text of any length would take; None for no
                bound.

        Raises:
            TooManyTokensError: if the text has more than `max_tokens`.
            PromptError: `prompt.encoding` if the text contains half a surrogate pair;
                `prompt.special_text` if the tokenizer turns plain text into a control token in a
                way that cannot be prevented.
        """
        text = "".join([piece.text for piece in pieces])
        if max_tokens is None:
            encoding = _encode(self._tokenizer, text)
        else:
            encoding = self._encode_at_most(text, max_tokens)
        # Lists of ids and offsets are made while no other thread runs: 0.4 µs per token.
        ids, spans = encoding.ids, encoding.offsets
        if not self._controls.keys().isdisjoint(ids):
            trusted = _trusted_spans(pieces)
            if not _lie_in(self._find_controls(text, ids, spans), trusted):
                ids, spans = self._encode_literally(text, trusted)
        if continues and self._has_prefix:
            ids, spans = self._continue(text, ids, spans)
        length = len(text)
        # A token of no width was inserted before the next character and belongs to it.
        ends = [end if end > start else min(start + 1, length) for start, end in spans]
        ends = list(accumulate(ends, max))
        if bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids, ends = [self._bos_id, *ids], [0, *ends]
        return EncodedText(ids, ends)

    def _encode_at_most(self, text: str, max_tokens: int) -> tokenizers.Encoding:
        """Encode a text, of a long one growing beginnings first.

        Raises:
            TooManyTokensError: if the text or a beginning has more than `max_tokens`.
        """
        size = CHARS_PER_TOKEN * max_tokens
        while True:
            encoding = _encode(self._tokenizer, text[:size])
            if len(encoding) > max_tokens:
                raise TooManyTokensError(max_tokens)
            if size >= len(text):
                return encoding
            size *= 2

    def encode_text(self, text: str, *, continues: bool = False) -> list[int]:
        """Encode text that never yields control tokens, without a BOS.

        Raises:
            PromptError: as `encode`.
        """
        return self.encode((PromptPiece(text, special=False),), bos=False, continues=continues).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without tokens flagged special."""
        return self._tokenizer.decode(ids)

    @property
    def num_tokens(self) -> int:
        """Return the size of the vocabulary, including added tokens."""
        return self._tokenizer.get_vocab_size()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token, which may be part of a character."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        token = self._tokenizer.id_to_token(token_id) or ""
        if "\u2581" in token:
            # SentencePiece's blank, which decoding strips at the start and end of a text.
            return token.replace("\u2581", " ").encode()
        if "\ufffd" not in text:
            return text.encode()
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        if all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return text.encode()

    def max_tokens(self, text: str) -> int | None:
        """Return an upper bound of the number of tokens of a text, without a BOS.

        The text is not tokenised. None if no bound could be proven for this tokenizer.
        """
        return None if self._expansion_bound is None else self._expansion_bound.max_tokens(text)

    def is_visible(self, text: str) -> bool:
        """Return whether no token of this text is special, so that it survives decoding."""
        added = self._tokenizer.get_added_tokens_decoder()
        ids = _encode(self._tokenizer, text).ids
        return not any(token_id in added and added[token_id].special for token_id in ids)

    def spells_special(self, text: str) -> bool:
        """Return whether the text would yield a control token if it were special."""
        encoding = _encode(self._tokenizer, text)
        if self._controls.keys().isdisjoint(encoding.ids):
            return False
        return bool(self._find_controls(text, encoding.ids, encoding.offsets))

    def _find_controls(
        self, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> list[_ControlToken]:
        """Return the control tokens among ids, each with the span of its own spelling.

        Blanks that a token absorbed do not belong to the span. The id for unknown text counts only
        if its name is spelled out.
        """
        found = []
        controls = self._controls
        for index in [i for i, token_id in enumerate(ids) if token_id in controls]:
            token_id, (start, end) = ids[index], spans[index]
            content = controls[token_id].content
            at = text.find(content, start, end)
            if at >= 0:
                found.append(_ControlToken(token_id, _TokenSpan(at, at + len(content))))
            elif token_id != self._unknown_id:
                found.append(_ControlToken(token_id, _without_blanks(text, start, end)))
        return found

    def _encode_literally(
        self, text: str, trusted: Sequence[_TokenSpan]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text whose control tokens may be in the trusted spans only.

        Raises:
            PromptError: `prompt.special_text` as in `encode`.
        """
        allowed = []
        for span in trusted:
            span_text = text[span.start : span.end]
            encoding = _encode(self._tokenizer, span_text)
            for token_id, at in self._find_controls(span_text, encoding.ids, encoding.offsets):
                moved = _TokenSpan(span.start + at.start, span.start + at.end)
                allowed.append(_ControlToken(token_id, moved))
        literal = self._load_literal()
        ids, spans = literal.encode(text, allowed)
        if self._find_controls(text, ids, spans) != allowed:
            raise PromptError(
                "prompt.special_text",
                "The prompt contains text that this model's tokenizer turns into a control token"
                " in any position; remove the token's spelling from the values.",
            )
        return ids, spans

    def _continue(
        self, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text that follows other tokens, given its tokens when encoded
        alone.

        They differ only before the first added token, because later text follows a token anyway.
        """
        first = next((i for i, token_id in enumerate(ids) if token_id in self._added), len(ids))
        end = spans[first][0] if first < len(ids) else len(text)
        if not end:
            return list(ids[first:]), list(spans[first:])
        head_ids, head_spans = self._load_literal(continues=True).encode(text[:end], ())
        return [*head_ids, *ids[first:]], [*head_spans, *spans[first:]]

    def _load_literal(self, *, continues: bool = False) -> _LiteralTokenizer:
        """Return the second tokenizer, loaded on first use because few servers need it."""
        with self._literal_lock:
            if continues not in self._literal_tokenizers:
                controls = self._controls.keys()
                self._literal_tokenizers[continues] = _LiteralTokenizer(
                    self._json, controls, continues=continues
                )
            return self._literal_tokenizers[continues]


class _LiteralTokenizer:
    """The same tokenizer with control tokens spelled by stand-ins."""

    def __init__(
        self, tokenizer_json: str, control_ids: Collection[int], *, continues: bool = False
    ) -> None:
        layout = _read_layout(tokenizer_json)
        if continues:
            _drop_prefix(layout)
        # Unguessable, and made of characters that normalizers keep.
        nonce = secrets.token_hex(12)
        self._stand_ins = {token_id: f"<{nonce}.{token_id}>" for token_id in control_ids}
        real_ids: dict[str, int] = {}
        for token in layout["added_tokens"]:
            stand_in = self._stand_ins.get(token["id"])
            if stand_in is not None:
                token["content"] = stand_in
            real_ids[token["content"]] = token["id"]
        if layout["model"].get("type") == "Unigram":
            # A Unigram model finds control tokens of its vocabulary in plain text: rename them too.
            vocab = layout["model"]["vocab"]
            for token_id, stand_in in self._stand_ins.items():
                if token_id < len(vocab):
                    vocab[token_id][0] = stand_in
        self._tokenizer = _load(msgspec.json.encode(layout).decode())
        # Tokens of the model's vocabulary that were renamed are appended to it
        # under the new name, so added tokens have other ids in this tokenizer.
        self._real_ids = {
            self._tokenizer.token_to_id(content): real for content, real in real_ids.items()
        }

    def encode(
        self, text: str, allowed: Sequence[_ControlToken]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text in which only the given occurrences, in order, are control tokens.

        Returns:
            Ids and spans in terms of the original tokenizer and the given text.
        """
        parts, at, literal_at = [], 0, 0
        starts, literal_starts = [0], [0]
        for token_id, span in allowed:
            stand_in = self._stand_ins[token_id]
            parts += [text[at : span.start], stand_in]
            token_start = literal_at + span.start - at
            at, literal_at = span.end, token_start + len(stand_in)
            starts += [span.start, at]
            literal_starts += [token_start, literal_at]
        parts.append(text[at:])
        encoding = _encode(self._tokenizer, "".join(parts))

        def real_offset(offset: int) -> int:
            # Tokens begin and end at the boundaries of stand-ins or between them, never inside.
            index = bisect_right(literal_starts, offset) - 1
            return starts[index] + offset - literal_starts[index]

        ids = [self._real_ids.get(token_id, token_id) for token_id in encoding.ids]
        return ids, [(real_offset(start), real_offset(end)) for start, end in encoding.offsets]


def _read_layout(tokenizer_json: str) -> dict[str, Any]:
    """Return tokenizer.json as data, with `added_tokens` as a list.

    Raises:
        ValueError: if the content is not a tokenizer.
    """
    layout: object = msgspec.json.decode(tokenizer_json)
    if not isinstance(layout, dict) or not isinstance(layout.get("model"), dict):
        raise ValueError("the tokenizer.json of the model is not a tokenizer")
    layout["added_tokens"] = layout.get("added_tokens") or []
    return layout


def _drop_prefix(layout: dict[str, Any]) -> bool:
    """Remove the steps that add a prefix space; return whether there were any."""
    found = False
    for name, parts in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        stage = layout.get(name)
        if not stage:
            continue
        steps = stage[parts] if stage["type"] == "Sequence" else [stage]
        remaining = [step for step in steps if step["type"] != "Prepend"]
        found |= len(remaining) < len(steps)
        for step in remaining:
            if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                found |= step.pop("add_prefix_space", True)
                step["prepend_scheme"] = "never"
            elif step["type"] == "ByteLevel" and step.get("add_prefix_space", True):
                step["add_prefix_space"] = False
                found = True
        layout[name] = {"type": "Sequence", parts: remaining} if remaining else None
    return found


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Return a tokenizer without truncation, padding and post-processing, so that offsets are
    exact.

    Raises:
        ValueError: if the content is not a tokenizer.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # The library raises plain Exceptions only.
        raise ValueError(f"the tokenizer.json of the model does not load: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Without special tokens, a post-processor would still trim offsets.
    tokenizer.post_processor = None
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        if len(text) > LONG_TEXT_CHARS:
            return tokenizer.encode_batch([text], add_special_tokens=False)[0]
        return tokenizer.encode(text, add_special_tokens=False)
    except TypeError as error:
        raise PromptError(
            "prompt.encoding",
            "The prompt contains half a surrogate pair, which is not a character; remove it.",
        ) from error


def _unknown_id(layout: Mapping[str, Any], tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the id of unknown text, or None if the model has none."""
    model = layout["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    unknown = model.get("unk_token")
    return None if unknown is None else tokenizer.token_to_id(unknown)


def _trusted_spans(pieces: Sequence[PromptPiece]) -> list[_TokenSpan]:
    """Return the spans of the joined text that are special, with neighbours merged."""
    spans: list[_TokenSpan] = []
    at = 0
    for text, special in pieces:
        end = at + len(text)
        if special and text:
            if spans and spans[-1].end == at:
                spans[-1] = _TokenSpan(spans[-1].start, end)
            else:
                spans.append(_TokenSpan(at, end))
        at = end
    return spans


def _lie_in(controls: Sequence[_ControlToken], trusted: Sequence[_TokenSpan]) -> bool:
    """Return whether each control token is inside of a trusted span."""
    starts = [span.start for span in trusted]
    for _, (start, end) in controls:
        index = bisect_right(starts, start) - 1
        if index < 0 or end > trusted[index].end:
            return False
    return True


def _without_blanks(text: str, start: int, end: int) -> _TokenSpan:
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return _TokenSpan(start, max(start, start + len(part.strip())))
