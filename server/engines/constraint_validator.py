"""Validation of constraints by an engine, before a program that uses them is accepted.

Only engines have the constraint compiler and the sandbox to run it in. Answers are cached by the
constraint's text, so a repeated program sends no request to an engine.

An engine may fail to validate, for example if it cannot start its sandbox. That says nothing about
the constraint, so it counts as no answer and is not cached.

Invariants: a request takes at most `ANSWER_S`. Without an answer the program is accepted, because
the engine validates again when the call runs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from typing import Final

from cachetools import LRUCache

from conure.engine import protocol

from ..program.errors import ProgramError, UnavailableError
from .protocol import Engine

ANSWER_S: Final = 10.0
"""An engine needs up to 8 s for one constraint."""
BUDGET_S: Final = 20.0
"""Time for all constraints of one submission."""
_MAX_CACHED: Final = 4_096


class ConstraintValidator:
    """Asks engines about constraints, and caches their answers."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        """Create a validator; `engines` returns the running engines."""
        self._engines = engines
        self._answers: LRUCache[bytes, protocol.Checked] = LRUCache(_MAX_CACHED)

    async def validate(self, constraints: Iterable[tuple[str, str]]) -> None:
        """Reject constraints that engines cannot enforce.

        Args:
            constraints: Pairs of a path in the submission and a grammar in llguidance's form.

        Raises:
            ProgramError: `constraint.invalid`, `constraint.too_large` or
                `constraint.too_complex`, with the path.
        """
        try:
            async with asyncio.timeout(BUDGET_S):
                for path, grammar in constraints:
                    answer = await self._validate_cached(grammar)
                    if answer is not None and answer.code in protocol.CONSTRAINT_FAULTS:
                        raise ProgramError(answer.code, answer.message, path=path)
        except TimeoutError:
            return

    async def match(self, grammar: str, text: str | None) -> protocol.Checked:
        """Return an engine's answer about a constraint, and about a text under it.

        Raises:
            UnavailableError: `engine.none` if no engine answers in time, or the code of an
                engine that failed to validate.
        """
        if text is None:
            answer = await self._validate_cached(grammar)
        else:
            answer = await self._validate(grammar, text)
        if answer is None:
            raise UnavailableError("engine.none", "no engine answers; retry", retry_after_s=2)
        if not _is_about_constraint(answer):
            raise UnavailableError(answer.code, answer.message, retry_after_s=2)
        return answer

    async def _validate_cached(self, grammar: str) -> protocol.Checked | None:
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        if (cached := self._answers.get(key)) is not None:
            return cached
        answer = await self._validate(grammar, None)
        if answer is not None and _is_about_constraint(answer):
            self._answers[key] = answer
        return answer

    async def _validate(self, grammar: str, text: str | None) -> protocol.Checked | None:
        """Validate on the first capable engine; return None if no engine answers."""
        for engine in self._engines():
            if engine.is_alive and "constraints" in engine.hello.capabilities:
                try:
                    return await asyncio.wait_for(
                        engine.validate_constraint(grammar, text), ANSWER_S
                    )
                except (ConnectionError, TimeoutError):
                    return None
        return None


def _is_about_constraint(answer: protocol.Checked) -> bool:
    """Return whether an answer accepts or rejects the constraint. A failed validation does not."""
    return not answer.code or answer.code in protocol.CONSTRAINT_FAULTS
