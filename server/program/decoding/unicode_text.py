"""Texts that can be sent, stored and logged as UTF-8, and texts for the lines of a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which is not a character."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_controls(text: str) -> str:
    """Return a text as one line for a terminal: control characters become escapes."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
