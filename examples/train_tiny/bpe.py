"""The tokenizer: byte-level BPE, trained on generated text.

Capitalised words and single digits are split from the space before them. A name then has the same
tokens after a space, at the start of an answer and between JSON quotes, which makes it easier to
copy.

Invariant: any text can be encoded, and decoding returns the same text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from conure.engine.text.byte_tokenizer import END_OF_TEXT, TURN_END, TURN_START

SPECIAL: Final = (END_OF_TEXT, TURN_START, TURN_END)

PRETOKEN_PATTERN: Final = (
    r"\p{Lu}[\p{L}\p{M}]*| ?\p{Ll}[\p{L}\p{M}]*|\p{L}[\p{L}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of `vocab_size` ids: 256 bytes, merges, then the three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer
