"""Suggestions for unknown names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LEN = 128
"""Length of a name for which a similar one is looked for."""


def suggestion(
    name: str, known: Iterable[str], otherwise: str = "", *, similarity: float = 0.6
) -> str:
    """Return the question whether the most similar known name was meant.

    Args:
        name: the unknown name.
        known: the names that exist.
        otherwise: the result if none of them is similar.
        similarity: of two names, from 0 to 1; names below it are not similar.
    """
    if len(name) > MAX_LEN:
        return otherwise
    similar = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f"did you mean `{similar[0]}`?" if similar else otherwise
