r"""Regular expressions: a subset of Python's syntax, matched by RE2 in linear time.

A pattern may have literals, escapes, classes, `.`, groups, `|`, greedy and lazy `* + ? {m,n}`,
anchors, `\b`, and the flags `(?ims)` at the start. Back-references and look-around are refused.
Matches are those of Python's `re`, with these exceptions: `\b` looks at ASCII letters only, and so
do `\W` and `\S` in a class; a `$` before a final newline consumes the newline, so that nothing
can follow it in the pattern.

RE2 is part of the `server` extra. A client without it cannot evaluate `find`; the server can.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import ModuleType

MAX_PATTERN: Final = 4_096
MAX_MEMORY: Final = 4 << 20
"""Bytes of one compiled pattern and its automata."""
_STATES_PER_FUEL: Final = 1_024
"""Characters times states that cost as much as one operation of a search (about 1 ns each)."""
_GROUP_STATES_PER_FUEL: Final = 40
"""The same for finding the groups of a match, in the text of the match only (about 25 ns each)."""
_STATES_PER_START: Final = 16
"""States that cost as much as one operation when a search starts."""

_FLAGS = re.compile(r"\(\?([ims]+)\)")
_TOKEN = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|\[\^?\]?|\{,(?=\d+\})|\(\?P<|\(\?:|.",
    re.DOTALL,
)
_ALLOWED_ESCAPES = frozenset("AZbBdDwWsSntrfvax0")
_WORD, _DIGIT, _SPACE = r"\p{L}\p{N}_", r"\p{Nd}", r"\s\v\x1c-\x1f\x{85}\p{Z}"
_ESCAPES = {
    r"\Z": r"\z",
    r"\w": f"[{_WORD}]",
    r"\W": f"[^{_WORD}]",
    r"\d": _DIGIT,
    r"\D": r"\P{Nd}",
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_SPACE}]",
}
_ESCAPES_IN_CLASS = {
    r"\w": _WORD,
    r"\d": _DIGIT,
    r"\D": r"\P{Nd}",
    r"\s": _SPACE,
    r"\b": r"\x08",
    "[": r"\[",
}
_END = r"(?:\z|(\n)\z)"
"""`$`: the end of the text, or before a newline there, which its group captures."""


class RegexError(ValueError):
    """The pattern is malformed, too large, or needs more than linear time."""


class MissingRegexLibraryError(RegexError, ModuleNotFoundError):
    """RE2 is not installed."""


class LinearRegex:
    """A compiled pattern; use `compile_regex`."""

    def __init__(self, pattern: str, re2: ModuleType) -> None:
        translation = _Translation(pattern)
        self._regex = _compile(re2, translation.text, pattern)
        self._group = translation.first_group
        self._end_groups = translation.end_groups
        # Unicode classes have thousands of states but few active ones: count ASCII.
        self._num_states: int = _compile(re2, translation.ascii_text, pattern).programsize

    def cost(self, text: str) -> int:
        """Return the fuel that a search in a text costs."""
        states = self._num_states
        return states // _STATES_PER_START + len(text) * states // _STATES_PER_FUEL

    def max_cost(self, text: str) -> int:
        """Return the fuel that a search costs if all of the text matches."""
        return self.cost(text) + len(text) * self._num_states // _GROUP_STATES_PER_FUEL

    def find(self, text: str, spend: Callable[[int], None] | None = None) -> str | None:
        """Return group 1 of the first match, or the whole match if the pattern has no group.

        None: no match, or a match without the group. `spend` is called with the fuel that finding
        the groups of the match has cost, besides `cost`.
        """
        encoded = text.encode("utf-8", "surrogatepass")
        match = self._regex.search(encoded)
        if match is None:
            return None
        if spend is not None:
            spend(self._group_cost(match))
        return self._matched_text(encoded, match)

    def _group_cost(self, match: Any) -> int:
        """Return the fuel that finding the groups of a match has cost."""
        if not self._group and not self._end_groups:
            return 0
        length: int = match.end() - match.start()
        return length * self._num_states // _GROUP_STATES_PER_FUEL

    def is_match(self, text: str) -> bool:
        """Return whether the pattern matches somewhere in a text."""
        return self._regex.search(text.encode("utf-8", "surrogatepass")) is not None

    def find_all(self, text: str, spend: Callable[[int], None]) -> list[str | None]:
        """Return group 1 of every match from left to right, or the whole matches.

        Args:
            text: the text.
            spend: called with the fuel of each search before it runs; may raise to stop. A search
                may read the text up to its end, whatever it finds.
        """
        encoded = text.encode("utf-8", "surrogatepass")
        found: list[str | None] = []
        matches = self._regex.finditer(encoded)
        position = 0
        while True:
            spend(1 + (len(encoded) - position) * self._num_states // _STATES_PER_FUEL)
            match = next(matches, None)
            if match is None:
                return found
            spend(self._group_cost(match))
            found.append(self._matched_text(encoded, match))
            position = match.end()

    def _matched_text(self, encoded: bytes, match: Any) -> str | None:
        start, end = match.span(self._group)
        if start < 0:
            return None
        for group in self._end_groups:
            newline, newline_end = match.span(group)
            if newline_end == end and newline >= start:
                end = newline
        return encoded[start:end].decode("utf-8", "surrogatepass")


@lru_cache(maxsize=64)
def compile_regex(pattern: str) -> LinearRegex:
    """Return a compiled pattern.

    Raises:
        RegexError: if the pattern is not in the subset or too large.
        MissingRegexLibraryError: if RE2 is missing.
    """
    re2 = _load_re2()
    if re2 is None:
        raise MissingRegexLibraryError(
            "regular expressions need google-re2: install conure[server]"
        )
    return LinearRegex(pattern, re2)


def check_pattern(pattern: str) -> None:
    """Check a pattern. Without RE2 this is left to the server.

    Raises:
        RegexError: if the pattern is not in the subset or too large.
    """
    if _load_re2() is not None:
        compile_regex(pattern)


def _load_re2() -> ModuleType | None:
    # Imported on first use: the language itself needs msgspec only.
    try:
        import re2
    except ImportError:
        return None
    module: ModuleType = re2
    return module


def _compile(re2: ModuleType, text: str, pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = MAX_MEMORY
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0]
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise RegexError(f"invalid pattern {pattern[:80]!r}: {reason}") from None
    except UnicodeEncodeError:
        raise RegexError(f"invalid pattern {pattern[:80]!r}: it is not valid Unicode") from None


class _Translation:
    """A pattern in Python's syntax, translated to RE2's."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN:
            raise RegexError(
                f"a pattern can have at most {MAX_PATTERN:,} characters, got {len(pattern):,}"
            )
        self._pattern = pattern
        self.first_group = 0
        """The user's first group in RE2's pattern; 0 (the whole match) if there is none."""
        self.end_groups: list[int] = []
        """The groups of `$`."""
        flags = _FLAGS.match(pattern)
        self._is_multiline = flags is not None and "m" in flags[1]
        self._num_groups = 0
        prefix = flags[0] if flags else ""
        tokens = _TOKEN.findall(pattern, len(prefix))
        self.text = prefix + self._translate(tokens)
        shorter = {_WORD: r"\w", _DIGIT: r"\d", r"\P{Nd}": r"\D", _SPACE: r"\s"}
        ascii_text = self.text
        for unicode_class, ascii_class in shorter.items():
            ascii_text = ascii_text.replace(unicode_class, ascii_class)
        self.ascii_text = ascii_text

    def _translate(self, tokens: list[str]) -> str:
        translated: list[str] = []
        is_in_class = False
        for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
            if token[0] == "\\":
                translated.append(self._escape(token, is_in_class=is_in_class))
            elif is_in_class:
                is_in_class = token != "]"
                translated += (_ESCAPES_IN_CLASS.get(char, char) for char in token)
            else:
                is_in_class = token[0] == "["
                translated.append(self._plain(token, following))
        return "".join(translated)

    def _escape(self, token: str, *, is_in_class: bool) -> str:
        char = token[1:2]
        if char in ("u", "U", "x") and len(token) > 2:
            return f"\\x{{{token[2:]}}}"
        if char.isascii() and char.isalnum() and char not in _ALLOWED_ESCAPES:
            reason = (
                "back-references are not supported, they need more than linear time"
                if char.isdigit()
                else f"the escape `{token}` is not supported"
            )
            raise self._error(reason)
        if char and not char.isascii():
            return char
        return (_ESCAPES_IN_CLASS if is_in_class else _ESCAPES).get(token, token)

    def _plain(self, token: str, following: str) -> str:
        if token in ("(", "(?P<"):
            if token == "(" and following == "?":
                raise self._error(
                    "only the groups `(...)`, `(?:...)` and `(?P<name>...)` are supported, and "
                    "flags `(?ims)` at the start; look-around needs more than linear time"
                )
            self._num_groups += 1
            self.first_group = self.first_group or self._num_groups
        elif token == "$" and not self._is_multiline:
            self._num_groups += 1
            self.end_groups.append(self._num_groups)
            return _END
        return "{0," if token == "{," else token

    def _error(self, reason: str) -> RegexError:
        return RegexError(f"invalid pattern {self._pattern[:80]!r}: {reason}")
