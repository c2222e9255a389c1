"""Constraints, looked at by an engine before a program that uses them is accepted.

Only an engine has the compiler, and a helper process to let it loose in; here is who was
asked, and what was answered. Answers are kept by the constraint's text, so that a program
that comes again costs no question.

Kept true: a question takes `ANSWER_S` at most; without an answer nothing is refused, for
the engine will look again when the call runs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from conure.engine import api

from ..program.errors import ProgramError, UnavailableError
from .engine import Engine

ANSWER_S: Final = 5.0
"""An engine takes 2 s for the worst constraint; others may be before it."""
BUDGET_S: Final = 10.0
"""That the constraints of one submission may take together."""
_MAX_KNOWN: Final = 4_096


class Grammars:
    """What engines say of constraints."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        """`engines` tells who can be asked now."""
        self._engines = engines
        self._known: OrderedDict[bytes, api.Checked] = OrderedDict()

    async def vet(self, constraints: Iterable[tuple[str, str]]) -> None:
        """Refuse constraints that no engine can keep.

        Args:
            constraints: pairs of a path in the submission and a grammar in llguidance's form.

        Raises:
            ProgramError: `constraint.invalid`, `constraint.too_large` or
                `constraint.too_complex`, with the path.
        """
        try:
            async with asyncio.timeout(BUDGET_S):
                for path, grammar in constraints:
                    found = await self._ask(grammar)
                    if found is not None and found.code:
                        raise ProgramError(found.code, found.message, path=path)
        except TimeoutError:
            return

    async def match(self, grammar: str, text: str | None) -> api.Checked:
        """What an engine says of a constraint, and of a text under it.

        Raises:
            UnavailableError: `engine.none` if no engine answers in time.
        """
        found = await (self._ask(grammar) if text is None else self._send(grammar, text))
        if found is None:
            raise UnavailableError("engine.none", "no engine answers", retry_after_s=2)
        return found

    async def _ask(self, grammar: str) -> api.Checked | None:
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        found = await self._send(grammar, None)
        if found is not None:
            self._known[key] = found
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    async def _send(self, grammar: str, text: str | None) -> api.Checked | None:
        """Ask the first engine that can be asked; None where there is none, or no answer."""
        for engine in self._engines():
            if engine.is_alive and "constraints" in engine.hello.capabilities:
                try:
                    return await asyncio.wait_for(engine.check(grammar, text), ANSWER_S)
                except (ConnectionError, TimeoutError):
                    return None
        return None
