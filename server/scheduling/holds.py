"""Programs that have not begun, and the programs that run before them on each engine.

While the prompts of a program's first calls are prefilled, every other call on the engine waits
for its next token. A policy may therefore *hold* a program that would begin: its calls stay in the
queue, other calls pass them, and the programs with better ranks on the engine end sooner. A
program is held as a whole, so that a round decides once for all of its calls.

Out of scope: whether to hold, which is up to the policy.

Invariants: only calls of programs without running calls are held. No call is held on an engine
without a program of better rank. At most `MAX_HELD_PROGRAMS` are held, so a round stays short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from .request import ResourceRequest

MAX_HELD_PROGRAMS = 16


class WaitingCall(Protocol):
    """A call in a queue."""

    request: ResourceRequest
    is_released: bool


C = TypeVar("C", bound=WaitingCall)


class Opening(NamedTuple):
    """A program that would begin on an engine."""

    num_prefill_tokens: int
    """Prompt tokens that one engine would prefill for its waiting calls, which spread evenly over
    the engines."""
    num_waiting_programs: int
    """Programs that wait to begin, including this one."""


class ProgramsAhead(NamedTuple):
    """The programs on an engine that rank before a call."""

    num_programs: int
    num_steps: int
    """Steps until the last of them ends, if nothing delays them; at least 1."""


@dataclass(slots=True)
class _RunningProgram:
    num_calls: int
    rank: float
    end_step: int


class RunningPrograms:
    """The programs with a call on one engine."""

    def __init__(self) -> None:
        self._programs: dict[str, _RunningProgram] = {}

    def __len__(self) -> int:
        """Return the number of programs."""
        return len(self._programs)

    def start(self, request: ResourceRequest, rank: float, step: int) -> None:
        """Count a call that starts at a step of the engine."""
        known = self._programs.get(request.program)
        if known is None:
            known = self._programs[request.program] = _RunningProgram(0, rank, 0)
        known.num_calls += 1
        known.rank = min(known.rank, rank)
        self.begin_decode(request, step)

    def begin_decode(self, request: ResourceRequest, step: int) -> None:
        """Note that a call has all steps of its output before it."""
        known = self._programs[request.program]
        num_steps = max(request.num_remaining_steps, request.num_output)
        known.end_step = max(known.end_step, step + num_steps)

    def end(self, program: str) -> None:
        """Count a call that ended."""
        known = self._programs[program]
        known.num_calls -= 1
        if not known.num_calls:
            del self._programs[program]

    def ahead_of(self, rank: float, step: int) -> ProgramsAhead:
        """Return the programs of better rank than a call, at a step of the engine."""
        ahead = [each.end_step for each in self._programs.values() if each.rank < rank]
        return ProgramsAhead(len(ahead), max(max(ahead, default=step) - step, 1))


@dataclass(slots=True)
class _OpeningCalls:
    """The waiting first calls of one program."""

    num_calls: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class OpeningPrograms(Generic[C]):
    """The programs of one server that wait to begin."""

    held: dict[str, list[C]] = field(default_factory=dict)
    """Calls that wait outside of their queue's heap, by program."""
    _waiting: dict[str, _OpeningCalls] = field(default_factory=dict)

    def wait(self, request: ResourceRequest) -> None:
        """Count a call that was queued."""
        if request.opens_program:
            known = self._waiting.setdefault(request.program, _OpeningCalls())
            known.num_calls += 1
            known.num_tokens += request.num_prompt

    def leave(self, request: ResourceRequest) -> None:
        """Count a call that left its queue."""
        known = self._waiting.get(request.program)
        if request.opens_program and known is not None:
            known.num_calls -= 1
            known.num_tokens -= request.num_prompt
            if not known.num_calls:
                del self._waiting[request.program]

    def begun(self, program: str) -> None:
        """Forget a program: one of its calls has started, and the others may follow."""
        self._waiting.pop(program, None)

    def may_hold(self, request: ResourceRequest) -> bool:
        """Return whether a call belongs to a program that has not begun."""
        if request.program not in self._waiting:
            return False
        return request.program in self.held or len(self.held) < MAX_HELD_PROGRAMS

    def opening(
        self, request: ResourceRequest, num_shared_tokens: int, num_engines: int
    ) -> Opening:
        """Return what it takes one engine to begin a program.

        Args:
            request: a call of the program.
            num_shared_tokens: leading tokens of the call that the engine has. The first prefix of
                the calls counts once.
            num_engines: engines of the server; at least 1. A call runs on one of them.
        """
        known = self._waiting[request.program]
        num_shared = known.num_calls * num_shared_tokens
        if not num_shared and request.prefixes:
            num_shared = (known.num_calls - 1) * request.prefixes[0].num_tokens
        num_prefill = max(known.num_tokens - num_shared, 0)
        num_shares = min(num_engines, known.num_calls)
        return Opening(num_prefill // num_shares, len(self._waiting))

    def hold(self, call: C) -> None:
        """Hold a call that was taken from its heap."""
        self.held.setdefault(call.request.program, []).append(call)

    def pop_first(self) -> Iterator[C]:
        """Yield one held call of each program that is to be decided on again, and remove it.

        Released calls are dropped.
        """
        for program, calls in list(self.held.items()):
            waiting = [call for call in calls if not call.is_released]
            if waiting:
                yield waiting.pop(0)
            if waiting:
                self.held[program] = waiting
            else:
                del self.held[program]

    def pop_rest(self, program: str) -> list[C]:
        """Remove and return the held calls of a program that begins."""
        return [call for call in self.held.pop(program, ()) if not call.is_released]
