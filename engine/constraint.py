"""Where an output stands in the language that it must belong to: what may come next.

A `Constraint` accompanies one Generate. After every token it says which ids may follow
(`mask`), which must (`forced`: there is no other way on, so no model is asked), and whether
the text could end here (`is_met`) or has to (`is_over`).

Moves are quick, some 20 microseconds, and made where the token was taken. A grammar whose
moves turn out to be slow is *held* and moved elsewhere (`constraints`), while the other
outputs of the engine go on; one that goes on being slow is given up.

Knows a compiled grammar; refuses to know contexts, threads and who caches what. Kept true:
`mask` allows an id exactly if the language has a text that begins with what was taken and
that id; an id of `forced` has been taken already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, TypeAlias

from .api import EngineError

SLOW_S: Final = 0.01
"""Processor time of a move from which on its grammar is moved aside."""
BUDGET_S: Final = 2.0
"""Processor time that slow moves of one output may take together."""

Verdict: TypeAlias = Literal["none", "met", "relaxed", "cut", "broken"]


class Matcher(Protocol):
    """What this file needs of `llguidance.LLMatcher`, which an engine can do without."""

    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_accepting(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def compute_bitmask(self) -> bytes: ...
    def consume_tokens(self, sampled_tokens: list[int], /) -> bool: ...


class Constraint:
    """What one output may say next."""

    def __init__(self, source: str, key: bytes, eos_ids: Sequence[int], room: int) -> None:
        """Begin held: `begin` follows when the grammar is compiled.

        Args:
            source: The constraint in llguidance's JSON form.
            key: Names the source.
            eos_ids: Tokens that end a text.
            room: Tokens that the output may have.
        """
        self.source = source
        self.key = key
        self.is_held = True
        """Somebody else moves it at the moment: nothing below means anything."""
        self.is_relaxed = False
        """The grammar allows more than the schema it was made from."""
        self.mask = b""
        """One bit for each id, little-endian; ids beyond the last bit are not allowed."""
        self.forced: list[int] = []
        """Ids that followed by themselves since the last token."""
        self.is_met = False
        self.is_over = False
        self.error: EngineError | None = None
        """Set where it cannot go on; the output fails with it."""
        self.is_valid: bool | None = None
        """Of a relaxed one: what its schema says of the whole text, once it was asked."""
        self._matcher: Matcher | None = None
        self._renew: Callable[[], Matcher] | None = None
        self._taken: list[int] = []
        self._eos_ids = eos_ids
        self._room = room
        self._spent_s = 0.0
        self.is_slow = False

    @property
    def num_taken(self) -> int:
        """Tokens so far, forced ones included."""
        return len(self._taken)

    @property
    def verdict(self) -> Verdict:
        """What can be said of the text if it ends here."""
        if not self.is_met:
            return "cut"
        if not self.is_relaxed:
            return "met"
        return "broken" if self.is_valid is False else "relaxed"

    def begin(self, matcher: Matcher, renew: Callable[[], Matcher]) -> None:
        """Start with a copy of a compiled grammar.

        Args:
            matcher: At the start of the language, this constraint's own.
            renew: Makes another one that shares nothing with others.
        """
        self._matcher = matcher
        self._renew = renew
        self._move([])

    def take(self, token_id: int) -> None:
        """Move on by a token that the mask allows."""
        self._move([token_id])

    def without(self, banned: Sequence[int]) -> bytes:
        """Return the mask without these ids; with them, if nothing else is allowed."""
        mask = _without(self.mask, banned)
        return bytes(mask) if mask.strip(b"\0") else self.mask

    def _move(self, tokens: list[int]) -> None:
        start = time.thread_time()
        self.forced = []
        self._taken += tokens
        matcher = self._step(tokens)
        if matcher.is_error():
            # Outputs under one compiled grammar share its lexer, and its limits with it:
            # what others used up should not end this one.
            assert self._renew is not None
            self._matcher = self._renew()
            matcher = self._step(self._taken)
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            self.error = EngineError(
                "constraint.too_complex",
                "the grammar became too complex while it was followed; make it less ambiguous: "
                f"{reason}",
            )
            return
        if self.is_over and not self.is_met:
            self.error = EngineError(
                "constraint.invalid", "no text of the language begins with what was said so far"
            )
            return
        self._spend(time.thread_time() - start)

    def _step(self, tokens: list[int]) -> Matcher:
        """Take tokens, and the forced ones that follow; find out what may come then."""
        matcher = self._matcher
        assert matcher is not None, "begin comes first"
        if tokens:
            matcher.consume_tokens(tokens)
        room = self._room - len(self._taken)
        if not matcher.is_stopped() and (forced := matcher.compute_ff_tokens()[:room]):
            matcher.consume_tokens(forced)
            self.forced += forced
            self._taken += forced
        self.is_met = matcher.is_accepting()
        self.is_over = matcher.is_stopped()
        if not self.is_over and len(self._taken) < self._room:
            self.mask = matcher.compute_bitmask()
            # Some languages end without saying so: nothing but EOS is left.
            rest = _without(self.mask, self._eos_ids) if self.is_met else self.mask
            self.is_over = not rest.strip(b"\0")
        return matcher

    def _spend(self, seconds: float) -> None:
        self.is_slow = self.is_slow or seconds > SLOW_S
        if not self.is_slow:
            return
        self._spent_s += seconds
        if self._spent_s > BUDGET_S:
            self.error = EngineError(
                "constraint.too_complex",
                f"following the grammar took more than {BUDGET_S:g} s; make it less ambiguous",
            )


def _without(mask: bytes, banned: Sequence[int]) -> bytearray:
    rest = bytearray(mask)
    for token_id in banned:
        if token_id >> 3 < len(rest):
            rest[token_id >> 3] &= ~(1 << (token_id & 7))
    return rest
