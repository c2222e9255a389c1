"""Resumes the unfinished programs of an earlier server process.

As many programs as `START_S` allows are resumed before the server is ready, the others afterwards
in the background, oldest first. A program that a client requests is resumed immediately. Watched
programs (`program_watch`) are resumed last.

Invariants: every unfinished program is resumed once, or ended with a code. The watch over a program
is durable before the program is resumed, if the disk can be written within `END_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from ...program.errors import RunError
from ...program.status import Problem
from ...store.journal import EndRecord, EventRecord, Journal, StoredProgram
from ..clock import format_timestamp
from ..program_run import ProgramRun
from ..program_state import ProgramState
from ..program_watch import QUARANTINED, TurnLimitError, judge, problem_of
from ..reporting.status import unrecoverable_end
from ..services import RuntimeServices
from .program_directory import ProgramDirectory
from .recovery import restore

logger = logging.getLogger(__name__)

START_S = 0.5
"""Time for programs that are resumed before the server is ready."""
END_TIMEOUT_S = 5.0
"""How long a start waits until the ends of programs that cannot be resumed are durable."""


class Resumption:
    """Resumes programs from the journal."""

    def __init__(
        self,
        journal: Journal,
        services: RuntimeServices,
        programs: ProgramDirectory,
        create_run: Callable[[ProgramState], ProgramRun],
        on_ended: Callable[[str], None],
    ) -> None:
        """Create the resumption of the programs in a journal.

        Args:
            journal: the journal.
            services: The services of the server.
            programs: where requests find the programs.
            create_run: makes the run of a restored program.
            on_ended: is called with the status of a program that cannot be resumed, once its end
                is durable.
        """
        self._journal = journal
        self._watch = services.watch
        self._clock = services.clock
        self._programs = programs
        self._create_run = create_run
        self._on_ended = on_ended
        self._ends: list[asyncio.Future[None]] = []
        programs.resume = self._resume

    async def start(self, unfinished: list[StoredProgram]) -> asyncio.Task[None]:
        """Resume programs for `START_S`; return the task that resumes the others."""
        pending = self._programs.pending
        suspects: dict[str, StoredProgram] = {}
        written: list[asyncio.Future[None]] = []
        for stored in unfinished:
            was_at_death = stored.id == self._journal.program_at_death
            watch = judge(stored, was_at_death=was_at_death)
            if watch is not None and watch.problem is not None:
                self._ends.append(self._end(stored, problem_of(watch.problem)))
            elif watch is not None:
                logger.warning("program %s ran when the server died; it is watched", stored.id)
                self._watch.watched.add(stored.id)
                suspects[stored.id] = stored
                written.append(self._journal.append([watch]))
            else:
                pending[stored.id] = stored
        if written:
            await asyncio.wait(written, timeout=END_TIMEOUT_S)
        pending.update(suspects)
        await self._resume_for(START_S)
        if self._ends:
            await asyncio.wait(self._ends, timeout=END_TIMEOUT_S)
        return asyncio.create_task(self._resume_rest())

    async def _resume_rest(self) -> None:
        while self._programs.pending:
            await self._resume_one()

    async def _resume_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._programs.pending and time.monotonic() < until:
            await self._resume_one()

    async def _resume_one(self) -> None:
        pending = self._programs.pending
        self._resume(pending.pop(next(iter(pending))))
        await asyncio.sleep(0)

    def _resume(self, stored: StoredProgram) -> None:
        """Resume a program; if it cannot be resumed, end it."""
        try:
            with self._watch.turn(stored.id):
                state, recovered = restore(stored, shift_s=self._clock.shift_s)
                self._create_run(state).resume(recovered)
        except TurnLimitError as error:
            problem = problem_of(QUARANTINED, f"a turn took {error}")
        except Exception:
            # One unreadable program must not keep the others from resuming.
            logger.exception("program %s cannot be resumed", stored.id)
            problem = problem_of("program.unreadable")
        else:
            return
        with contextlib.suppress(Exception):  # suspending a partly restored run may fail, too
            self._programs.discard(stored.id, RunError(problem.code, problem.message))
        self._ends.append(self._end(stored, problem))

    def _end(self, stored: StoredProgram, problem: Problem) -> asyncio.Future[None]:
        """End a program; the future resolves once the end is durable."""
        journal = self._journal
        now = self._clock.now()
        end = unrecoverable_end(stored, problem, at=now)
        seq = journal.next_seq()
        data = {
            "program": stored.id,
            "status": end.status,
            "receipt": msgspec.Raw(end.receipt),
            "code": problem.code,
            "message": problem.message,
            "seq": seq,
            "at": format_timestamp(now),
        }
        event = EventRecord(
            program=stored.id,
            seq=seq,
            type="program.finished",
            data=msgspec.json.encode(data),
            at=now,
        )
        written = journal.append([event, end])
        written.add_done_callback(partial(self._end_written, end))
        return written

    def _end_written(self, end: EndRecord, written: asyncio.Future[None]) -> None:
        if written.cancelled():
            return
        if (error := written.exception()) is not None:
            logger.error("the end of program %s was not written: %r", end.program, error)
        else:
            self._on_ended(end.status)
