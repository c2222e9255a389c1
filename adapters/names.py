"""Names for the nodes and variables of a program that is read off somebody else's.

Kept true: what comes out is a name that programs may use, and nothing else has it.
"""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 100
"""Of what is taken over: a number may still be put behind it."""


def fresh(hint: str, taken: set[str]) -> str:
    """A name like `hint` that is not taken yet; it is from now on."""
    base = re.sub(r"\W", "_", hint)[:MAX_LENGTH] or "value"
    if not re.match(r"[^\W\d]|_", base):
        base = f"_{base}"
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name
