"""The byte tokenizer, loaded by the tokenizers library."""

from __future__ import annotations

import jinja2
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from conure.engine.text import byte_tokenizer

TOKENIZER = Tokenizer.from_str(byte_tokenizer.tokenizer_json())


@given(st.text())
def test_ids_are_the_bytes_of_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_single_ids() -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>"
    assert TOKENIZER.encode(text).ids == [257, *b"user\nhi", 258, 10, 256]
    assert TOKENIZER.decode([65, 258, 66]) == "AB"
    assert TOKENIZER.get_vocab_size() == byte_tokenizer.VOCAB_SIZE == 259
    assert byte_tokenizer.EOS_IDS == (258, 256)


def test_template_marks_every_turn() -> None:
    template = jinja2.Template(byte_tokenizer.CHAT_TEMPLATE)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    closed = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    assert template.render(messages=messages) == closed
    opened = template.render(messages=messages, add_generation_prompt=True)
    assert opened == closed + "<|im_start|>assistant\n"
