"""The statements of a text, their shapes, and the slots in which statements of one shape differ.

    a1 = gen('Tea is hot. ', max_tokens=9)        slots: a1, 'Tea is hot. '
    a2 = gen('Coffee, too. ', max_tokens=9)       the same shape, slots: a2, 'Coffee, too. '

Slots are names, plain strings, and the parts of f-strings that insert names only. Keywords, names
of functions and of arguments, numbers, and words that may have a meaning in the language belong to
the shape.

Invariant: the tokens of a text in Python's syntax are found as Python's tokenizer finds them, or
`trees` finds no node for a slot. Text in any other syntax gives some statements, without an error.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from msgspec import Struct

from ..syntax import MAX_SYNTAX_NODES

MIN_STATEMENTS: Final = 8
"""Sharing is tried in texts with at least so many statements."""
SAMPLE: Final = 16
MAX_DIFFERENT: Final = 0.75
"""After each `SAMPLE` statements, a text is not shared if more of them have their own shape."""
MAX_SHORT_TEXT: Final = 64
"""Longer strings are compiled to variables where they are assigned (`values.MAX_INLINE_TEXT`)."""
MAX_SLOT_NAME: Final = 90

_BOUNDARY = re.compile(r"\n(?=[A-Za-z_])(?!(?:elif|else|except|finally)\b)")
_TOKEN = re.compile(
    r"""(
    \.?[A-Za-z_]\w*+(?!['"])(?:\(|=(?!=))?
    | [A-Za-z]{0,2}(?:
        '''[^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*+'''
        | \"\"\"[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+\"\"\"
        | '[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'
        | "[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"
    )
    | \#[^\n]*+
    | [0-9][\w.]*+
    )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_OWN_SHAPE = re.compile(r"def\b|\w+[ \t]*:", re.ASCII)
"""The beginnings of functions and declarations, which are read again after their statement."""
MAX_WORDS: Final = 30
_WORDS = re.compile(r"[A-Za-z_ ]*+")
"""Strings that may have a meaning in the language, such as `content`, `user` and `default`."""
_INSERTED = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_FIXED_NAMES: Final = frozenset(
    {*keyword.kwlist, *keyword.softkwlist, "str", "int", "float", "bool", "list", "model_name"}
)
"""Names that are keywords, types, or known without an assignment."""

_NAME_SLOT: Final = "\1name"
"""The shape of a name. No token of a text starts with this character."""


class ShapeSlot(Struct, frozen=True, gc=False):
    """What statements of one shape differ in."""

    value: str
    """A name, or the value of a string."""
    json: str
    """The value inside of a JSON string."""
    is_text: bool


class SourceToken(Struct, frozen=True):
    """A token of a text."""

    shape: str
    """Its part of the shape."""
    slots: tuple[ShapeSlot, ...] = ()
    parts: tuple[ShapeSlot | None, ...] = ()
    """The slots, with None for parts of an f-string that belong to the shape."""


class Statement(NamedTuple):
    """Lines of a text that are one or more whole statements, outside of blocks."""

    text: str
    first_line: int
    num_breaks: int
    """The number of line breaks in the text."""
    shape: object
    """What statements have in common that are compiled alike; it can be hashed."""
    slots: tuple[ShapeSlot, ...]
    """The distinct values of the slots."""


class _Outline(NamedTuple):
    """What statements with the same tokens in the same places have in common."""

    number: int
    is_own: bool
    """Whether its statements call a function of the text. They are compiled alone, because the
    nodes of the function would be recorded with them."""
    literals: list[str]
    """The text before, between and after the tokens with slots."""
    shapes: tuple[str, ...]
    """Of the tokens with slots."""
    places: tuple[int, ...]
    """The last place of each token with slots: it tells which of them are equal."""
    slots: Callable[[list[SourceToken]], tuple[SourceToken, ...]] | None
    """Selects the tokens that are distinct slots; None if the parts of tokens must be compared."""

    def statement(self, tokens: list[SourceToken]) -> tuple[object, tuple[ShapeSlot, ...]]:
        """Return the shape and the distinct slots of a statement by its tokens with slots."""
        if self.slots is None:
            return _compare_parts(self.number, tokens)
        return self.number, tuple([each.slots[0] for each in self.slots(tokens)])


class _SourceTokens(dict[str, SourceToken]):
    """The tokens of a text, each of which is read once."""

    def __missing__(self, written: str) -> SourceToken:
        token = self[written] = read_token(written)
        return token


class _Candidates(dict[str, SourceToken]):
    """Parts of a text, each of which may be one token."""

    def __missing__(self, written: str) -> SourceToken:
        is_name = written.isidentifier() and written.isascii()
        is_token = is_name or _TOKEN.fullmatch(written) is not None
        token = self[written] = read_token(written) if is_token else _NO_TOKEN
        return token


_NO_TOKEN = SourceToken("")
_shape_of = attrgetter("shape")


def split_text(text: str) -> list[Statement] | None:
    """Return the statements of a text; None if sharing their shapes gains nothing."""
    sources = _BOUNDARY.split(text)
    if not MIN_STATEMENTS <= len(sources) <= MAX_SYNTAX_NODES or not _is_suitable(text):
        return None
    statements: list[Statement] = []
    outlines = _Outlines(sources)
    shapes: set[object] = set()
    num_alike = 0
    line = 1
    for source in sources:
        shape, slots = outlines.read(source)
        if shape is None:
            shape = -line
        else:
            shapes.add(shape)
            num_alike += 1
            if num_alike % SAMPLE == 0 and len(shapes) > MAX_DIFFERENT * num_alike:
                return None
        num_breaks = source.count("\n")
        statements.append(Statement(source, line, num_breaks, shape, slots))
        line += num_breaks + 1
    is_useful = num_alike >= MIN_STATEMENTS and 2 * len(shapes) <= num_alike
    return statements if is_useful else None


def _is_suitable(text: str) -> bool:
    """Return whether lines end by line feeds, and no decorator is on a line of its own."""
    return not ("\r" in text or "\f" in text or "\n@" in text or text.startswith("@"))


class _Outlines:
    """The outlines of the statements of one text.

    A statement is most often like the one before it, or like the one that followed that one the
    last time. Then its slots are found without all of its tokens.
    """

    def __init__(self, sources: list[str]) -> None:
        self._functions = {
            f"{source[4 : source.find('(')].strip()}("
            for source in sources
            if source.startswith(("def ", "def\t"))
        }
        self._token_of = _SourceTokens().__getitem__
        self._candidate_of = _Candidates().__getitem__
        self._outlines: dict[object, _Outline] = {}
        self._last: _Outline | None = None
        self._next: dict[int, _Outline] = {}
        """The outlines that followed others the last time."""

    def read(self, source: str) -> tuple[object | None, tuple[ShapeSlot, ...]]:
        """Return the shape and the distinct slots of the next statement.

        The shape of a statement that must be compiled alone is None.
        """
        if _OWN_SHAPE.match(source):
            return None, ()
        outline, tokens = self._expected(source) or self._tokenize(source)
        if self._last is not None:
            self._next[self._last.number] = outline
        self._last = outline
        return (None, ()) if outline.is_own else outline.statement(tokens)

    def _expected(self, source: str) -> tuple[_Outline, list[SourceToken]] | None:
        """Return the outline of a statement that is like others, and its tokens with slots."""
        last = self._last
        if last is None:
            return None
        expected = self._next.get(last.number, last)
        tokens = self._holes(expected, source)
        if tokens is None and expected is not last:
            expected, tokens = last, self._holes(last, source)
        return None if tokens is None else (expected, tokens)

    def _holes(self, outline: _Outline, source: str) -> list[SourceToken] | None:
        """Return the tokens with slots of a statement that has an outline; None if it has not."""
        first, *others = outline.literals
        if not others or not source.startswith(first):
            return None
        here = len(first)
        written: list[str] = []
        for literal in others[:-1]:
            end = source.find(literal, here)
            if end < 0:
                return None
            written.append(source[here:end])
            here = end + len(literal)
        if not source.endswith(others[-1]):
            return None
        written.append(source[here : len(source) - len(others[-1])])
        tokens = list(map(self._candidate_of, written))
        is_alike = outline.shapes == tuple(map(_shape_of, tokens))
        return tokens if is_alike and outline.places == _places(written) else None

    def _tokenize(self, source: str) -> tuple[_Outline, list[SourceToken]]:
        """Return the outline of a statement, and its tokens with slots."""
        parts = _TOKEN.split(source)
        written = parts[1::2]
        tokens = list(map(self._token_of, written))
        key = (*parts[::2], *map(_shape_of, tokens), *_places(written))
        outline = self._outlines.get(key)
        if outline is None:
            is_own = not self._functions.isdisjoint(written)
            outline = _outline(len(self._outlines), is_own, parts, tokens)
            self._outlines[key] = outline
        return outline, [each for each in tokens if each.slots]


def _places(written: list[str]) -> tuple[int, ...]:
    """Return the last place of each item. All of this runs in C."""
    return tuple(map(dict(zip(written, range(len(written)), strict=True)).__getitem__, written))


def _outline(number: int, is_own: bool, parts: list[str], tokens: list[SourceToken]) -> _Outline:
    """Return an outline.

    Args:
        number: of the outline.
        is_own: whether its statements call a function of the text.
        parts: of a statement: alternately other text and tokens.
        tokens: all tokens of the statement.
    """
    written: list[str] = []
    literals = [parts[0]]
    for token, each, gap in zip(tokens, parts[1::2], parts[2::2], strict=True):
        if token.slots:
            written.append(each)
            literals.append(gap)
        else:
            literals[-1] += each + gap
    if "" in literals[1:-1]:
        literals = []  # two slots without anything between them cannot be told apart
    shapes = tuple([each.shape for each in tokens if each.slots])
    places = _places(written)
    texts = {each for each in shapes if each != _NAME_SLOT}
    # Equal strings may be written in two ways: with other quotes, with escapes, or as f-strings.
    if len({each[:2] for each in texts}) > 1 or any(each[2:3] != "p" for each in texts):
        return _Outline(number, is_own, literals or [""], shapes, places, None)
    first = [place for place, each in enumerate(written) if each not in written[:place]]
    select: Callable[[list[SourceToken]], tuple[SourceToken, ...]]
    if len(first) > 1:
        select = itemgetter(*first)
    else:
        select = lambda tokens: tuple([tokens[place] for place in first])  # noqa: E731
    return _Outline(number, is_own, literals or [""], shapes, places, select)


def _compare_parts(number: int, tokens: list[SourceToken]) -> tuple[object, tuple[ShapeSlot, ...]]:
    """Return the shape and the distinct slots of a statement by the values of its slots."""
    first: dict[ShapeSlot, int] = {}
    places = [first.setdefault(slot, len(first)) for token in tokens for slot in token.slots]
    return (number, *places), tuple(first)


def read_token(written: str) -> SourceToken:
    """Return the part of a token in the shape, and its slots."""
    if written.isidentifier():
        if written in _FIXED_NAMES or len(written) > MAX_SLOT_NAME:
            return SourceToken(written)
        slots = (ShapeSlot(written, written, False),)
        return SourceToken(_NAME_SLOT, slots, slots)
    start = written[0]
    if start in "'\"":
        return _read_string(written)
    if start == "#":
        return SourceToken("#")
    is_plain_f = start in "fF" and written[1] in "'\"" and "\\" not in written
    return _read_f_string(written) if is_plain_f else SourceToken(written)


def _read_string(written: str) -> SourceToken:
    if written[1:3] == written[0] * 2:
        return SourceToken(written)  # it may have several lines
    value = written[1:-1]
    if "\\" in value:
        escapes = set(_ESCAPE.findall(value))
        if not escapes <= _ESCAPED.keys():
            return SourceToken(written)
        value = _ESCAPE.sub(lambda match: _ESCAPED[match[1]], value)
    return _text_slot(value, written, written[0] + ("e" if "\\" in written else "p"))


def _text_slot(value: str, written: str, style: str) -> SourceToken:
    """Return a string as a slot, with what the compiler may test about its value.

    Args:
        value: the string.
        written: the string as it is written.
        style: its quote, and whether it has escapes.
    """
    if len(value) <= MAX_WORDS and _WORDS.fullmatch(value):
        return SourceToken(written)
    has_control = "<" in value or "[" in value
    shape = f"\1{style}{len(value) > MAX_SHORT_TEXT:d}{has_control:d}"
    slots = (ShapeSlot(value, encode_basestring(value)[1:-1], True),)
    return SourceToken(shape, slots, slots)


def _read_f_string(written: str) -> SourceToken:
    """Return an f-string as slots if it inserts names only."""
    if written.startswith(("'''", '"""'), 1):
        return SourceToken(written)
    texts = _INSERTED.split(written[2:-1])
    if any("{" in each or "}" in each for each in texts):
        return SourceToken(written)
    tokens = [
        read_token(text) if number % 2 else _text_slot(text, text, "fp")
        for number, text in enumerate(texts)
    ]
    parts: list[ShapeSlot | None] = []
    for token, text in zip(tokens, texts, strict=True):
        if text:
            parts += token.parts or (None,)
    slots = tuple(each for each in parts if each is not None)
    return SourceToken("\0".join(["f", *(each.shape for each in tokens)]), slots, tuple(parts))


def parts_with_offsets(text: str) -> Iterator[tuple[int, tuple[ShapeSlot | None, ...]]]:
    """Iterate over the tokens of a statement that have slots: where they start, and their parts."""
    for match in _TOKEN.finditer(text):
        token = read_token(match[0])
        if token.slots:
            yield match.start(), token.parts
