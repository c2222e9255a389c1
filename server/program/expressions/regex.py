r"""Regular expressions: a subset of Python's syntax, matched by RE2 in linear time.

A pattern may have literals, escapes, classes, `.`, groups, `|`, greedy and lazy `* + ? {m,n}`,
anchors, `\b`, and the flags `(?ims)` at the start. Back-references and look-around are refused.
Matches are those of Python's `re`, with these exceptions: `\b` looks at ASCII letters only, and so
do `\W` and `\S` in a class; a `$` before a final newline consumes the newline, so that nothing
can follow it in the pattern.

Compiling takes up to a microsecond per state (`regex_size`), so every caller that compiles patterns
of clients can limit the states. A pattern that was compiled recently costs nothing.

RE2 is part of the `server` extra. A client without it cannot evaluate `find`; the server can.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .regex_size import num_states

if TYPE_CHECKING:
    from types import ModuleType

MAX_PATTERN: Final = 4_096
MAX_MEMORY: Final = 4 << 20
"""Bytes of one compiled pattern and its automata."""
MAX_STATES: Final = 100_000
"""States of one pattern, as estimated: at most 0.1 s to compile."""
MAX_SUBMISSION_STATES: Final = 500_000
"""States of all patterns that one submission compiles."""
MAX_CACHED_STATES, MAX_CACHED = 1_000_000, 256
"""States, and number, of compiled patterns that are kept."""
MAX_KNOWN: Final = 4_096
"""Valid patterns that are not checked again."""
_MIN_STATES: Final = 16
"""States that take as long as compiling the shortest pattern."""
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
_ADVICE: Final = (
    r"repeat less, or write `[A-Za-z0-9_]` for `\w`, `[0-9]` for `\d` and `[^0-9]` for `\D`"
)
_END = r"(?:\z|(\n)\z)"
"""`$`: the end of the text, or before a newline there, which its group captures."""


class RegexError(ValueError):
    """The pattern is malformed, too large, or needs more than linear time."""


class PatternsTakeLongError(Exception):
    """The patterns of a trial have more states than the trial may compile."""


Limit: TypeAlias = Callable[[int], None]
"""A function that is called with the states of a pattern before it is compiled; may raise."""


class MissingRegexLibraryError(RegexError, ModuleNotFoundError):
    """RE2 is not installed."""


class LinearRegex:
    """A compiled pattern; use `compile_regex`."""

    def __init__(self, pattern: str, re2: ModuleType, limit: Limit | None = None) -> None:
        translation = _Translation(pattern)
        self.size = translation.num_states
        """The estimated number of states."""
        if limit is not None:
            limit(self.size)
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


class _RegexCache:
    """The patterns that were used last, compiled; and those that are known to be valid."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._compiled: OrderedDict[str, LinearRegex] = OrderedDict()
        self._num_states = 0
        self._valid: OrderedDict[str, None] = OrderedDict()

    def find(self, pattern: str) -> LinearRegex | None:
        with self._lock:
            regex = self._compiled.get(pattern)
            if regex is not None:
                self._compiled.move_to_end(pattern)
            return regex

    def add(self, pattern: str, regex: LinearRegex) -> None:
        with self._lock:
            if pattern not in self._compiled:
                self._num_states += regex.size
            self._compiled[pattern] = regex
            while self._num_states > MAX_CACHED_STATES or len(self._compiled) > MAX_CACHED:
                self._num_states -= self._compiled.popitem(last=False)[1].size
            self._valid[pattern] = None
            self._valid.move_to_end(pattern)
            if len(self._valid) > MAX_KNOWN:
                self._valid.popitem(last=False)

    def is_valid(self, pattern: str) -> bool:
        """Return whether the pattern is known to be valid."""
        return pattern in self._valid

    def clear(self) -> None:
        with self._lock:
            self._compiled.clear()
            self._valid.clear()
            self._num_states = 0


CACHE: Final = _RegexCache()
_check_limit: ContextVar[Limit | None] = ContextVar("check_limit", default=None)


def compile_regex(pattern: str, limit: Limit | None = None) -> LinearRegex:
    """Return a compiled pattern.

    Args:
        pattern: the pattern.
        limit: called with the number of states unless the pattern is compiled already.

    Raises:
        RegexError: if the pattern is not in the subset or too large.
        MissingRegexLibraryError: if RE2 is missing.
    """
    if (known := CACHE.find(pattern)) is not None:
        return known
    re2 = _load_re2()
    if re2 is None:
        raise MissingRegexLibraryError(
            "regular expressions need google-re2: install conure[server]"
        )
    regex = LinearRegex(pattern, re2, limit)
    CACHE.add(pattern, regex)
    return regex


def check_pattern(pattern: str) -> None:
    """Check a pattern, within the limit of `checking`. Without RE2 this is left to the server.

    Raises:
        RegexError: if the pattern is not in the subset or too large.
        PatternsTakeLongError: if a trial would take too long.
    """
    if _load_re2() is not None and not CACHE.is_valid(pattern):
        compile_regex(pattern, _check_limit.get())


@contextmanager
def checking(most: int = MAX_SUBMISSION_STATES, *, is_trial: bool = False) -> Iterator[None]:
    """Limit the states of all patterns that `check_pattern` compiles in the body of the `with`.

    Beyond the limit a trial raises PatternsTakeLongError, another check RegexError.
    """
    left = most

    def spend(states: int) -> None:
        nonlocal left
        left -= states
        if left >= 0:
            return
        if is_trial:
            raise PatternsTakeLongError
        raise RegexError(
            f"the patterns of one submission can have at most {most:,} states in all: {_ADVICE}"
        )

    token = _check_limit.set(spend)
    try:
        yield
    finally:
        _check_limit.reset(token)


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
        self.num_states = _MIN_STATES + num_states(
            pattern[len(prefix) :], ignores_case=flags is not None and "i" in flags[1]
        )
        if self.num_states > MAX_STATES:
            raise self._error(
                f"it has about {self.num_states:,} states, of which at most {MAX_STATES:,} are "
                f"allowed: {_ADVICE}"
            )
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
                is_in_class = not token.endswith("]")
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
