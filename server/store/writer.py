"""The thread that writes the journal: commits many batches at once and resolves their futures.

An fsync costs milliseconds and a row microseconds, so all batches that arrive during a commit go
into the next one. The writer never waits for more batches: with 8 producers in a closed loop,
groups had all 8 anyway, and waiting 2 ms reduced the throughput to a fifth (benchmarks/journal.py).
A group is written table by table. If a batch contradicts written records (a second value of a
variable, an unknown program), the group is rolled back and written again batch by batch under
savepoints, and only that batch is rejected. A group with a deletion is always written batch by
batch, because a batch may use the id of a program that an earlier batch deletes.

Invariants:
- A batch is written completely or not at all, and its future is resolved after the commit.
- Batches are committed and resolved in order of arrival. One exception: if writing fails, a
  `fail_fast` batch fails at once and is not retried, while all other batches are retried in order.
- A commit wakes the loop once, however many futures it resolves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..program.errors import UnavailableError
from .damage.commit_log import CommitLine, CommitLog
from .database import BUSY_TIMEOUT_MS, FILE_NAME, SEQ_BLOCK, empty_log, fill_reserve
from .records import (
    AliasRecord,
    AliasRemoval,
    DeleteRecord,
    DuplicateKeyError,
    EventRecord,
    JournalError,
    PinRecord,
    ProcedureRecord,
    ProcedureRemoval,
    ProgramRecord,
    Record,
)
from .retention import delete_programs, give_back_space
from .rows import STATEMENTS, TABLE_OF, name_of, row_of

logger = logging.getLogger(__name__)

MAX_GROUP = 512
"""Maximum number of batches per commit."""
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
RETRY_AFTER_S = 1.0
HANG_S = 10.0
"""How long a commit may take before the disk counts as hanging."""
MAX_WAIT_S = 30.0
"""How long a `fail_fast` batch may wait for its commit. Later its client has given up."""
MAX_LOG_BYTES = 8 * 1024 * 1024
"""Size of the write-ahead log at which it is checkpointed."""
IDLE_S = 5.0
"""Time without a write after which the write-ahead log is checkpointed."""

_CONTENT_ERRORS = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
    TypeError,
    ValueError,
)
"""Errors that the content of a batch can cause. Disk errors are OperationalErrors."""


@dataclass(slots=True, eq=False)
class WriteBatch:
    """Records that are written together, and the future of their write."""

    records: Sequence[Record]
    done: asyncio.Future[None]
    fail_fast: bool
    error: Exception | None = None
    queued_at: float = field(default_factory=time.monotonic)


class JournalWriter:
    """Owns the writing connection from construction to the end of `join`."""

    def __init__(
        self,
        folder: Path,
        connection: sqlite3.Connection,
        commit_log: CommitLog,
        *,
        reserved_seq: int,
        resolved: Callable[[list[WriteBatch]], None],
    ) -> None:
        self.healthy = True
        """Whether the last commit succeeded."""
        self.busy_since: float | None = None
        """Start of the write in progress, on the monotonic clock."""
        self.broken: str | None = None
        """Why the writer stopped writing; None while it works."""
        self.num_commits = 0
        self.num_records = 0
        self.last_error: str | None = None
        self.reserved_seq = reserved_seq
        self._path = folder / FILE_NAME
        self._log_path = folder / f"{FILE_NAME}-wal"
        self._file_id = _file_id(self._path)
        self._connection = connection
        self._commit_log = commit_log
        self._proof: tuple[str, int] | None = None
        """Table and row id in the line of the commit in progress."""
        self._has_log = True
        """Whether commits may have come since the last checkpoint."""
        self._has_unused_space = True
        """Whether the journal may have unused pages that can be given back to the disk."""
        self._resolved = resolved
        self._queue: queue.SimpleQueue[WriteBatch | None] = queue.SimpleQueue()
        self._is_closing = False
        self._stop_retrying = threading.Event()
        # A daemon: an unresponsive disk must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, batch: WriteBatch) -> None:
        """Queue a batch. Never blocks."""
        self._queue.put(batch)

    def join(self, timeout_s: float) -> bool:
        """Write all queued batches, then end the thread; blocks.

        If writing fails for `timeout_s`, the remaining batches fail as unavailable.

        Returns:
            Whether the thread has ended; if not, the disk does not respond and the connection is in
            use.
        """
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._stop_retrying.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        group: list[WriteBatch] = []
        try:
            while not self._is_closing:
                group = self._gather()
                self._commit_with_retries(group)
                group = []
        except Exception as error:  # No future may stay pending.
            logger.exception("the journal is broken and no longer writes")
            self.healthy = False
            self.broken = f"{type(error).__name__}: {error}"
            self._fail(group, self._broken_error)
        while not self._is_closing:
            self._fail(self._gather(), self._broken_error)

    def _broken_error(self) -> Exception:
        return JournalError("store.broken", f"the journal is broken: {self.broken}")

    def _gather(self) -> list[WriteBatch]:
        """Wait for a batch and return all queued ones; after a failure, return none to probe the
        disk.
        """
        timeout_s = IDLE_S if self._has_log else None
        try:
            first = self._queue.get(timeout=timeout_s if self.healthy else MAX_BACKOFF_S)
        except queue.Empty:
            if self.healthy:
                self._tidy_up()
            return []
        if first is None:
            self._is_closing = True
            return []
        group = [first]
        while len(group) < MAX_GROUP:
            try:
                batch = self._queue.get_nowait()
            except queue.Empty:
                break
            if batch is None:
                self._is_closing = True
                break
            group.append(batch)
        return group

    def _commit_with_retries(self, group: list[WriteBatch]) -> None:
        """Commit a group, retrying until it succeeds. An empty group probes the disk after a
        failure.

        Args:
            group: changed in place: it always has exactly the batches that are not resolved yet.
        """
        backoff_s = FIRST_BACKOFF_S
        while group or not self.healthy:
            now = time.monotonic()
            late = [each for each in group if each.fail_fast and now - each.queued_at > MAX_WAIT_S]
            if late:  # their clients were answered, or wait no longer
                self._fail(late, self._late_error)
                group[:] = [each for each in group if each not in late]
                continue
            self.busy_since = now
            failure = self._try_commit(group)
            if failure is None:
                self._report_health(None)
                committed, group[:] = group[:], []
                self._resolve(committed)
                self._checkpoint_if_large()
            self.busy_since = None
            if failure is None:
                return
            self._report_health(failure)
            group += self._drain()
            self._fail([batch for batch in group if batch.fail_fast], self._unavailable_error)
            group[:] = [batch for batch in group if not batch.fail_fast]
            if not group:
                return  # `_gather` waits for the next batch or probe.
            if self._stop_retrying.wait(backoff_s):
                self._fail(group, self._unavailable_error)
                return
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _drain(self) -> list[WriteBatch]:
        """Return all queued batches, so that no `fail_fast` batch waits while writing fails."""
        batches: list[WriteBatch] = []
        while True:
            try:
                batch = self._queue.get_nowait()
            except queue.Empty:
                return batches
            if batch is None:
                self._is_closing = True
            else:
                batches.append(batch)

    def _try_commit(self, group: list[WriteBatch]) -> Exception | None:
        """Commit a group once; return the error if the disk refused it."""
        if self.healthy and not any(batch.records for batch in group):
            return None  # Without records: all batches before are committed.
        records = [record for batch in group for record in batch.records]
        deletions = [record for record in records if isinstance(record, DeleteRecord)]
        is_secure = any(record.is_secure for record in deletions)
        self._proof = None
        try:
            self._check_folder()
            self._connection.execute(f"PRAGMA secure_delete = {'ON' if is_secure else 'OFF'}")
            self._connection.execute("BEGIN IMMEDIATE")
            self._write_group(group, in_order=bool(deletions))
            reserved_seq = self._reserve(group)
            query = "SELECT num_deletions FROM head"
            (num_deletions,) = self._connection.execute(query).fetchone()
            self._connection.execute("COMMIT")
        except (sqlite3.OperationalError, MemoryError) as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for batch in group:
                batch.error = None  # The next attempt decides again.
            return error
        self._has_log = True
        self._log_commit(group, num_deletions)
        if is_secure:
            self.checkpoint()  # the log has copies of the content
        self.reserved_seq = reserved_seq
        self.num_commits += 1
        self.num_records += sum(len(batch.records) for batch in group if batch.error is None)
        return None

    def _write_group(self, group: list[WriteBatch], *, in_order: bool) -> None:
        """Write a group table by table; batch by batch if `in_order`, or if a batch contradicts
        written records.
        """
        if not in_order:
            try:
                self._write(group)
                return
            except _CONTENT_ERRORS:
                self._proof = None
                self._connection.execute("ROLLBACK")
                self._connection.execute("BEGIN IMMEDIATE")
        for batch in group:
            self._write_alone(batch)

    def _write(self, group: list[WriteBatch]) -> None:
        """Write a group table by table, programs before the records that refer to them."""
        rows: dict[type[Record], list[tuple[object, ...]]] = {}
        for batch in group:
            for record in batch.records:
                if not isinstance(record, DeleteRecord):
                    rows.setdefault(type(record), []).append(row_of(record))
        for kind, statement in STATEMENTS:
            if kind not in rows:
                continue
            self._connection.executemany(statement, rows[kind])
            # Procedures have no row that proves a commit: storing them again writes none.
            if kind in TABLE_OF:  # read the id now: the next table may have row ids, too
                (rowid,) = self._connection.execute("SELECT last_insert_rowid()").fetchone()
                self._proof = (TABLE_OF[kind], rowid)
        for batch in group:
            for record in batch.records:
                if isinstance(record, DeleteRecord):
                    delete_programs(self._connection, record.programs)
                    self._proof = ("head", 0)
                    self._has_unused_space = True

    def _write_alone(self, batch: WriteBatch) -> None:
        """Write one batch; on a contradiction, roll it back and set its error."""
        self._connection.execute("SAVEPOINT batch")
        proof = self._proof
        try:
            self._write([batch])
        except _CONTENT_ERRORS as error:
            self._proof = proof
            self._connection.execute("ROLLBACK TO batch")
            batch.error = self._diagnose(batch, error)
            is_race = isinstance(batch.error, DuplicateKeyError)  # Two requests with one key.
            logger.log(
                logging.INFO if is_race else logging.ERROR, "batch rejected: %s", batch.error
            )
        self._connection.execute("RELEASE batch")

    def _diagnose(self, batch: WriteBatch, cause: Exception) -> JournalError:
        for record in batch.records:
            if isinstance(record, ProgramRecord) and record.idempotency_key is not None:
                row = self._connection.execute(
                    "SELECT id, body_hash FROM program WHERE tenant = ? AND idempotency_key = ?",
                    (record.tenant, record.idempotency_key),
                ).fetchone()
                if row is not None:
                    return DuplicateKeyError(*row)
        # Names that cannot be written may not be printable either.
        names = sorted({ascii(name_of(record)) for record in batch.records})
        return JournalError(
            "store.invariant",
            f"the batch contradicts written records ({cause}): {', '.join(names[:8])}",
        )

    # --- the logs -------------------------------------------------------------------------

    def _log_commit(self, group: list[WriteBatch], num_deletions: int) -> None:
        """Add a commit to the commit log."""
        accepted: dict[str, None] = {}
        changed: dict[str, None] = {}
        deleted: dict[str, None] = {}
        last_seq = 0
        for batch in group:
            if batch.error is not None:
                continue
            for record in batch.records:
                match record:
                    case DeleteRecord():
                        deleted.update(dict.fromkeys(record.programs))
                    case ProgramRecord():
                        accepted[record.id] = None
                        deleted.pop(record.id, None)
                    case EventRecord():
                        last_seq = max(last_seq, record.seq)
                        changed[record.program] = None
                    case ProcedureRecord() | AliasRecord() | PinRecord():
                        pass  # belongs to no program
                    case ProcedureRemoval() | AliasRemoval():
                        pass
                    case _:
                        changed[record.program] = None
        if self._proof is None:
            return
        ids = list(accepted), list(changed), list(deleted)
        self._commit_log.add(CommitLine(*self._proof, last_seq, *ids, num_deletions))

    def _checkpoint_if_large(self) -> None:
        try:
            size = os.stat(self._log_path).st_size
        except OSError:
            return
        if size > MAX_LOG_BYTES:
            self.checkpoint()

    def _tidy_up(self) -> None:
        """Use an idle moment: empty the logs, and give back space until a batch arrives.

        No space is given back while a reader uses the write-ahead log, which would take all moved
        pages.
        """
        self.busy_since = time.monotonic()
        self.checkpoint()
        while self._has_unused_space and not self._has_log and self._queue.empty():
            self.busy_since = time.monotonic()
            try:
                self._has_unused_space = give_back_space(self._connection)
            except sqlite3.OperationalError as error:
                logger.warning("unused space was not given back: %s", error)
                break  # The next idle moment after a write tries again.
            self._has_log = True
            self.checkpoint()
        self.busy_since = None

    def checkpoint(self) -> None:
        """Move the write-ahead log to the main file, and empty both logs if no reader uses them.

        For the writer's thread, and after `join`.
        """
        try:
            self._check_folder()
            self._connection.execute("PRAGMA busy_timeout = 0")
            if empty_log(self._connection):
                self._commit_log.clear()
                self._has_log = False
                fill_reserve(self._path.parent)
        except sqlite3.OperationalError as error:
            logger.warning("the journal was not checkpointed: %s", error)
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")

    def _check_folder(self) -> None:
        """Check that the open journal is the one in the data folder.

        Raises:
            OperationalError: if it was removed or replaced. What is written now would be lost.
        """
        if _file_id(self._path) != self._file_id:
            raise sqlite3.OperationalError(
                f"{self._path} was removed or replaced while the server uses it"
            )

    def _reserve(self, group: list[WriteBatch]) -> int:
        """Reserve more sequence numbers when half of the block is used."""
        last = max(
            (r.seq for batch in group for r in batch.records if isinstance(r, EventRecord)),
            default=0,
        )
        if self.healthy and last < self.reserved_seq - SEQ_BLOCK // 2:
            return self.reserved_seq
        reserved = max(self.reserved_seq, last + SEQ_BLOCK)
        self._connection.execute("UPDATE head SET next_seq = ?", (reserved,))
        return reserved

    def _report_health(self, failure: Exception | None) -> None:
        if failure is not None:
            self.last_error = str(failure)
            if self.healthy:
                logger.error("journal writes are failing: %s", failure)
        elif not self.healthy:
            logger.warning("journal writes have recovered")
        self.healthy = failure is None

    def _unavailable_error(self) -> Exception:
        return UnavailableError(
            "store.unavailable",
            f"the journal cannot be written: {self.last_error}; retry later",
            retry_after_s=RETRY_AFTER_S,
        )

    def _late_error(self) -> Exception:
        return UnavailableError(
            "store.unavailable",
            f"the journal is slow: a write waited for more than {MAX_WAIT_S:g} s; retry later",
            retry_after_s=RETRY_AFTER_S,
        )

    def _fail(self, batches: list[WriteBatch], reason: Callable[[], Exception]) -> None:
        for batch in batches:
            batch.error = reason()
        self._resolve(batches)

    def _resolve(self, batches: list[WriteBatch]) -> None:
        if not batches:
            return
        try:
            batches[0].done.get_loop().call_soon_threadsafe(self._resolved, batches)
        except RuntimeError:
            logger.debug(
                "the event loop is closed; dropping the results of %d batches", len(batches)
            )


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
