"""State of one constrained output: which tokens may follow.

A `ConstraintState` belongs to one Generate. After every token it provides the allowed ids
(`mask`), the ids that follow without alternative (`forced`; the model is not run for them), and
whether the text may end here (`is_satisfied`) or must end (`is_complete`).

Advancing takes about 20 microseconds and runs in the step loop. A grammar that turns out to be
slow is advanced in a thread of `compiler` while outputs of other grammars continue. An output fails
once its slow advances have used `BUDGET_S`.

Out of scope: contexts, threads and caches.

Invariants: `mask` allows an id exactly if the language has a text that begins with the tokens so
far and that id. Ids in `forced` are already consumed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from ..protocol import EngineError

SLOW_S: Final = 0.01
"""A grammar is advanced in a thread once one advance has taken more CPU time than this."""
BUDGET_S: Final = 2.0
"""CPU time that the slow advances of an output may take in total."""

ConstraintOutcome: TypeAlias = Literal["none", "met", "relaxed", "cut", "broken"]


class Matcher(Protocol):
    """The methods of `llguidance.LLMatcher` that are used here. That library is optional."""

    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_accepting(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def compute_bitmask(self) -> bytes: ...
    def consume_tokens(self, sampled_tokens: list[int], /) -> bool: ...
    def rollback(self, num_tokens: int, /) -> bool: ...


@dataclass(slots=True, eq=False)
class SharedLexer:
    """The lexer of one compiled grammar. It is locked while one of the outputs uses it."""

    num_jobs: int = 0
    """Number of outputs for which the advance thread uses the lexer, or is about to use it.

    Until it is 0, the other outputs of the grammar are advanced in that thread, too. Otherwise the
    step loop would wait for the lock.
    """


class ConstraintState:
    """What one output may contain next."""

    def __init__(self, source: str, key: bytes, eos_ids: Sequence[int], max_tokens: int) -> None:
        """Create a busy state. The compiler calls `start` once the grammar is compiled.

        Args:
            source: The constraint in llguidance's JSON form.
            key: Hash of the source.
            eos_ids: Tokens that end a text.
            max_tokens: Maximum tokens of the output.
        """
        self.source = source
        self.key = key
        self.is_busy = True
        """A worker thread owns the state. The fields below are not valid."""
        self.is_released = False
        """The output has ended. Worker threads skip the jobs that they still have for it."""
        self.is_relaxed = False
        """The grammar allows more than the schema it was compiled from."""
        self.compiled_source = source
        """The source that was compiled: the constraint, or its relaxed form."""
        self.mask = b""
        """One bit per id, little-endian. Ids beyond the last bit are not allowed."""
        self.forced: list[int] = []
        """Ids that followed the last token without alternative."""
        self.is_satisfied = False
        self.is_complete = False
        self.error: EngineError | None = None
        """Set if the output cannot continue. It fails with this error."""
        self.is_valid: bool | None = None
        """Of a relaxed constraint: whether the text matches the schema; None until validated."""
        self.is_slow = False
        self.is_exhausted = False
        """The matcher failed, possibly because of other outputs: all outputs of one compiled
        grammar share its lexer and the lexer's limits. `restart` may follow."""
        self.lexer = SharedLexer()
        """The lexer of the compiled grammar; before compilation, an unused one."""
        self._matcher: Matcher | None = None
        self._tokens: list[int] = []
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._used_s = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens so far, including forced ones."""
        return len(self._tokens)

    @property
    def outcome(self) -> ConstraintOutcome:
        """The outcome if the text ends here."""
        if not self.is_satisfied:
            return "cut"
        if not self.is_relaxed:
            return "met"
        return "broken" if self.is_valid is False else "relaxed"

    def start(self, matcher: Matcher) -> None:
        """Start with a copy of a compiled grammar, which this state owns from here on."""
        self._matcher = matcher
        self._advance([])

    def restart(self, matcher: Matcher) -> bool:
        """Consume all tokens so far with another copy of the grammar. Return False if it fails."""
        self._matcher = matcher
        self.is_exhausted = False
        self.error = None
        return self._consume_and_check(self._tokens)

    def advance(self, token_id: int) -> None:
        """Consume a token that the mask allows."""
        self._advance([token_id])

    def rewind(self, num_tokens: int, rest: list[int]) -> None:
        """Go back to where the text ends: behind its first tokens and a part of the next one.

        Args:
            num_tokens: Tokens that are whole in the text.
            rest: Tokens of the rest of the text. They are not tokens of the output.
        """
        matcher, num_dropped = self._matcher, len(self._tokens) - num_tokens
        del self._tokens[num_tokens:]
        self.forced = []
        self.is_satisfied = (
            matcher is not None
            and matcher.rollback(num_dropped)
            and matcher.consume_tokens(rest)
            and matcher.is_accepting()
        )

    def mask_without(self, banned: Sequence[int]) -> bytes:
        """Return the mask without some ids, or the full mask if no other id is allowed."""
        mask = _clear_bits(self.mask, banned)
        return bytes(mask) if mask.strip(b"\0") else self.mask

    def _advance(self, tokens: list[int]) -> None:
        start = time.thread_time()
        self.forced = []
        self._tokens += tokens
        self.is_exhausted = not self._consume_and_check(tokens)
        if self.error is None:
            self._charge(time.thread_time() - start)

    def _consume_and_check(self, tokens: list[int]) -> bool:
        """Consume tokens, and set the error if nothing can follow. Return False if this fails."""
        matcher = self._consume(tokens)
        is_error = matcher.is_error()
        if is_error:
            reason = matcher.get_error().partition("\n")[0]
            self.error = EngineError(
                "constraint.too_complex",
                "the grammar became too complex during generation; make it less ambiguous: "
                f"{reason}",
            )
        elif self.is_complete and not self.is_satisfied:
            self.error = EngineError(
                "constraint.invalid", "no text of the language starts with the text so far"
            )
        return not is_error

    def _consume(self, tokens: list[int]) -> Matcher:
        """Consume tokens and the forced tokens after them, and compute the next mask."""
        matcher = self._matcher
        assert matcher is not None, "start was not called"
        if tokens:
            matcher.consume_tokens(tokens)
        num_left = self._max_tokens - len(self._tokens)
        if not matcher.is_stopped() and (forced := matcher.compute_ff_tokens()[:num_left]):
            matcher.consume_tokens(forced)
            self.forced += forced
            self._tokens += forced
        self.is_satisfied = matcher.is_accepting()
        self.is_complete = matcher.is_stopped()
        if not self.is_complete and len(self._tokens) < self._max_tokens:
            self.mask = matcher.compute_bitmask()
            # The matcher does not stop at the end of some languages; it allows only EOS there.
            rest = _clear_bits(self.mask, self._eos_ids) if self.is_satisfied else self.mask
            self.is_complete = not rest.strip(b"\0")
        return matcher

    def _charge(self, seconds: float) -> None:
        """Charge the CPU time of a slow advance to the budget."""
        if seconds <= SLOW_S:
            # Not charged. Otherwise the fast advances of a long output would exceed the budget.
            return
        self.is_slow = True
        self._used_s += seconds
        if self._used_s > BUDGET_S:
            self.error = EngineError(
                "constraint.too_complex",
                f"the grammar took more than {BUDGET_S:g} s of CPU time for tokens that took more "
                f"than {1000 * SLOW_S:g} ms each; make it less ambiguous",
            )


def _clear_bits(mask: bytes, banned: Sequence[int]) -> bytearray:
    cleared = bytearray(mask)
    for token_id in banned:
        if token_id >> 3 < len(cleared):
            cleared[token_id >> 3] &= ~(1 << (token_id & 7))
    return cleared
