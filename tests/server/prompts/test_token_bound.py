"""Which tokenizers have a proven bound, and which bound. `test_tokenizer` checks that it holds."""

from __future__ import annotations

from typing import Any

import pytest

from conure.server.prompts.token_bound import TokenExpansionBound, find_expansion_bound

BYTES = {"type": "ByteLevel", "add_prefix_space": False}
BYTES_WITH_SPACE = {"type": "ByteLevel", "add_prefix_space": True}
META = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
TO_META = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
SPLIT = {"type": "Split", "pattern": {"String": " "}}


def layout(
    normalizer: Any = None, pre_tokenizer: Any = None, added: tuple[str, ...] = (), **model: Any
) -> dict[str, Any]:
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "added_tokens": [{"content": each} for each in added],
        "model": {"type": "BPE", "vocab": {"\u2581": 0}, "byte_fallback": True, **model},
    }


def row(*steps: Any, key: str) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (layout(), TokenExpansionBound(1, 0)),
        (layout({"type": "NFC"}, BYTES), TokenExpansionBound(3, 0)),
        (layout(None, BYTES_WITH_SPACE, ("<s>",)), TokenExpansionBound(1, 1)),
        (layout(None, row(SPLIT, BYTES, key="pretokenizers")), TokenExpansionBound(1, 0)),
        (layout(None, META, ("<s>",)), TokenExpansionBound(1, 1)),
        (
            layout(row(PREPEND, TO_META, key="normalizers"), None, ("<s>",)),
            TokenExpansionBound(1, 1),
        ),
        # A prefix per piece, and no token that is long enough to compensate for it.
        (layout(None, row(SPLIT, BYTES_WITH_SPACE, key="pretokenizers")), None),
        (layout(None, META, ("<s>", "a")), None),
        # The symbol for a blank takes three bytes if it is not a token.
        (layout(TO_META, BYTES), None),
        (layout(TO_META, None, vocab={}), None),
        (layout(None, META, vocab={}), None),
        (layout({"type": "NFKC"}, BYTES), None),
        (layout({"type": "Lowercase"}, BYTES), None),
        (layout(None, {"type": "UnknownSplit"}), None),
        (layout(type="Unheard"), None),
    ],
)
def test_bound_is_proven_or_absent(
    tokenizer: dict[str, Any], expected: TokenExpansionBound | None
) -> None:
    assert find_expansion_bound(tokenizer) == expected


def test_the_bound_counts_bytes() -> None:
    assert TokenExpansionBound(3, 1).max_tokens("abc") == 4
    assert TokenExpansionBound(3, 1).max_tokens("aä") == 10
    assert TokenExpansionBound(1, 0).max_tokens("") == 0
