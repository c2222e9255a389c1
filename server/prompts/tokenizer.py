"""Text into token ids, so that text can never pose as a token of the program.

A prompt is a row of pieces. The pieces are joined and tokenised as one text, exactly as
Hugging Face's tokenizers do it; only *where a control token may come from* is decided here:
from pieces that are `special` and from nowhere else, across the border of two pieces
neither. Control tokens are the added tokens that steer a model and are not its text: all
that are flagged special, all that the model's configuration names (BOS, EOS, ...), and of
the others those that are neither blanks nor a plain tag. (DeepSeek's `<|User|>` carries no
flag and still opens a turn, while `<think>` is text that models write and clients send
back, and a run of blanks is only that.)

Two ways, one result. The usual one encodes the joined text and looks where the control ids
in it come from. If one comes from elsewhere, the text is encoded again by a second
tokenizer that differs in one thing: its control tokens are spelled by stand-ins that nobody
can guess, and only allowed occurrences are replaced by them. Normalizers, prefix spaces and
stripping thus see a token in the same places as before, and `<|im_end|>` in a value is ten
characters like any others. (Encoding the runs between the tokens one by one would be
simpler, and wrong where a prefix space is added at the start of a text only.)

Knows the `tokenizers` library. Refuses to know programs, templates and models. Kept true:
the same pieces give the same ids, in every thread.
"""

from __future__ import annotations

import re
import secrets
import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import tokenizers

from ..program.errors import PromptError
from .token_bound import Growth, growth

_PLAIN_TOKEN = re.compile(r"[\s\u2581]+|</?\w+>")
"""Added tokens that are text: blanks (also SentencePiece's), and tags like `<think>`."""


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte in vocabularies that spell the bytes of rare characters."""
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {
    chr(byte if byte in _PRINTED else 0x100 + byte - sum(other < byte for other in _PRINTED)): byte
    for byte in range(256)
}
"""GPT-2's table: the character that byte-level vocabularies write for each byte."""


class Piece(NamedTuple):
    """A stretch of a prompt."""

    text: str
    special: bool
    """True for text of the program or the template, which may yield control tokens."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text, and where in the text each of them ends."""

    ids: list[int]
    ends: list[int]
    """Characters of the text that the first tokens need; it never decreases. 0 for a BOS."""

    def tokens_before(self, offset: int) -> int:
        """Return how many leading tokens lie wholly before a character offset of the text.

        A BOS that was put in front lies before every offset.
        """
        return bisect_right(self.ends, offset)


class _Span(NamedTuple):
    start: int
    end: int


class _Control(NamedTuple):
    """A control token where it stands in a text."""

    id: int
    span: _Span


class Tokenizer:
    """A model's tokenizer.json, safe to call from any number of threads."""

    def __init__(
        self, tokenizer_json: str, *, bos_id: int | None, special_tokens: Mapping[str, str]
    ) -> None:
        """Load a tokenizer.

        Args:
            tokenizer_json: text of a tokenizer.json.
            bos_id: id that starts a prompt, or None where the model wants none.
            special_tokens: names that templates use (`eos_token`, ...) to their text.

        Raises:
            ValueError: if the text is no tokenizer.
        """
        layout = _read_layout(tokenizer_json)
        self._json = tokenizer_json
        self._bos_id = bos_id
        self._whole = _load(tokenizer_json)
        named = set(special_tokens.values())
        self._controls = {
            token_id: token
            for token_id, token in self._whole.get_added_tokens_decoder().items()
            if token.special
            or token_id == bos_id
            or token.content in named
            or not _PLAIN_TOKEN.fullmatch(token.content)
        }
        self._unknown_id = _unknown_id(layout, self._whole)
        self._growth: Growth | None = growth(layout)
        self._apart: dict[bool, _Apart] = {}
        self._apart_lock = threading.Lock()
        self._has_prefix = _drop_prefix(layout)
        self._added = frozenset(self._whole.get_added_tokens_decoder())

    def encode(self, pieces: Sequence[Piece], *, bos: bool, continues: bool = False) -> Encoded:
        """Encode pieces as one text.

        Args:
            pieces: joined in order; empty ones change nothing.
            bos: True puts the model's BOS in front, unless the ids start with it already
                or the model has none.
            continues: True if the text goes on behind other tokens, so that the blank that
                many tokenizers put before a text is not put before this one.

        Raises:
            PromptError: `prompt.encoding` if the text holds half a surrogate pair;
                `prompt.special_text` if this tokenizer makes a control token of plain text
                in a way that cannot be told apart.
        """
        text = "".join([piece.text for piece in pieces])
        encoding = _encode(self._whole, text)
        ids, spans = encoding.ids, encoding.offsets
        if not self._controls.keys().isdisjoint(ids):
            trusted = _trusted_spans(pieces)
            controls = self._find_controls(text, ids, spans)
            if not all(_lies_in(control.span, trusted) for control in controls):
                ids, spans = self._encode_apart(text, trusted)
        if continues and self._has_prefix:
            ids, spans = self._continue(text, ids, spans)
        length = len(text)
        # A token of no width was put before the next character and stands or falls with it.
        ends = [end if end > start else min(start + 1, length) for start, end in spans]
        ends = list(accumulate(ends, max))
        if bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids, ends = [self._bos_id, *ids], [0, *ends]
        return Encoded(ids, ends)

    def encode_text(self, text: str, *, continues: bool = False) -> list[int]:
        """Encode text that yields no control token, whatever it spells; no BOS.

        Raises:
            PromptError: as `encode` does.
        """
        return self.encode((Piece(text, special=False),), bos=False, continues=continues).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; tokens flagged special are left out."""
        return self._whole.decode(ids)

    @property
    def num_tokens(self) -> int:
        """Ids of the vocabulary, added tokens included."""
        return self._whole.get_vocab_size()

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token stands for by itself, half a character as it is."""
        text = self._whole.decode([token_id], skip_special_tokens=False)
        token = self._whole.id_to_token(token_id) or ""
        if "\u2581" in token:
            # A mark of a blank, which a text is stripped of where it begins or ends with it.
            return token.replace("\u2581", " ").encode()
        if "\ufffd" not in text:
            return text.encode()
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        if all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return text.encode()

    def max_tokens(self, text: str) -> int | None:
        """Return a bound that the number of tokens of a text cannot exceed, BOS not counted.

        It costs no tokenisation. None where no bound could be proven for this tokenizer.
        """
        return None if self._growth is None else self._growth.max_tokens(text)

    def is_shown(self, text: str) -> bool:
        """Return whether a model that writes this text is seen to: no token of it is special."""
        added = self._whole.get_added_tokens_decoder()
        ids = _encode(self._whole, text).ids
        return not any(token_id in added and added[token_id].special for token_id in ids)

    def spells_special(self, text: str) -> bool:
        """Return whether a text taken as a program's own would yield a control token."""
        encoding = _encode(self._whole, text)
        if self._controls.keys().isdisjoint(encoding.ids):
            return False
        return bool(self._find_controls(text, encoding.ids, encoding.offsets))

    def _find_controls(
        self, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> list[_Control]:
        """Return the control tokens among ids, each with the span of its own spelling.

        Blanks that a token swallowed belong to whoever wrote them, hence not to the span.
        The id for unknown text counts only where its name was spelled out.
        """
        found = []
        controls = self._controls
        for index in [i for i, token_id in enumerate(ids) if token_id in controls]:
            token_id, (start, end) = ids[index], spans[index]
            content = controls[token_id].content
            at = text.find(content, start, end)
            if at >= 0:
                found.append(_Control(token_id, _Span(at, at + len(content))))
            elif token_id != self._unknown_id:
                found.append(_Control(token_id, _without_blanks(text, start, end)))
        return found

    def _encode_apart(
        self, text: str, trusted: Sequence[_Span]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text whose control tokens may come from the trusted spans only.

        Raises:
            PromptError: `prompt.special_text` as in `encode`.
        """
        allowed = []
        for span in trusted:
            stretch = text[span.start : span.end]
            encoding = _encode(self._whole, stretch)
            for token_id, at in self._find_controls(stretch, encoding.ids, encoding.offsets):
                moved = _Span(span.start + at.start, span.start + at.end)
                allowed.append(_Control(token_id, moved))
        apart = self._load_apart()
        ids, spans = apart.encode(text, allowed)
        if self._find_controls(text, ids, spans) != allowed:
            raise PromptError(
                "prompt.special_text",
                "The prompt holds text that this model's tokenizer turns into a control token"
                " wherever it stands; take the token's spelling out of the values.",
            )
        return ids, spans

    def _continue(
        self, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text that goes on, given those that it has by itself.

        They differ before the first added token only: what is put behind one belongs there.
        """
        first = next((i for i, token_id in enumerate(ids) if token_id in self._added), len(ids))
        end = spans[first][0] if first < len(ids) else len(text)
        if not end:
            return list(ids[first:]), list(spans[first:])
        head_ids, head_spans = self._load_apart(continues=True).encode(text[:end], ())
        return [*head_ids, *ids[first:]], [*head_spans, *spans[first:]]

    def _load_apart(self, *, continues: bool = False) -> _Apart:
        """Return the second tokenizer, or the one for text that goes on; few servers need them."""
        with self._apart_lock:
            if continues not in self._apart:
                controls = self._controls.keys()
                self._apart[continues] = _Apart(self._json, controls, continues=continues)
            return self._apart[continues]


class _Apart:
    """The same tokenizer, but its control tokens are spelled by stand-ins."""

    def __init__(
        self, tokenizer_json: str, control_ids: Collection[int], *, continues: bool = False
    ) -> None:
        layout = _read_layout(tokenizer_json)
        if continues:
            _drop_prefix(layout)
        # Unguessable, and of characters that no normalizer rewrites or drops.
        nonce = secrets.token_hex(12)
        self._stand_ins = {token_id: f"<{nonce}.{token_id}>" for token_id in control_ids}
        real_ids: dict[str, int] = {}
        for token in layout["added_tokens"]:
            stand_in = self._stand_ins.get(token["id"])
            if stand_in is not None:
                token["content"] = stand_in
            real_ids[token["content"]] = token["id"]
        if layout["model"].get("type") == "Unigram":
            # A Unigram model finds its own control pieces in plain text: hide them there too.
            vocab = layout["model"]["vocab"]
            for token_id, stand_in in self._stand_ins.items():
                if token_id < len(vocab):
                    vocab[token_id][0] = stand_in
        self._tokenizer = _load(msgspec.json.encode(layout).decode())
        # Tokens that were part of the model's vocabulary under their real name are appended
        # under the new one, so added tokens have other ids here.
        self._real_ids = {
            self._tokenizer.token_to_id(content): real for content, real in real_ids.items()
        }

    def encode(
        self, text: str, allowed: Sequence[_Control]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text in which only the given occurrences, in order, are control tokens.

        Returns:
            Ids and spans in terms of the real tokenizer and the given text.
        """
        parts, at, at_apart = [], 0, 0
        starts, starts_apart = [0], [0]
        for token_id, span in allowed:
            stand_in = self._stand_ins[token_id]
            parts += [text[at : span.start], stand_in]
            token_start = at_apart + span.start - at
            at, at_apart = span.end, token_start + len(stand_in)
            starts += [span.start, at]
            starts_apart += [token_start, at_apart]
        parts.append(text[at:])
        encoding = _encode(self._tokenizer, "".join(parts))

        def real_offset(offset: int) -> int:
            # Tokens begin and end at the edges of stand-ins or between them, never inside.
            index = bisect_right(starts_apart, offset) - 1
            return starts[index] + offset - starts_apart[index]

        ids = [self._real_ids.get(token_id, token_id) for token_id in encoding.ids]
        return ids, [(real_offset(start), real_offset(end)) for start, end in encoding.offsets]


def _read_layout(tokenizer_json: str) -> dict[str, Any]:
    """Return tokenizer.json as data, without what is decided elsewhere.

    Raises:
        ValueError: if the text is no tokenizer.
    """
    layout: object = msgspec.json.decode(tokenizer_json)
    if not isinstance(layout, dict) or not isinstance(layout.get("model"), dict):
        raise ValueError("the tokenizer.json of the model is not a tokenizer")
    layout["added_tokens"] = layout.get("added_tokens") or []
    return layout


def _drop_prefix(layout: dict[str, Any]) -> bool:
    """Take out what puts a blank before a text; False if nothing does."""
    found = False
    for name, parts in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        stage = layout.get(name)
        if not stage:
            continue
        steps = stage[parts] if stage["type"] == "Sequence" else [stage]
        kept = [step for step in steps if step["type"] != "Prepend"]
        found |= len(kept) < len(steps)
        for step in kept:
            if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                found |= step.pop("add_prefix_space", True)
                step["prepend_scheme"] = "never"
            elif step["type"] == "ByteLevel" and step.get("add_prefix_space", True):
                step["add_prefix_space"] = False
                found = True
        layout[name] = {"type": "Sequence", parts: kept} if kept else None
    return found


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that neither cuts nor pads, adds nothing and keeps offsets exact.

    Raises:
        ValueError: if the text is no tokenizer.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # The library raises nothing more special than this.
        raise ValueError(f"the tokenizer.json of the model does not load: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # What is left of a post-processor when no special tokens are added trims offsets.
    tokenizer.post_processor = None
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except TypeError as error:
        raise PromptError(
            "prompt.encoding",
            "The prompt holds half a surrogate pair, which is no character; remove it.",
        ) from error


def _unknown_id(layout: Mapping[str, Any], tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the id that the model gives to text it has no token for, or None."""
    model = layout["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    unknown = model.get("unk_token")
    return None if unknown is None else tokenizer.token_to_id(unknown)


def _trusted_spans(pieces: Sequence[Piece]) -> list[_Span]:
    """Return the stretches of the joined text that are special, neighbours as one."""
    spans: list[_Span] = []
    at = 0
    for text, special in pieces:
        end = at + len(text)
        if special and text:
            if spans and spans[-1].end == at:
                spans[-1] = _Span(spans[-1].start, end)
            else:
                spans.append(_Span(at, end))
        at = end
    return spans


def _lies_in(span: _Span, trusted: Sequence[_Span]) -> bool:
    index = bisect_right(trusted, span.start, key=lambda each: each.start) - 1
    return index >= 0 and span.end <= trusted[index].end


def _without_blanks(text: str, start: int, end: int) -> _Span:
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return _Span(start, max(start, start + len(part.strip())))
