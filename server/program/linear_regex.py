r"""Regular expressions in time linear in the text, whoever wrote the pattern.

Knows a subset of Python's syntax: literals, escapes, classes, `.`, groups, `|`, greedy and
lazy `* + ? {m,n}`, anchors, `\b`, and the flags `(?ims)` at the start. Refuses what has no
linear algorithm (back-references, look-around) and says so. Pure: text in, text out.

A pattern becomes a program for Pike's virtual machine (Thompson's simulation with
priorities and captures, https://swtch.com/~rsc/regexp/regexp2.html): every thread of the
machine advances by one character at a time and at most one thread stands at an
instruction, so the work is at most len(program) * len(text). Order of the threads is order
of preference, which gives the match that Python's `re` gives (except where a repeated part
may match nothing and one round of it is empty). Python's own engine is used only on single
characters: it knows what `\w` is, and it skips quickly to where a match may start.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from .regex_syntax import Parser, RegexError, Tree

MAX_PATTERN = 4_096
MAX_INSTRUCTIONS = 4_000

_Instruction: TypeAlias = tuple[str, int, int]
"""Name and up to two arguments: `set` its number, `split` and `jump` where to, `save` which."""
_Saves: TypeAlias = tuple[int, int, int]
"""Start of the match, start and end of group 1; -1 where not set."""
_Thread: TypeAlias = tuple[int, _Saves]


class StepsError(RuntimeError):
    """The text is too long for the steps that were allowed."""


class Found(NamedTuple):
    """The first match: group 1 if the pattern has one (None if it took no part), else all of it."""

    text: str | None
    start: int
    end: int


class Regex:
    """A compiled pattern.

    Raises:
        RegexError: if the pattern is not in the subset, or too large.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN:
            raise RegexError(f"a pattern may have {MAX_PATTERN:,} characters")
        flags = re.match(r"\(\?([ims]+)\)", pattern)
        self._flags = 0
        for flag in flags[1] if flags else "":
            self._flags |= {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}[flag]
        self._is_multiline = bool(self._flags & re.MULTILINE)
        parser = Parser(pattern, flags.end() if flags else 0)
        tree = parser.parse()
        self._has_group = parser.num_groups > 0
        self._program: list[_Instruction] = []
        self._emit(tree)
        self._program.append(("match", 0, 0))
        self._sets = [re.compile(source, self._flags) for source in parser.sets]
        self._accepts: list[dict[str, bool]] = [{} for _ in parser.sets]
        self._first, self._only_at_start = self._analyse_start()

    def find(self, text: str, *, max_steps: int) -> tuple[Found | None, int]:
        """The first match and the steps it took.

        Raises:
            StepsError: if more than `max_steps` would be needed.
        """
        best: tuple[_Saves, int] | None = None
        threads: list[_Thread] = []
        seen: set[int] = set()
        steps = position = 0
        while True:
            if best is None:
                if not threads:
                    start = self._next_start(text, position)
                    if start is None:
                        break
                    # The skip runs in C at a character per nanosecond or so.
                    steps += (start - position) >> 8
                    position = start
                if position == 0 or not self._only_at_start:
                    self._add(threads, seen, 0, (position, -1, -1), text, position)
            elif not threads:
                break
            steps += len(seen) + 1
            if steps > max_steps:
                raise StepsError(f"no answer after {max_steps:,} steps")
            threads, seen, ended = self._advance(threads, text, position)
            if ended is not None:
                best = (ended, position)
            if position == len(text):
                break
            position += 1
        return self._found(text, best), steps

    def _advance(
        self, threads: list[_Thread], text: str, position: int
    ) -> tuple[list[_Thread], set[int], _Saves | None]:
        """Move every thread over one character; a match cuts off the threads behind it."""
        char = text[position] if position < len(text) else ""
        following: list[_Thread] = []
        seen: set[int] = set()
        for counter, saves in threads:
            name, argument, _ = self._program[counter]
            if name == "match":
                return following, seen, saves
            if not char:
                continue
            known = self._accepts[argument]
            accepted = known.get(char)
            if accepted is None:
                accepted = known[char] = self._sets[argument].fullmatch(char) is not None
            if accepted:
                self._add(following, seen, counter + 1, saves, text, position + 1)
        return following, seen, None

    def _found(self, text: str, best: tuple[_Saves, int] | None) -> Found | None:
        if best is None:
            return None
        (start, group_start, group_end), end = best
        if not self._has_group:
            return Found(text[start:end], start, end)
        inside = text[group_start:group_end] if group_end >= 0 else None
        return Found(inside, start, end)

    def _add(
        self,
        threads: list[_Thread],
        seen: set[int],
        counter: int,
        saves: _Saves,
        text: str,
        position: int,
    ) -> None:
        """Follow jumps from `counter` to the instructions that read, best first."""
        stack = [(counter, saves)]
        while stack:
            counter, saves = stack.pop()
            if counter in seen:
                continue
            seen.add(counter)
            name, first, second = self._program[counter]
            if name == "split":
                stack.append((second, saves))
                stack.append((first, saves))
            elif name == "jump":
                stack.append((first, saves))
            elif name == "save":
                is_start = first == 0
                saved = (saves[0], position if is_start else saves[1], -1 if is_start else position)
                stack.append((counter + 1, saved))
            elif name in ("set", "match"):
                threads.append((counter, saves))
            elif _holds(name, text, position, is_multiline=self._is_multiline):
                stack.append((counter + 1, saves))

    def _next_start(self, text: str, position: int) -> int | None:
        """The next position where a match may start; None if there is none."""
        if self._only_at_start and position > 0:
            return None
        if self._first is None:
            return position
        found = self._first.search(text, position)
        return None if found is None else found.start()

    def _analyse_start(self) -> tuple[re.Pattern[str] | None, bool]:
        """What a match can start with (None: anything, or nothing), and if only at position 0."""
        sources: list[str] = []
        is_free = False
        only_at_start = True
        stack = [(0, False)]
        visited: set[tuple[int, bool]] = set()
        while stack:
            counter, anchored = stack.pop()
            if (counter, anchored) in visited:
                continue
            visited.add((counter, anchored))
            name, first, second = self._program[counter]
            if name == "split":
                stack += [(first, anchored), (second, anchored)]
            elif name == "jump":
                stack.append((first, anchored))
            elif name in ("set", "match"):
                only_at_start = only_at_start and anchored
                if name == "match":
                    is_free = True
                else:
                    sources.append(self._sets[first].pattern)
            else:
                is_start = name == "start" or (name == "^" and not self._is_multiline)
                stack.append((counter + 1, anchored or is_start))
        if is_free:
            return None, only_at_start
        return re.compile("|".join(dict.fromkeys(sources)), self._flags), only_at_start

    def _emit(self, tree: Tree) -> None:
        """Append the instructions of a syntax tree."""
        program = self._program
        if len(program) > MAX_INSTRUCTIONS:
            raise RegexError("the pattern is too large, bounded repetitions written out")
        name = tree[0]
        if name == "set":
            program.append(("set", tree[1], 0))
        elif name == "cat":
            for part in tree[1]:
                self._emit(part)
        elif name == "alt":
            self._emit_choice(tree[1])
        elif name == "repeat":
            self._emit_repeat(*tree[1:])
        elif name == "group":
            number, inside = tree[1:]
            if number == 1:
                program.append(("save", 0, 0))
            self._emit(inside)
            if number == 1:
                program.append(("save", 1, 0))
        else:
            program.append((name, 0, 0))

    def _emit_choice(self, branches: list[Tree]) -> None:
        program = self._program
        ends: list[int] = []
        for branch in branches[:-1]:
            fork = len(program)
            program.append(("split", 0, 0))
            self._emit(branch)
            ends.append(len(program))
            program.append(("jump", 0, 0))
            program[fork] = ("split", fork + 1, len(program))
        self._emit(branches[-1])
        for end in ends:
            program[end] = ("jump", len(program), 0)

    def _emit_repeat(self, inside: Tree, low: int, high: int | None, is_lazy: bool) -> None:
        program = self._program

        def fork(at: int, inwards: int, outwards: int) -> None:
            order = (outwards, inwards) if is_lazy else (inwards, outwards)
            program[at] = ("split", *order)

        start = len(program)
        for done in range(low):
            start = len(program)
            self._emit(inside)
            if len(program) == start:
                return  # nothing is nothing, however often
            if high is None and done == low - 1:
                program.append(("split", 0, 0))
                fork(len(program) - 1, start, len(program))
                return
        if high is None:
            # x* is written (x+)?, so that an x which matches nothing is still entered once.
            at = len(program)
            program.append(("split", 0, 0))
            self._emit(inside)
            program.append(("split", 0, 0))
            fork(len(program) - 1, at + 1, len(program))
            fork(at, at + 1, len(program))
            return
        forks: list[int] = []
        for _ in range(high - low):
            forks.append(len(program))
            program.append(("split", 0, 0))
            self._emit(inside)
            if len(program) == forks[-1] + 1:
                break
        for at in forks:
            fork(at, at + 1, len(program))


def _holds(name: str, text: str, position: int, *, is_multiline: bool) -> bool:
    """Whether an assertion holds between two characters."""
    at_start, at_end = position == 0, position == len(text)
    if name == "^":
        return at_start or (is_multiline and text[position - 1] == "\n")
    if name == "$":
        before_newline = not at_end and text[position] == "\n"
        return at_end or (before_newline and (is_multiline or position == len(text) - 1))
    if name == "start":
        return at_start
    if name == "end":
        return at_end
    before = not at_start and _is_word(text[position - 1])
    after = not at_end and _is_word(text[position])
    return (before != after) == (name == "boundary")


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"
