"""`vote`: the most frequent of several answers (self-consistency: Wang et al., 2022)."""

from __future__ import annotations

import unicodedata
from typing import Any

from ..program.errors import RunError
from ..program.expressions.values import compact_json
from .registry import function


@function(timeout_s=5)
def vote(items: list[Any], normalize: bool = True) -> dict[str, Any]:
    """Return the most frequent item with its `count`, the `total` and its `share`.

    Null does not vote. Of equally frequent items the first one wins. With `normalize`, texts that
    differ only in case, and in spaces and punctuation around them, are the same; the first is
    returned.
    """
    counts: dict[str, int] = {}
    first: dict[str, Any] = {}
    for item in items:
        if item is None:
            continue
        key = compact_json(_normalized(item) if normalize else item)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, item)
    if not counts:
        raise RunError("vote.empty", "there is nothing to vote on: `items` has no value")
    winner = max(counts, key=counts.__getitem__)
    total = sum(counts.values())
    return {
        "value": first[winner],
        "count": counts[winner],
        "total": total,
        "share": counts[winner] / total,
    }


def _normalized(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    kept = [index for index, char in enumerate(item) if not _is_margin(char)]
    # A text of punctuation alone, such as an operator, is what it is.
    return item[kept[0] : kept[-1] + 1].casefold() if kept else item.strip()


def _is_margin(char: str) -> bool:
    """Whether a character is a space or punctuation (Unicode's categories `P*`)."""
    return char.isspace() or unicodedata.category(char).startswith("P")
