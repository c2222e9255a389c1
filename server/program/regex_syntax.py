"""The syntax of the regular expressions that `linear_regex` runs: text to a tree.

Knows which of Python's syntax is taken and refuses the rest by name. Refuses to know how
a tree is matched.

Kept true: a `set` is the source of a regular expression for exactly one character, built
from escaped parts only, so it is safe to give to `re`.
"""

from __future__ import annotations

import re
from string import hexdigits
from typing import Any, TypeAlias

MAX_GROUP_DEPTH = 40
MAX_REPEAT = 1_000

Tree: TypeAlias = tuple[Any, ...]
"""`(name, ...)`:

    ("set", number)                     one character of the set
    ("cat", [trees]) ("alt", [trees])   one after the other; the first that fits
    ("repeat", tree, low, high | None, is_lazy)
    ("group", number, tree)             number 0: not captured
    (assertion,)                        ^ $ start end boundary inside
"""

_ASSERTIONS = {"A": "start", "Z": "end", "b": "boundary", "B": "inside"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_COUNTS = re.compile(r"\{(\d{0,6})(,?)(\d{0,6})\}")
_NAMED = re.compile(r"\?P<[A-Za-z_]\w*>")


class RegexError(ValueError):
    """The pattern is malformed, too large, or asks for what is not linear."""


class Parser:
    """Recursive descent over one pattern; `parse` is called once."""

    def __init__(self, pattern: str, position: int = 0) -> None:
        self._pattern = pattern
        self._position = position
        self._depth = 0
        self.num_groups = 0
        self.sets: list[str] = []

    def parse(self) -> Tree:
        """The tree of the whole pattern.

        Raises:
            RegexError: if it is not in the subset.
        """
        tree = self._choice()
        if self._position < len(self._pattern):
            raise self._error("`)` closes nothing")
        return tree

    def _choice(self) -> Tree:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else ("alt", branches)

    def _sequence(self) -> Tree:
        parts: list[Tree] = []
        while (char := self._peek()) and char not in "|)":
            parts.append(self._repeated(self._atom()))
        return ("cat", parts)

    def _repeated(self, atom: Tree) -> Tree:
        bounds = self._bounds()
        if bounds is None:
            return atom
        if len(atom) == 1:
            raise self._error("an anchor cannot be repeated")
        low, high = bounds
        if max(low, high or 0) > MAX_REPEAT:
            raise self._error(f"a repetition goes up to {MAX_REPEAT:,}")
        if high is not None and high < low:
            raise self._error("a repetition's bounds are the wrong way round")
        is_lazy = self._take("?")
        if self._take("+"):
            raise self._error("possessive repetition is not supported")
        if self._bounds() is not None:
            raise self._error("a repetition cannot be repeated; put it into a group")
        return ("repeat", atom, low, high, is_lazy)

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        found = _COUNTS.match(self._pattern, self._position)
        if found is None or not (found[1] or found[2]):
            return None
        self._position = found.end()
        low = int(found[1] or 0)
        if not found[2]:
            return low, low
        return low, int(found[3]) if found[3] else None

    def _atom(self) -> Tree:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._set(self._class())
        if char == ".":
            return self._set(".")
        if char in "^$":
            return (char,)
        if char == "\\":
            return self._escaped()
        if char in "*+?":
            raise self._error(f"`{char}` repeats nothing")
        return self._set(re.escape(char))

    def _group(self) -> Tree:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise self._error(f"groups are nested at most {MAX_GROUP_DEPTH} deep")
        named = _NAMED.match(self._pattern, self._position)
        number = 0
        if named is not None:
            self._position = named.end()
        if named is not None or self._peek() != "?":
            self.num_groups += 1
            number = self.num_groups
        elif not self._take("?:"):
            raise self._error(
                "of the groups only `(...)`, `(?:...)` and `(?P<name>...)` are supported, "
                "and flags `(?ims)` at the start: look-around has no linear algorithm"
            )
        inside = self._choice()
        if not self._take(")"):
            raise self._error("`(` is never closed")
        self._depth -= 1
        return ("group", number, inside)

    def _escaped(self) -> Tree:
        char = self._next()
        if char in _ASSERTIONS:
            return (_ASSERTIONS[char],)
        if char in "123456789":
            raise self._error("back-references are not supported: they have no linear algorithm")
        return self._set(self._escape(char))

    def _escape(self, char: str) -> str:
        """The source of what stands after a backslash, in a class or outside."""
        if char and char in "dDwWsS":
            return "\\" + char
        if char in _CONTROLS:
            return re.escape(_CONTROLS[char])
        if char in _HEX_DIGITS:
            return re.escape(self._hex_character(char))
        if char.isascii() and char.isalnum():
            raise self._error(f"`\\{char}` is not supported")
        return re.escape(char)

    def _hex_character(self, kind: str) -> str:
        count = _HEX_DIGITS[kind]
        digits = self._pattern[self._position : self._position + count]
        self._position += count
        if len(digits) < count or not set(digits) <= set(hexdigits) or int(digits, 16) > 0x10FFFF:
            raise self._error(f"`\\{kind}{digits}` is no character")
        return chr(int(digits, 16))

    def _class(self) -> str:
        """The source of a class, read after its `[`."""
        source = "[^" if self._take("^") else "["
        items: list[str] = []
        while not items or self._peek() != "]":
            first = self._class_item()
            if self._peek() == "-" and self._pattern[self._position + 1 :][:1] not in ("]", ""):
                self._position += 1
                last = self._class_item()
                # A category is written with a letter (`\d`), a single character never is.
                is_range = not any(len(end) == 2 and end[1].isalpha() for end in (first, last))
                if not is_range or first[-1] > last[-1]:
                    raise self._error(f"`{first}-{last}` is no range")
                first = f"{first}-{last}"
            items.append(first)
        self._position += 1
        return source + "".join(items) + "]"

    def _class_item(self) -> str:
        char = self._next()
        if char == "\\":
            escape = self._next()
            return "\\\b" if escape == "b" else self._escape(escape)
        # Every plain character that could mean something in a class is escaped.
        return char if char.isalnum() or char.isspace() else "\\" + char

    def _set(self, source: str) -> Tree:
        self.sets.append(source)
        return ("set", len(self.sets) - 1)

    def _peek(self) -> str:
        return self._pattern[self._position : self._position + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise self._error("the pattern ends too early")
        self._position += 1
        return char

    def _take(self, expected: str) -> bool:
        if not self._pattern.startswith(expected, self._position):
            return False
        self._position += len(expected)
        return True

    def _error(self, reason: str) -> RegexError:
        return RegexError(f"{reason} (at character {self._position} of {self._pattern[:80]!r})")
