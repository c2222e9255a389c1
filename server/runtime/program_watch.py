"""The watch over programs: which one the server works on, and limits for those under suspicion.

Programs share one event loop, so a program that blocks it, or takes all memory, stops the server
for all programs, and would stop it again after every restart. The turn of each program is therefore
marked in a file that survives the process. The program whose turn did not end when the server died
is resumed under watch: its turns are limited in processor time and memory. A program that exceeds a
limit is quarantined: it ends with `program.quarantined`, and the others continue. A program during
whose turns the server dies `MAX_DEATHS` times without a new value is not resumed.

Invariants: a turn that is not watched costs two writes to memory. The limits are set for the length
of a watched turn only.
"""

from __future__ import annotations

import resource
import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType

from ..program.status import Problem
from ..store.journal import StoredProgram, WatchRecord
from ..store.turn_mark import TurnMark

QUARANTINED = "program.quarantined"
MAX_DEATHS = 3
MAX_TURN_CPU_S = 2.0
"""Processor time of a watched turn."""
MAX_TURN_BYTES = 512 * 1024 * 1024
"""Additional memory of a watched turn."""


class TurnLimitError(BaseException):
    """A watched turn exceeded a limit. Not an `Exception`, so that no node handles it."""


class ProgramWatch:
    """Marks the turns of programs, and limits the turns of watched programs."""

    def __init__(self) -> None:
        self.mark: TurnMark | None = None
        self.watched: set[str] = set()
        """Programs whose turns are limited."""
        self._depth = 0
        self._limits: _TurnLimits | None = None

    def turn(self, program: str) -> AbstractContextManager[None]:
        """Watch a turn of a program.

        Raises:
            TurnLimitError: if the program is watched and takes too much time or memory.
        """
        return _Turn(self, program)

    def begin(self, program: str) -> None:
        """Begin a turn of a program, or a part of one."""
        if self._depth == 0:
            if program in self.watched and threading.current_thread() is threading.main_thread():
                self._limits = _TurnLimits()
            if self.mark is not None:
                self.mark.set(program)
        self._depth += 1

    def end(self) -> None:
        """End a turn, or a part of one."""
        self._depth -= 1
        if self._depth:
            return
        if self._limits is not None:
            self._limits.remove()
            self._limits = None
        if self.mark is not None:
            self.mark.clear()


class _Turn:
    """The context manager of one turn. A class costs half of a generator, and turns are many."""

    def __init__(self, watch: ProgramWatch, program: str) -> None:
        self._watch = watch
        self._program = program

    def __enter__(self) -> None:
        self._watch.begin(self._program)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._watch.end()
        if isinstance(error, MemoryError) and self._program in self._watch.watched:
            raise TurnLimitError("too much memory") from error


class _TurnLimits:
    """Limits of the current turn. The error of the time limit is raised inside the turn."""

    def __init__(self) -> None:
        self._is_active = True
        self._before = signal.signal(signal.SIGPROF, self._exceed)
        self._memory = resource.getrlimit(resource.RLIMIT_AS)
        limit = _address_space() + MAX_TURN_BYTES
        hard = self._memory[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        signal.setitimer(signal.ITIMER_PROF, MAX_TURN_CPU_S)

    def _exceed(self, _: int, __: FrameType | None) -> None:
        if self._is_active:
            raise TurnLimitError(f"more than {MAX_TURN_CPU_S:g} s of processor time")

    def remove(self) -> None:
        """Restore the limits of the process."""
        self._is_active = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)
        resource.setrlimit(resource.RLIMIT_AS, self._memory)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def judge(stored: StoredProgram, *, was_at_death: bool) -> WatchRecord | None:
    """Return the watch over an unfinished program at a start; None if it is not suspected.

    Args:
        stored: the program.
        was_at_death: whether the last server died during a turn of the program.
    """
    before = stored.watch
    if before is not None and before.problem is not None:
        return before
    if not was_at_death:
        return before
    num_values = len(stored.values)
    has_progressed = before is None or before.num_values != num_values
    num_deaths = 1 if before is None or has_progressed else before.num_deaths + 1
    return WatchRecord(
        program=stored.id,
        num_deaths=num_deaths,
        num_values=num_values,
        problem=QUARANTINED if num_deaths >= MAX_DEATHS else None,
    )


def problem_of(code: str, detail: str = "") -> Problem:
    """Return the problem of a program that is not resumed, or not continued."""
    messages = {
        QUARANTINED: "the server died while it worked on this program; it is not run again",
        "program.damaged": "some records of this program are lost, so it will not run again; the "
        "values that remain are correct",
        "program.unreadable": "the program could not be resumed after a restart; the server's log "
        "has the cause",
    }
    message = messages[code]
    return Problem(code=code, message=f"{message} ({detail})" if detail else message)
