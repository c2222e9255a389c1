"""Whether a text is Unicode, and so can be sent, stored and logged as UTF-8."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which is not a character."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
