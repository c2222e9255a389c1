"""Calls that run before the app asks for them, and which of them an app's call is.

A plan is made of calls whose prompts may read answers that do not exist yet. Once the
answers that it reads are known here, a planned call has a key, and the app's call with the
same key is that call. Knows keys and answers; refuses to know how a plan is made, where it
runs and how answers come.

Kept true: a planned call is given out once, and only to a call that a server could not tell
from it; a plan that was wrong costs work, never a different answer.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from conure.server.program.errors import ExpressionError
from conure.server.program.expression import evaluate
from conure.server.program.ir import Expression, Json
from conure.server.program.value import is_true

from .call import Call

SLOT = "\ue000{}\ue001"
"""What stands for an answer in a prompt while it is put together; from Unicode's private use."""


class Slot(NamedTuple):
    """A place in a prompt for text that only the server has."""

    mark: str
    expression: Expression


@dataclass(eq=False, slots=True)
class Planned:
    """One call of a plan."""

    variable: str
    """Where its answer goes; also the name of its node."""
    call: Call
    reads: frozenset[str]
    when: Expression = None
    """It runs only if this is true; None: always."""
    place: str = ""
    """The part of the app that it was planned for."""

    def node(self) -> dict[str, Json]:
        """The node that runs it."""
        common = {} if self.when is None else {"when": self.when}
        return self.call.node(f"{self.variable}_call", self.variable, **common)


@dataclass(eq=False, slots=True)
class Plan:
    """The planned calls that nobody asked for yet, and the answers that are known."""

    answers: dict[str, Json] = field(default_factory=dict)
    _waiting: list[Planned] = field(default_factory=list)
    _ready: dict[bytes, deque[Planned]] = field(default_factory=dict)

    def add(self, planned: Sequence[Planned]) -> None:
        """More calls."""
        self._waiting.extend(planned)
        self._settle()

    def learn(self, variable: str, value: Json) -> None:
        """An answer is there."""
        self.answers[variable] = value

    def forget(self, variable: str) -> None:
        """A planned call will not be answered; safe for one that was given out."""
        self._waiting = [each for each in self._waiting if each.variable != variable]
        for key, calls in list(self._ready.items()):
            left = deque(each for each in calls if each.variable != variable)
            if left:
                self._ready[key] = left
            else:
                del self._ready[key]

    def claim(self, call: Call) -> Planned | None:
        """The planned call that this one is, if there is one; it is not given out again."""
        self._settle()
        key = call.key()
        calls = self._ready.get(key)
        if not calls:
            return None
        planned = calls.popleft()
        if not calls:
            del self._ready[key]
        return planned

    def has(self, call: Call) -> bool:
        """Whether a call like this one is planned."""
        self._settle()
        return call.key() in self._ready

    def unclaimed(self) -> list[Planned]:
        """Planned calls that nobody asked for, without those that a condition rules out."""
        self._settle()
        return [*self._waiting, *(each for calls in self._ready.values() for each in calls)]

    def _settle(self) -> None:
        """Give keys to the calls that can have one now; drop those whose condition is false."""
        still: list[Planned] = []
        for planned in self._waiting:
            if not planned.reads <= self.answers.keys():
                still.append(planned)
            elif holds(planned.when, self.answers):
                # What cannot be put together, or is no text that travels, is nobody's call.
                with contextlib.suppress(ExpressionError, ValueError):
                    key = planned.call.key(self.answers)
                    self._ready.setdefault(key, deque()).append(planned)
        self._waiting = still


def holds(when: Expression, answers: Mapping[str, Json]) -> bool:
    """Whether a condition is true of the answers; what cannot be evaluated is not."""
    if when is None:
        return True
    try:
        return is_true(evaluate(when, answers))
    except ExpressionError:
        return False


def with_slots(call: Call, slots: Sequence[Slot]) -> Call | None:
    """The call whose prompt reads answers where marks stand; None if a mark is nowhere."""
    found: set[str] = set()

    def split(content: Json) -> Json:
        if isinstance(content, str):
            segments = _split(content, slots, found)
            return content if len(segments) == 1 and "text" in segments[0] else segments
        return [
            piece
            for segment in content or []
            for piece in (_split(segment["text"], slots, found) if "text" in segment else [segment])
        ]

    messages = None
    if call.messages is not None:
        messages = [
            {**message, "content": split(message.get("content"))} for message in call.messages
        ]
    prompt = None if call.prompt is None else split(call.prompt)
    made = replace(call, messages=messages, prompt=prompt)
    return made if found == {slot.mark for slot in slots} else None


def text_read(variable: str) -> Expression:
    """The text of an answer."""
    return {"get": [{"var": variable}, "content"]}


def fits(text: Expression, num_tokens: int) -> Expression:
    """True only if a text has at most so many tokens, whatever the tokenizer.

    A tokenizer over bytes makes at most one token of a byte: of a character in ASCII, and of
    a fourth of any other one.
    """
    is_ascii = {"eq": [{"find": [text, r"[^\x00-\x7f]"]}, None]}
    return {
        "or": [
            {"not": {"gt": [{"len": text}, num_tokens // 4]}},
            {"and": [{"not": {"gt": [{"len": text}, num_tokens]}}, is_ascii]},
        ]
    }


def _split(text: str, slots: Sequence[Slot], found: set[str]) -> list[dict[str, Json]]:
    segments: list[dict[str, Json]] = [{"text": text}]
    for slot in slots:
        made: list[dict[str, Json]] = []
        for segment in segments:
            pieces = segment["text"].split(slot.mark) if "text" in segment else []
            if len(pieces) < 2:
                made.append(segment)
                continue
            found.add(slot.mark)
            for index, piece in enumerate(pieces):
                if index:
                    made.append({"input": slot.expression})
                if piece:
                    made.append({"text": piece})
        segments = made
    return segments
