"""Programs that a user names by the beginning of their ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from conure.adapters.client import Client

from .command import UsageError

PAGE_LIMIT: Final = 200
"""Programs that a server lists at once."""
HELP: Final = "id of a program, or its first digits"
FULL_LEN: Final = len("p_") + 24
MAX_SHOWN: Final = 3
"""Ids that an error shows."""
_WORD: Final = re.compile(r"(?:p_)?([0-9a-f]{1,24})")


def prefix_of(word: str) -> str | None:
    """Return the beginning of an id with its `p_`; None if no id can begin with the word."""
    found = _WORD.fullmatch(word)
    return None if found is None else f"p_{found[1]}"


def unique_id(word: str, ids: Sequence[str]) -> str:
    """Return the one id that begins with a word; the word if there is none.

    Raises:
        UsageError: if there are several.
    """
    if len(ids) > 1:
        shown = ", ".join([*ids[:MAX_SHOWN], *(["..."] if len(ids) > MAX_SHOWN else [])])
        raise UsageError(
            f"the ids of several programs begin with {word!r}: {shown}; give more digits"
        )
    return ids[0] if ids else word


def find_program(client: Client, word: str) -> str:
    """Return the id of the program whose id begins with a word, with or without `p_`.

    Returns:
        The word itself if there is no such program: the server then says so.

    Raises:
        UsageError: if there are several.
    """
    prefix = prefix_of(word)
    if prefix is None:
        return word
    if len(prefix) == FULL_LEN:
        return prefix
    ids: list[str] = []
    cursor = None
    while len(ids) <= MAX_SHOWN:
        page = client.programs(search=prefix, cursor=cursor, limit=PAGE_LIMIT)
        ids += [each.id for each in page.programs if each.id.startswith(prefix)]
        cursor = page.next
        if cursor is None:
            break
    return unique_id(word, ids)
