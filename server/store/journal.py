"""The journal: programs, values and events are durable before clients see them.

The journal is one SQLite file in WAL mode with `synchronous=FULL`. The event loop appends batches
of records and gets futures; one thread commits all waiting batches with one fsync and then resolves
their futures. Under load an fsync is shared by tens of batches, so durability costs latency (one or
two fsyncs) but hardly any throughput. Reads use read-only connections in other threads and see
committed records only.

    loop thread        append ---> queue ---> writer thread: BEGIN, rows, COMMIT (fsync)
                       futures <-- one call_soon_threadsafe per commit <--'
    reader threads     read-only connections, one snapshot per query

Out of scope: the content of programs, values and events, which are bytes. Receipts are the
exception: the schema sums their figures by tenant and day.

Invariants:
- A future of `append` that succeeds means that the batch is fsynced. Batches are atomic, and the
  order of `append` is the order on disk and the order in which futures resolve.
- The first value of a variable is final: a batch with a second one is rejected as a whole.
- A sequence number is assigned once, across crashes too: numbers are reserved on disk in blocks,
  and a crash skips the rest of a block.
- Damage is never ignored: a start with a damaged journal is refused without the option to
  recover, every record that is read is compared with its checksum, and a journal that is removed or
  hangs is not healthy.

All methods belong to the thread of one event loop. Cancelling a task that awaits a future of
`append` does not undo the append.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..program.errors import UnavailableError
from . import reader
from .damage.commit_log import CommitLog
from .damage.integrity import JournalReport, inspect
from .damage.salvage import complete_salvage, salvage
from .database import (
    JournalHead,
    begin_generation,
    check_file,
    fill_reserve,
    free_reserve,
    lock_folder,
    open_writer,
)
from .reader import JournalReader
from .records import (
    TRACE,
    AliasRecord,
    AliasRemoval,
    AppendRecord,
    DeleteRecord,
    DuplicateKeyError,
    EndRecord,
    EventRecord,
    JournalError,
    JournalStatus,
    PinRecord,
    ProcedureListing,
    ProcedureRecord,
    ProcedureRemoval,
    ProgramListing,
    ProgramRecord,
    Record,
    StoredProgram,
    UsageRecord,
    ValueRecord,
    WatchRecord,
)
from .retention import RetentionLimits, find_expired
from .turn_mark import TurnMark
from .writer import HANG_S, RETRY_AFTER_S, JournalWriter, WriteBatch

__all__ = [
    "TRACE",
    "AliasRecord",
    "AliasRemoval",
    "AppendRecord",
    "DeleteRecord",
    "DuplicateKeyError",
    "EndRecord",
    "EventRecord",
    "Journal",
    "JournalError",
    "JournalStatus",
    "PinRecord",
    "ProcedureRecord",
    "ProcedureRemoval",
    "ProgramListing",
    "ProgramRecord",
    "Record",
    "RetentionLimits",
    "StoredProgram",
    "UsageRecord",
    "ValueRecord",
    "WatchRecord",
]

logger = logging.getLogger(__name__)

NUM_READERS = 2
CLOSE_TIMEOUT_S = 5.0


class Journal:
    """The journal of a data folder. Create it with `open`."""

    def __init__(
        self, folder: Path, connection: sqlite3.Connection, lock: int, report: JournalReport
    ) -> None:
        self._commit_log = CommitLog(folder)  # first: a journal that was started has one
        head: JournalHead = begin_generation(connection)
        fill_reserve(folder)
        self.generation = head.generation
        """Number of times this journal was opened, including this time. Fences off earlier
        processes."""
        self.clock_shift_s = head.clock_shift_s
        """How far the wall clock was set forward since the last start on the same boot."""
        self.report = report
        """What the check found before the journal was opened."""
        self.turn_mark = TurnMark(folder)
        self.program_at_death = self.turn_mark.previous if head.was_running else None
        """The program that the last server was working on when it died."""
        self.folder = folder
        self._next_seq = head.next_seq
        self._connection = connection
        self._lock = lock
        self._num_pending = 0
        self._is_closed = False
        self._reader = JournalReader(folder, num_threads=NUM_READERS)
        self._writer = JournalWriter(
            folder,
            connection,
            self._commit_log,
            reserved_seq=head.reserved_seq,
            resolved=self._resolve,
        )

    @classmethod
    def open(cls, path: Path, *, recover: bool = False) -> Journal:
        """Open the journal in the data folder `path`, creating both if missing.

        Blocks while the journal is checked. The folder is created with mode 0700 and the files with
        0600.

        Args:
            path: the data folder.
            recover: continue with what is left of a damaged journal. The damaged files are kept in
                a folder beside it.

        Raises:
            JournalError: `store.locked` if another server uses the folder; `store.unusable` if it
                cannot be written, is not a journal, or was written by a newer version;
                `store.damaged` if records are lost or damaged, without `recover`.
        """
        lock = lock_folder(path)
        try:
            try:
                free_reserve(path)
                check_file(path)
                if (aside := complete_salvage(path)) is not None:
                    logger.warning("completed the interrupted recovery to %s", aside)
                report = inspect(path, is_thorough=True if recover else None)
                if not report.is_intact:
                    _handle_damage(path, report, recover=recover)
                connection = open_writer(path)
            except (sqlite3.Error, OSError) as error:
                raise _unusable(path, error) from error
            try:
                return cls(path, connection, lock, report)
            except (sqlite3.Error, OSError) as error:
                connection.close()
                raise _unusable(path, error) from error
        except BaseException:
            os.close(lock)
            raise

    async def close(self) -> None:
        """Write all appended batches, then close; safe to repeat.

        If writes still fail after 5 s, the remaining batches fail as unavailable.
        """
        if self._is_closed:
            return
        self._is_closed = True
        has_ended = await asyncio.to_thread(self._writer.join, CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._reader.close)
        if has_ended:
            self._release()
        else:
            # The thread still uses the connection, so the lock must last as long as the process.
            logger.error(
                "the disk does not respond: the journal stays open until the process exits"
            )

    @property
    def healthy(self) -> bool:
        """Whether the journal can be written and read, as far as is known."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Why the journal cannot be used now; None if it can.

        After a failed write, writing is retried every second.
        """
        busy_since = self._writer.busy_since
        if self._reader.damage is not None:
            return f"the journal is damaged: {self._reader.damage}"
        if not self._writer.healthy:
            return f"the journal cannot be written: {self._writer.last_error}"
        if busy_since is not None and (busy_s := time.monotonic() - busy_since) > HANG_S:
            return f"the journal cannot be written: a write has been waiting for {busy_s:.0f} s"
        return None

    def report_damage(self, what: str) -> None:
        """Note damage that was found elsewhere. The journal is not healthy until the next start."""
        self._reader.damage = what

    @property
    def last_seq(self) -> int:
        """Return the highest sequence number that may have been assigned; 0 initially."""
        return self._next_seq - 1

    def status(self) -> JournalStatus:
        """Return the state and counters of the journal."""
        return JournalStatus(
            healthy=self.healthy,
            num_pending=self._num_pending,
            num_commits=self._writer.num_commits,
            num_records=self._writer.num_records,
            last_seq=self.last_seq,
            last_error=self._writer.last_error,
        )

    # --- writing ------------------------------------------------------------------------

    def next_seq(self) -> int:
        """Assign the next sequence number: higher than all before, and never reused.

        Raises:
            UnavailableError: if writing fails and the reserved numbers (at least 500,000) are used
                up.
        """
        if self._next_seq >= self._writer.reserved_seq:
            raise _unavailable(self.problem)
        self._next_seq += 1
        return self._next_seq - 1

    def append(self, records: Sequence[Record], *, fail_fast: bool = False) -> asyncio.Future[None]:
        """Append records as one batch; never blocks.

        Args:
            records: any records, not changed afterwards. Records of a new program must not precede
                it.
            fail_fast: fail at once if writing fails, because a client waits and can retry. Other
                batches are retried until they are written.

        Returns:
            A future that resolves when the batch is durable. It fails with `JournalError`
            (`store.invariant`) if the batch contradicts written records, `DuplicateKeyError` if the
            idempotency key of its program is used, `UnavailableError` (`store.unavailable`) if
            writing fails under `fail_fast`, and `JournalError` (`store.broken`, `store.closed`) if
            the journal no longer writes.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            done.set_exception(JournalError("store.closed", "the journal is closed"))
        elif self._writer.broken is not None:
            done.set_exception(
                JournalError("store.broken", f"the journal is broken: {self._writer.broken}")
            )
        elif fail_fast and not self.healthy:
            done.set_exception(_unavailable(self.problem))
        else:
            self._num_pending += 1
            self._writer.put(WriteBatch(records, done, fail_fast))
        return done

    # --- reading ------------------------------------------------------------------------

    async def find_idempotent(self, tenant: str, key: str) -> tuple[str, bytes] | None:
        """Return the id and body hash of the tenant's program under this key, as long as it is
        stored.

        A submission in progress is not found; its `append` detects the conflict
        (`DuplicateKeyError`).
        """
        return await self._reader.read(partial(reader.find_idempotent, tenant=tenant, key=key))

    async def load_program(self, tenant: str, program: str) -> StoredProgram | None:
        """Return the tenant's program with its appends, values and end, but without its events."""
        return await self._reader.read(partial(reader.load_program, tenant=tenant, program=program))

    async def find_status(self, tenant: str, program: str) -> str | None:
        """Return the status of the tenant's program if it has ended."""
        return await self._reader.read(partial(reader.find_status, tenant=tenant, program=program))

    async def load_variable(
        self, tenant: str, program: str, variable: str
    ) -> tuple[EndRecord, ValueRecord | None] | None:
        """Return the end of the tenant's program, and the value of a variable if it has one; None
        if the program has not ended.
        """
        return await self._reader.read(
            partial(reader.load_variable, tenant=tenant, program=program, variable=variable)
        )

    async def find_procedure(
        self, tenant: str, name: str, *, version: str | None, alias: str | None
    ) -> ProcedureRecord | None:
        """Return a version of a procedure, by its hash or by an alias."""
        return await self._reader.read(
            partial(reader.find_procedure, tenant=tenant, name=name, version=version, alias=alias)
        )

    async def list_procedures(self, tenant: str, name: str | None) -> ProcedureListing:
        """Return the versions and aliases of a procedure, or of all procedures of a tenant."""
        return await self._reader.read(partial(reader.list_procedures, tenant=tenant, name=name))

    async def list_pins(self, now: float) -> list[PinRecord]:
        """Return the pins of all tenants that end after a time."""
        return await self._reader.read(partial(reader.list_pins, now=now))

    async def list_programs(
        self, tenant: str, *, status: str | None, before: int, limit: int, search: str = ""
    ) -> list[ProgramListing]:
        """Return the newest programs of a tenant; see `reader.list_programs`."""
        return await self._reader.read(
            partial(
                reader.list_programs,
                tenant=tenant,
                status=status,
                search=search,
                before=before,
                limit=limit,
            )
        )

    async def events(
        self,
        tenant: str,
        program: str,
        after: int = 0,
        limit: int = 1_000,
        max_bytes: int | None = None,
        *,
        is_trace: bool = False,
    ) -> list[EventRecord]:
        """Return up to `limit` events of the tenant's program after number `after`, in order; with
        `is_trace`, records of its trace.

        They have at most `max_bytes` of data, unless the first one is larger.
        """
        return await self._reader.read(
            partial(
                reader.events,
                tenant=tenant,
                program=program,
                after=after,
                limit=limit,
                max_bytes=max_bytes,
                is_trace=is_trace,
            )
        )

    async def usage(
        self, tenant: str, *, since: str | None = None, until: str | None = None
    ) -> list[UsageRecord]:
        """Return the summed receipts of a tenant's programs that ended between two days, both
        inclusive.

        Days are UTC, YYYY-MM-DD; None means without a bound.
        """
        return await self._reader.read(
            partial(reader.usage, tenant=tenant, since=since, until=until)
        )

    async def expired(self, limits: RetentionLimits, now: float) -> tuple[str, ...]:
        """Return the ids of ended programs that retention deletes next, at most 100.

        For the server only: the programs of all tenants are considered.
        """
        return await self._reader.read(partial(find_expired, limits=limits, now=now))

    async def unfinished(self) -> list[StoredProgram]:
        """Return every program that has not ended, oldest first, with all records needed to resume
        it.

        For the start of the server only: the programs of all tenants are returned.

        Raises:
            JournalError: `store.damaged`.
        """
        try:
            return await self._reader.read(reader.unfinished)
        except JournalError as error:
            raise _damaged(self.folder, error.message) from error

    # --- internals ------------------------------------------------------------------------

    def _resolve(self, batches: list[WriteBatch]) -> None:
        """Resolve futures; runs on the loop, once per commit."""
        self._num_pending -= len(batches)
        for batch in batches:
            if batch.done.done():
                continue  # The waiting task was cancelled.
            if batch.error is None:
                batch.done.set_result(None)
            else:
                batch.done.set_exception(batch.error)

    def _release(self) -> None:
        """Give back unused sequence numbers, close the connection and unlock the folder."""
        try:
            self._connection.execute(
                "UPDATE head SET next_seq = ?, is_running = 0", (self._next_seq,)
            )
            self._writer.checkpoint()
        except sqlite3.Error as error:
            logger.warning(
                "failed to give back unused sequence numbers, they will be skipped: %s", error
            )
        self._connection.close()
        self._commit_log.close()
        self.turn_mark.clear()
        self.turn_mark.close()
        os.close(self._lock)


def _handle_damage(folder: Path, report: JournalReport, *, recover: bool) -> None:
    """Replace a damaged journal with its readable part.

    Raises:
        JournalError: `store.damaged` without `recover`.
    """
    if not recover:
        raise _damaged(folder, report.summary)
    aside = salvage(folder, report)
    logger.warning(
        "recovered the journal in %s: %s; the damaged files and report.json are in %s",
        folder,
        report.summary,
        aside,
    )


def _damaged(folder: Path, what: str) -> JournalError:
    return JournalError(
        "store.damaged",
        f"the journal in {folder} is damaged: {what}. `conure journal check --data {folder}` lists "
        "everything; start with --recover to continue with what is left",
    )


def _unavailable(problem: str | None) -> UnavailableError:
    return UnavailableError(
        "store.unavailable",
        f"{problem or 'the journal cannot be written'}; retry later",
        retry_after_s=RETRY_AFTER_S,
    )


def _unusable(folder: Path, error: Exception) -> JournalError:
    return JournalError("store.unusable", f"cannot use the journal in {folder}: {error}")
