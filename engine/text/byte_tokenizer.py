"""Byte tokenizer and chat template of the models that lack their own.

One token per byte, in order (id 65 is the byte "A"), then three special tokens. Any text has
exactly one encoding, so tests and demonstrations can read ids by eye. The template is ChatML, as
used by Qwen and many others.

No tokenizer library is imported: the tokenizer is written as JSON.

Invariants: ids 0 to 255 are the bytes, special ids follow, and text outside of special tokens is
never merged, split or prefixed with a space.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Final

NUM_BYTES: Final = 256
END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
SPECIAL_IDS: Final = MappingProxyType({END_OF_TEXT: 256, TURN_START: 257, TURN_END: 258})
VOCAB_SIZE: Final = NUM_BYTES + len(SPECIAL_IDS)
EOS_IDS: Final = (SPECIAL_IDS[TURN_END], SPECIAL_IDS[END_OF_TEXT])
SPECIAL_TOKENS: Final[dict[str, str]] = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
"""Names that templates use and their text, as in a Hello."""

CHAT_TEMPLATE: Final = r"""
{%- if tools %}
{{- '<|im_start|>system\n# Tools\n<tools>\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{{- '</tools>\nA call: <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '\n' if message['content'] or not loop.first }}
{{- '<tool_call>\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""ChatML: every turn is enclosed in its markers and ends with a newline. Tools are listed first,
in a system turn; calls are written as Hermes and Qwen models write them."""


def tokenizer_json(vocab_size: int = VOCAB_SIZE) -> str:
    """Return the tokenizer.json text of the byte tokenizer.

    `tokenizers.Tokenizer.from_str` loads it. Encoding adds no special tokens, and decoding
    bytes that are not UTF-8 returns U+FFFD.

    Args:
        vocab_size: At least `VOCAB_SIZE`. A model with more ids may sample any of them: the
            text of id 300 is " 300". Encoding never returns such an id.
    """
    if vocab_size < VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {VOCAB_SIZE}, got {vocab_size}")
    added = [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, token_id in SPECIAL_IDS.items()
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    chars = _byte_chars()
    vocab = {char: byte for byte, char in enumerate(chars)}
    blank = chars[ord(" ")]
    numbers = {f"{blank}{number}": number for number in range(VOCAB_SIZE, vocab_size)}
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {**vocab, **SPECIAL_IDS, **numbers},
        "merges": [],
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )


def _byte_chars() -> list[str]:
    """Return the printable character of each byte in byte-level BPE, in byte order.

    Printable Latin-1 bytes represent themselves; the others map to the code points from 256
    upwards, in order. This is GPT-2's table, which the ByteLevel decoder inverts.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    chars: list[str] = []
    num_moved = 0
    for byte in range(NUM_BYTES):
        if byte in printable:
            chars.append(chr(byte))
        else:
            chars.append(chr(NUM_BYTES + num_moved))
            num_moved += 1
    return chars
