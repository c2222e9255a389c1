"""A text that a template may put somewhere, and may not look at.

Stands in for a content while a template runs. It can be printed, joined to other text,
stripped of its outer blanks, and found not to be empty; whatever else is done to it raises
`SeenError`. So a rendering that ends did not depend on what the content says, and holds for
every content that is more than blanks.

Refuses to know messages. Kept true: no operation of Python's or of Jinja's that asks the
value tells it from another one without an error. What asks for its kind alone is told that
it is a string: that is Jinja's test, and `is_string` takes its place. The error is no
`Exception`: some of Jinja's filters and tests take one for an answer.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jinja2.filters import do_trim


class SeenError(BaseException):
    """A template did more with a content than to put it somewhere."""


class Unseen:
    """Text with marks where contents go."""

    __slots__ = ("_stripped", "_text")

    def __init__(self, text: str, stripped: str | None = None) -> None:
        """Begin with a text, and what it is without outer blanks; None where nobody knows."""
        self._text = text
        self._stripped = stripped

    def __add__(self, other: object) -> Unseen:
        return Unseen(self._text + _text_of(other))

    def __radd__(self, other: object) -> Unseen:
        return Unseen(_text_of(other) + self._text)

    def __bool__(self) -> bool:
        return True

    def strip(self, chars: object = None) -> Unseen:
        """The text without its outer blanks."""
        if chars is not None or self._stripped is None:
            raise SeenError
        return Unseen(self._stripped, self._stripped)

    def _refuse(self, *_: object) -> NoReturn:
        raise SeenError

    __getattr__ = _refuse
    __str__ = __repr__ = __format__ = __bytes__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __len__ = __iter__ = __reversed__ = __getitem__ = __contains__ = _refuse
    __int__ = __float__ = __complex__ = __index__ = __trunc__ = __round__ = _refuse
    __mul__ = __rmul__ = __mod__ = __rmod__ = __abs__ = __neg__ = __pos__ = _refuse


def printed(value: Any) -> Any:
    """What a template writes for a value (Jinja's `finalize`)."""
    return value._text if type(value) is Unseen else value


def is_string(value: Any) -> bool:
    """Whether a value is a string, seen or not (Jinja's test)."""
    return isinstance(value, str | Unseen)


def trim(value: Any, chars: str | None = None) -> Any:
    """A text without its outer blanks (Jinja's filter)."""
    return value.strip(chars) if type(value) is Unseen else do_trim(value, chars)


def _text_of(other: object) -> str:
    if type(other) is Unseen:
        return other._text
    if isinstance(other, str) and not hasattr(other, "__html__"):  # such text escapes what joins it
        return other
    raise SeenError
