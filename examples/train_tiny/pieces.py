"""The tokenizer: byte-level BPE, trained on generated text.

Words that begin with a capital, and single digits, stand apart from the blank before them, so
that a name has the same pieces wherever it stands: behind a blank, at the start of an answer,
between the quotes of JSON. What a model has to copy then looks the same in both places.

Knows texts and ids; refuses to know what texts mean. Kept true: any text has an encoding,
and decoding gives the text back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from conure.engine.bytelevel import END_OF_TEXT, TURN_END, TURN_START

SPECIAL: Final = (END_OF_TEXT, TURN_START, TURN_END)

WORDS: Final = (
    r"\p{Lu}[\p{L}\p{M}]*| ?\p{Ll}[\p{L}\p{M}]*|\p{L}[\p{L}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` ids: 256 bytes, merges, and the three special tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
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
