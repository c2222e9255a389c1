"""The journal: what the server has promised, on disk before anybody hears of it.

One SQLite file in WAL mode with `synchronous=FULL`. The loop hands over batches of records and
gets futures; one thread commits whatever waits, all of it with one fsync, and then resolves
those futures. Under load an fsync is shared by tens of batches, so durability costs latency
(one or two fsyncs) and hardly any throughput. Reads go through read-only connections in other
threads and see only what is committed.

    loop thread        append ---> queue ---> writer thread: BEGIN, rows, COMMIT (fsync)
                       futures <-- one call_soon_threadsafe per commit <--'
    reader threads     read-only connections, one snapshot per query

Knows the order of records and that a variable has one value and a program one end. Refuses to
know what a program, a value or an event says: bodies are bytes. Receipts are an exception: the
schema sums up their numbers, whatever their names, by tenant and day.

Kept true:
- a future of `append` that succeeds means fsynced; batches are atomic; order of `append` =
  order on disk = order in which futures resolve;
- the first value of a variable stands for ever: a batch with a second one is refused whole;
- a sequence number is handed out once, also across crashes: numbers are reserved on disk in
  blocks, and a crash skips the rest of a block.

All methods belong to the thread of one event loop. Cancelling somebody who awaits a future of
`append` takes nothing back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..program.errors import UnavailableError
from ..store import reader
from .database import begin_generation, lock_folder, open_writer
from .reader import Reader
from .records import (
    AppendRecord,
    DuplicateKeyError,
    EndRecord,
    EventRecord,
    JournalError,
    JournalStatus,
    ProgramRecord,
    Record,
    StoredProgram,
    UsageRecord,
    ValueRecord,
)
from .writer import RETRY_AFTER_S, Batch, Writer

__all__ = [
    "AppendRecord",
    "DuplicateKeyError",
    "EndRecord",
    "EventRecord",
    "Journal",
    "JournalError",
    "JournalStatus",
    "ProgramRecord",
    "Record",
    "StoredProgram",
    "UsageRecord",
    "ValueRecord",
]

logger = logging.getLogger(__name__)

NUM_READERS = 2
CLOSE_TIMEOUT_S = 5.0


class Journal:
    """The one journal of a data folder; made by `open`."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: int) -> None:
        head = begin_generation(connection)
        self.generation = head.generation
        """How often this journal was opened, this time included: a fence between lives."""
        self._next_seq = head.next_seq
        self._connection = connection
        self._lock = lock
        self._num_pending = 0
        self._is_closed = False
        self._reader = Reader(folder, num_threads=NUM_READERS)
        self._writer = Writer(connection, reserved_seq=head.reserved_seq, resolved=self._resolve)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open the journal in the data folder `path`, making both if they are missing.

        Blocks for some milliseconds. The folder is made 0700 and the files 0600.

        Raises:
            JournalError: `store.locked` if another server uses the folder; `store.unusable` if
                it cannot be written, is not a journal, or is one of a newer version.
        """
        lock = lock_folder(path)
        try:
            connection = open_writer(path)
            try:
                return cls(path, connection, lock)
            except sqlite3.Error as error:
                connection.close()
                raise JournalError(
                    "store.unusable", f"cannot use the journal in {path}: {error}"
                ) from error
        except BaseException:
            os.close(lock)
            raise

    async def close(self) -> None:
        """Write everything that was appended, then close; closing again is safe.

        If the disk refuses for 5 s, what is left fails as unavailable.
        """
        if self._is_closed:
            return
        self._is_closed = True
        has_ended = await asyncio.to_thread(self._writer.join, CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._reader.close)
        if has_ended:
            self._release()
        else:
            # The thread still holds the connection, so the folder stays ours until we die.
            logger.error("the disk hangs: the journal is left to the end of the process")

    @property
    def healthy(self) -> bool:
        """Whether the disk took the last commit; after trouble it is asked every second."""
        return self._writer.healthy

    @property
    def last_seq(self) -> int:
        """The highest sequence number that may have been handed out, 0 at first."""
        return self._next_seq - 1

    def status(self) -> JournalStatus:
        """How the journal does."""
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
        """Hand out the next sequence number: higher than any before, never again.

        Raises:
            UnavailableError: if the disk has not reserved more; some 500,000 numbers wait then.
        """
        if self._next_seq >= self._writer.reserved_seq:
            raise self._unavailable()
        self._next_seq += 1
        return self._next_seq - 1

    def append(self, records: Sequence[Record], *, accept: bool = False) -> asyncio.Future[None]:
        """Append records as one batch; never blocks.

        Args:
            records: in any mixture; those of a program that is new must not come before it.
                Must not be changed afterwards.
            accept: somebody waits who can be sent away: if the disk refuses, fail at once.
                Other batches are tried until the disk takes them.

        Returns:
            A future that resolves when the batch is on disk. It fails with
            `JournalError` (`store.invariant`) if the batch contradicts what is written,
            `DuplicateKeyError` if its program's idempotency key is taken,
            `UnavailableError` (`store.unavailable`) if an accept meets a disk that refuses, and
            `JournalError` (`store.broken`, `store.closed`) if nothing is written any more.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            done.set_exception(JournalError("store.closed", "the journal is closed"))
        elif self._writer.broken is not None:
            done.set_exception(
                JournalError("store.broken", f"the journal is broken: {self._writer.broken}")
            )
        elif accept and not self.healthy:
            done.set_exception(self._unavailable())
        else:
            self._num_pending += 1
            self._writer.put(Batch(records, done, accept))
        return done

    def barrier(self) -> asyncio.Future[None]:
        """A future that resolves when everything appended so far is on disk (or was refused)."""
        if self._num_pending > 0:
            return self.append(())
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    # --- reading ------------------------------------------------------------------------

    async def find_idempotent(self, tenant: str, key: str) -> tuple[str, bytes] | None:
        """The id and body hash of the tenant's program under this key, for as long as it is kept.

        A submission under way is not found: its `append` decides (`DuplicateKeyError`).
        """
        return await self._reader.read(partial(reader.find_idempotent, tenant=tenant, key=key))

    async def load_program(self, tenant: str, program: str) -> StoredProgram | None:
        """The tenant's program with its appends, values and end; its events are read apart."""
        return await self._reader.read(partial(reader.load_program, tenant=tenant, program=program))

    async def events(
        self, tenant: str, program: str, after: int = 0, limit: int = 1_000
    ) -> list[EventRecord]:
        """At most `limit` events of the tenant's program with a number above `after`, by number."""
        return await self._reader.read(
            partial(reader.events, tenant=tenant, program=program, after=after, limit=limit)
        )

    async def usage(
        self, tenant: str, *, since: str | None = None, until: str | None = None
    ) -> list[UsageRecord]:
        """The sums over the receipts of a tenant's programs that ended from one day (UTC,
        YYYY-MM-DD) to another, both included; None: from the first, to the last.
        """
        return await self._reader.read(
            partial(reader.usage, tenant=tenant, since=since, until=until)
        )

    async def unfinished(self) -> list[StoredProgram]:
        """Every program that has not ended, oldest first, with all that resuming it needs.

        Of all tenants: this is for the start of the server and for nothing else.
        """
        return await self._reader.read(reader.unfinished)

    # --- inside -------------------------------------------------------------------------

    def _resolve(self, batches: list[Batch]) -> None:
        """Runs on the loop, once per commit."""
        self._num_pending -= len(batches)
        for batch in batches:
            if batch.done.done():
                continue  # Who waited was cancelled.
            if batch.error is None:
                batch.done.set_result(None)
            else:
                batch.done.set_exception(batch.error)

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(
            "store.unavailable",
            f"the journal cannot be written now: {self._writer.last_error}",
            retry_after_s=RETRY_AFTER_S,
        )

    def _release(self) -> None:
        """Give back the unused sequence numbers, the connection and the folder."""
        try:
            self._connection.execute("UPDATE head SET next_seq = ?", (self._next_seq,))
        except sqlite3.Error as error:
            logger.warning("the unused sequence numbers are skipped: %s", error)
        self._connection.close()
        os.close(self._lock)
