"""`vote`: the most frequent of several answers (self-consistency: Wang et al., 2022)."""

from __future__ import annotations

import string
from typing import Any, Final

from ..program.errors import RunError
from ..program.expressions.values import compact_json
from .registry import function

_MARGIN: Final = (
    string.whitespace
    + "\u00a0\u2002\u2003\u2009\u202f\u3000"  # spaces
    + ".,;:!?\u2026\u3001\u3002\uff01\uff1f"
    + "\"'`()[]{}\u00ab\u00bb\u2018\u2019\u201a\u201c\u201d\u201e"
)
"""Characters that are removed around an answer: spaces, and punctuation that no answer needs. Signs
such as `-`, `#`, `%` and `+` are kept."""


@function(timeout_s=5)
def vote(items: list[Any], normalize: bool = True) -> dict[str, Any]:
    """Return the most frequent item with its `count`, the `total` and its `share`.

    Null does not vote. Of equally frequent items the first one wins. With `normalize`, texts that
    differ only in case, and in spaces, quotes, brackets and `.,;:!?` around them, are the same; the
    first is returned.
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
    # A text of such characters alone is what it is.
    return item.strip(_MARGIN).casefold() or item.strip()
