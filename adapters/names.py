"""Unique names for the nodes and variables of generated programs."""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 100
"""Maximum length of the part that is taken from a hint; a number may be appended."""


def unique_name(hint: str, taken: set[str]) -> str:
    """Return a valid name similar to `hint` that is not in `taken`, and add it to `taken`."""
    base = re.sub(r"\W", "_", hint)[:MAX_LENGTH] or "value"
    if not re.match(r"[A-Za-z_]", base):  # as the server requires of the first character
        base = f"_{base}"
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name
