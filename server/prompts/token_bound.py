"""An upper bound of the number of tokens of a text, computed without tokenising it.

Every model of the `tokenizers` library produces at most one token per byte of the text it is given.
Before that, normalizers and prefix spaces may lengthen the text. If the growth of every step has a
known bound, this module returns their sum, else None. A text never has more tokens than its bound.

An *added token* is an entry of `added_tokens` in `tokenizer.json`, such as `<|im_end|>`. The
tokenizer finds the added tokens in a text first, and tokenizes each part between them on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
_SPLITTERS = frozenset(
    {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit"}
)
_CANONICAL_FORM_GROWTH = 3
"""Maximum growth of UTF-8 text under NFC or NFD (Unicode's FAQ on normalization)."""


class TokenExpansionBound(NamedTuple):
    """How much tokenisation can add to the bytes of a text."""

    factor: int
    """Bytes after normalization per byte of text that is not ASCII."""
    prefix: int
    """Tokens that the tokenizer puts before each part of the text between added tokens."""

    def max_tokens(self, text: str) -> int:
        """Return the maximum number of tokens of a text."""
        if text.isascii():
            return len(text) + self.prefix
        return len(text.encode(errors="surrogatepass")) * self.factor + self.prefix


def find_expansion_bound(layout: Mapping[str, Any]) -> TokenExpansionBound | None:
    """Return how much a tokenizer can add to a text, or None if no bound can be proven.

    Args:
        layout: the content of `tokenizer.json`.
    """
    model = layout["model"]
    if model.get("type") not in _MODELS:
        return None
    pre_tokenizers = list(_flatten(layout.get("pre_tokenizer"), "pretokenizers"))
    by_bytes = any(each["type"] == "ByteLevel" for each in pre_tokenizers)
    vocab = _Vocabulary(model, by_bytes=by_bytes)
    factor, prefix = 1, 0
    for normalizer in _flatten(layout.get("normalizer"), "normalizers"):
        added = _normalizer_prefix(normalizer, vocab)
        if added is None:
            return None
        if normalizer["type"] in {"NFC", "NFD"}:
            factor *= _CANONICAL_FORM_GROWTH
        prefix += added
    for index, pre_tokenizer in enumerate(pre_tokenizers):
        added = _pre_tokenizer_prefix(pre_tokenizer, vocab)
        # The pre-tokenizers after the first one add their prefix to every piece of the text.
        if added is None or (added and index):
            return None
        prefix += added
    # `max_tokens` counts one prefix, but the text after each added token gets one, too. An added
    # token is one token, so its other bytes must cover that prefix.
    shortest = min((len(each["content"].encode()) for each in layout["added_tokens"]), default=None)
    if prefix and shortest is not None and shortest < 1 + prefix:
        return None
    return TokenExpansionBound(factor, prefix)


class _Vocabulary:
    """Counts the tokens of characters that the tokenizer itself inserts."""

    def __init__(self, model: Mapping[str, Any], *, by_bytes: bool) -> None:
        self._model = model
        self._by_bytes = by_bytes

    def max_tokens(self, text: str) -> int:
        """Return the maximum number of tokens of a text.

        One per character if the model knows each of them or has no byte fallback, else one per
        byte.
        """
        num_bytes = len(text.encode())
        if self._by_bytes or self._model["type"] == "Unigram":
            return num_bytes
        vocab = self._model.get("vocab")
        is_known = isinstance(vocab, dict) and all(char in vocab for char in text)
        # Without byte fallback, an unknown character is one unknown token.
        return len(text) if is_known or not self._model.get("byte_fallback") else num_bytes


def _flatten(step: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step.get("type") == "Sequence":
        for each in step[inner]:
            yield from _flatten(each, inner)
    else:
        yield step


def _normalizer_prefix(normalizer: Mapping[str, Any], vocab: _Vocabulary) -> int | None:
    """Return the number of tokens that a normalizer prepends; None if it adds others."""
    kind = normalizer["type"]
    if kind in {"NFC", "NFD", "Strip"}:
        return 0
    if kind == "Prepend":
        return vocab.max_tokens(normalizer["prepend"])
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 0 if vocab.max_tokens(normalizer["content"]) <= len(pattern) else None
    return None


def _pre_tokenizer_prefix(step: Mapping[str, Any], vocab: _Vocabulary) -> int | None:
    """Return the number of tokens that a pre-tokenizer prepends; None if it adds others."""
    kind = step["type"]
    if kind in _SPLITTERS:
        return 0
    if kind == "ByteLevel":
        return int(step.get("add_prefix_space", True))
    if kind == "Metaspace" and vocab.max_tokens(step.get("replacement", "\u2581")) == 1:
        return 0 if step.get("prepend_scheme") == "never" else 1
    return None
