"""The estimated size of a compiled regular expression, before it is compiled.

A state is one instruction of RE2's program. Repetition copies what is repeated, and a class of
Unicode has more than a thousand states in UTF-8, so a short pattern may be large.

Out of scope: the syntax. A pattern that is malformed has a size, too.
"""

from __future__ import annotations

import re
from typing import Final

_PART = re.compile(
    r"(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\]?)"
    r"|(?P<repeat>\{(?=\d|,\d)(?P<least>\d*)(?:,(?P<most>\d*))?\})"
    r"|(?P<open>\((?:\?P<\w{0,64}>|\?:)?)|(?P<close>\))|(?P<more>[*+?])|(?P<or>\|)"
    r"|(?P<atom>\\x..|\\u....|\\U........|\\.|.)",
    re.DOTALL,
)
_CLASS_ITEM = re.compile(r"\\x..|\\u....|\\U........|\\.|.", re.DOTALL)
_CLASSES: Final = {r"\w": 1_350, r"\W": 1_350, r"\D": 270, r"\d": 90, r"\S": 40, r"\s": 20}
_STATES: Final = {**_CLASSES, ".": 8, "$": 5}
_GROUP: Final = 2
_NEGATION: Final = 8
_FOLDED: Final = 3
"""How many times more states a character has if case is ignored."""


def num_states(pattern: str, *, ignores_case: bool = False) -> int:
    """Estimate the number of states of a compiled pattern, without its flags."""
    factor = _FOLDED if ignores_case else 1
    totals = [0]
    """States of the pattern and of the groups that are open, up to the last part of each."""
    last = 0
    """States of the last part, which a repetition copies."""
    for part in _PART.finditer(pattern):
        kind = part.lastgroup
        if kind == "repeat":
            last = max(1, _num_copies(part)) * (last + 1)
        elif kind == "more":
            last += 1
        elif kind == "close" and len(totals) > 1:
            last += totals.pop()
        else:
            totals[-1] += last
            last = 0
            if kind == "open":
                totals.append(_GROUP)
            elif kind == "class":
                last = _class_states(part[0], factor)
            else:
                last = _states(part[0], factor)
    return sum(totals) + last


def _num_copies(repeat: re.Match[str]) -> int:
    """Return how many copies `{m}`, `{m,}`, `{m,n}` or `{,n}` makes, at most 1,000 in RE2."""
    return int((repeat["most"] or repeat["least"])[:9])


def _class_states(text: str, factor: int) -> int:
    items = _CLASS_ITEM.findall(text[1:-1])
    return sum([_states(item, factor) for item in items if item != "."]) + _NEGATION


def _states(atom: str, factor: int) -> int:
    known = _STATES.get(atom)
    if known is not None:
        return known
    if atom.isascii() and atom[:2] not in (r"\u", r"\U", r"\x"):
        return factor
    return factor * 3
