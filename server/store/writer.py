"""The thread that writes: takes batches from a queue, commits many at once, says so.

One fsync costs milliseconds and one row microseconds, so everything that waits while the
disk is busy goes into the next commit. A group never lingers for more: with 8 producers in a
closed loop, groups had all 8 anyway and 2 ms of lingering cost 5 times the throughput
(benchmarks/journal.py). A group is written table by table. Should a batch in
it contradict what stands (a second value for a variable, an unknown program), the group is
rolled back and written again batch by batch under savepoints, and only that batch is refused.

Kept true:
- a batch is on disk wholly or not at all, and its future is resolved after the commit;
- batches are committed and resolved in the order in which they came. The one exception is
  an accept that the disk refuses: it fails at once and is never tried again, while all other
  batches are tried, in order, until the disk takes them;
- a commit costs the loop one wake-up, however many futures it resolves.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ..program.errors import UnavailableError
from .database import SEQ_BLOCK
from .records import (
    AppendRecord,
    DuplicateKeyError,
    EndRecord,
    EventRecord,
    JournalError,
    ProgramRecord,
    Record,
    ValueRecord,
)

logger = logging.getLogger(__name__)

MAX_GROUP = 512
"""Batches of one commit."""
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
RETRY_AFTER_S = 1.0

# A missing program makes the subquery NULL, which the column refuses.
_NUMBER = "(SELECT number FROM program WHERE id = ?)"
_STATEMENTS: tuple[tuple[type[Record], str], ...] = (
    (
        ProgramRecord,
        "INSERT INTO program (id, tenant, idempotency_key, body_hash, created_at, body) "
        "VALUES (?, ?, ?, ?, ?, ?)",
    ),
    (AppendRecord, f"INSERT INTO appended (program, body) VALUES ({_NUMBER}, ?)"),
    (
        ValueRecord,
        "INSERT INTO value (program, variable, epoch, attempt, tokenizer_hash, token_ids, text, "
        f"value) VALUES ({_NUMBER}, ?, ?, ?, ?, ?, ?, ?)",
    ),
    (
        EventRecord,
        f"INSERT INTO event (program, seq, type, at, data) VALUES ({_NUMBER}, ?, ?, ?, ?)",
    ),
    (
        EndRecord,
        "INSERT INTO ending (program, status, finished_at, receipt, error, nodes) "
        f"VALUES ({_NUMBER}, ?, ?, ?, ?, ?)",
    ),
)
_REFUSED = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What one batch can cause by its content; the disk raises OperationalError."""


@dataclass(slots=True, eq=False)
class Batch:
    """Records that belong together, and who waits for them."""

    records: Sequence[Record]
    done: asyncio.Future[None]
    is_accept: bool
    error: Exception | None = None


class Writer:
    """Owns the writing connection from construction to the end of `join`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        reserved_seq: int,
        resolved: Callable[[list[Batch]], None],
    ) -> None:
        self.healthy = True
        self.broken: str | None = None
        """Why nothing is written any more; None while the writer works."""
        self.num_commits = 0
        self.num_records = 0
        self.last_error: str | None = None
        self.reserved_seq = reserved_seq
        self._connection = connection
        self._resolved = resolved
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._is_closing = False
        self._abandoned = threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Hand a batch over. Never blocks."""
        self._queue.put(batch)

    def join(self, timeout_s: float) -> bool:
        """Write what was handed over, then end the thread; blocks.

        After `timeout_s` without the disk's consent the rest fails as unavailable.

        Returns:
            Whether the thread has ended; if not, the disk hangs and the connection is in use.
        """
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._abandoned.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        group: list[Batch] = []
        try:
            while not self._is_closing:
                group = self._gather()
                self._settle(group)
                group = []
        except Exception as error:  # Whatever it is, nobody may wait for ever.
            logger.exception("the journal is broken, nothing is written any more")
            self.healthy = False
            self.broken = f"{type(error).__name__}: {error}"
            self._fail(group, self._refusal)
        while not self._is_closing:
            self._fail(self._gather(), self._refusal)

    def _refusal(self) -> Exception:
        return JournalError("store.broken", f"the journal is broken: {self.broken}")

    def _gather(self) -> list[Batch]:
        """Wait for a batch and take what is there; after trouble, return empty to probe."""
        try:
            first = self._queue.get(timeout=None if self.healthy else MAX_BACKOFF_S)
        except queue.Empty:
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

    def _settle(self, group: list[Batch]) -> None:
        """Commit a group, as often as it takes; an empty one asks the disk how it does."""
        backoff_s = FIRST_BACKOFF_S
        while group or not self.healthy:
            failure = self._attempt(group)
            if failure is None:
                self._report_health(None)
                self._resolve(group)
                return
            self._report_health(failure)
            group += self._drain()
            self._fail([batch for batch in group if batch.is_accept], self._no_disk)
            group = [batch for batch in group if not batch.is_accept]
            if not group:
                return  # Back to waiting; the next probe comes from there.
            if self._abandoned.wait(backoff_s):
                self._fail(group, self._no_disk)
                return
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _drain(self) -> list[Batch]:
        """Take everything that waits, so that no accept waits for a disk that refuses."""
        batches: list[Batch] = []
        while True:
            try:
                batch = self._queue.get_nowait()
            except queue.Empty:
                return batches
            if batch is None:
                self._is_closing = True
            else:
                batches.append(batch)

    def _attempt(self, group: list[Batch]) -> Exception | None:
        """Commit a group once; returns what the disk said if it refused."""
        if self.healthy and not any(batch.records for batch in group):
            return None  # Barriers alone: what they wait for was committed before them.
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._write(group)
            except _REFUSED:
                self._connection.execute("ROLLBACK")
                self._connection.execute("BEGIN IMMEDIATE")
                for batch in group:
                    self._write_alone(batch)
            reserved_seq = self._reserve(group)
            self._connection.execute("COMMIT")
        except (sqlite3.OperationalError, MemoryError) as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for batch in group:
                batch.error = None  # Decided again with the next attempt.
            return error
        self.reserved_seq = reserved_seq
        self.num_commits += 1
        self.num_records += sum(len(batch.records) for batch in group if batch.error is None)
        return None

    def _write(self, group: list[Batch]) -> None:
        """Write a group table by table: a program stands before what refers to it."""
        rows: dict[type[Record], list[tuple[object, ...]]] = {}
        for batch in group:
            for record in batch.records:
                rows.setdefault(type(record), []).append(_row(record))
        for kind, statement in _STATEMENTS:
            if kind in rows:
                self._connection.executemany(statement, rows[kind])

    def _write_alone(self, batch: Batch) -> None:
        """Write one batch; if it cannot stand, take back all of it and note why."""
        self._connection.execute("SAVEPOINT batch")
        try:
            self._write([batch])
        except _REFUSED as error:
            self._connection.execute("ROLLBACK TO batch")
            batch.error = self._explain(batch, error)
            is_race = isinstance(batch.error, DuplicateKeyError)  # Two requests with one key.
            logger.log(logging.INFO if is_race else logging.ERROR, "refused: %s", batch.error)
        self._connection.execute("RELEASE batch")

    def _explain(self, batch: Batch, cause: Exception) -> JournalError:
        for record in batch.records:
            if isinstance(record, ProgramRecord) and record.idempotency_key is not None:
                row = self._connection.execute(
                    "SELECT id, body_hash FROM program WHERE tenant = ? AND idempotency_key = ?",
                    (record.tenant, record.idempotency_key),
                ).fetchone()
                if row is not None:
                    return DuplicateKeyError(*row)
        # What cannot be written cannot always be printed either.
        names = sorted({ascii(_name(record)) for record in batch.records})
        return JournalError(
            "store.invariant", f"contradicts what is written ({cause}): {', '.join(names[:8])}"
        )

    def _reserve(self, group: list[Batch]) -> int:
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
                logger.error("the disk refuses the journal: %s", failure)
        elif not self.healthy:
            logger.warning("the disk takes the journal again")
        self.healthy = failure is None

    def _no_disk(self) -> Exception:
        return UnavailableError(
            "store.unavailable",
            f"the journal cannot be written now: {self.last_error}",
            retry_after_s=RETRY_AFTER_S,
        )

    def _fail(self, batches: list[Batch], reason: Callable[[], Exception]) -> None:
        for batch in batches:
            batch.error = reason()
        self._resolve(batches)

    def _resolve(self, batches: list[Batch]) -> None:
        if not batches:
            return
        try:
            batches[0].done.get_loop().call_soon_threadsafe(self._resolved, batches)
        except RuntimeError:
            logger.debug("the loop is closed, nobody waits for %d batches", len(batches))


def _row(record: Record) -> tuple[object, ...]:
    """The parameters of the statement that writes a record."""
    match record:
        case ProgramRecord(id=id_):
            return (
                id_,
                record.tenant,
                record.idempotency_key,
                record.body_hash,
                record.created_at,
                record.body,
            )
        case AppendRecord():
            return record.program, record.body
        case ValueRecord(token_ids=ids):
            return (
                record.program,
                record.variable,
                record.epoch,
                record.attempt,
                record.tokenizer_hash,
                None if ids is None else msgspec.msgpack.encode(ids),
                record.text,
                record.value,
            )
        case EventRecord():
            return record.program, record.seq, record.type, record.at, record.data
        case EndRecord():
            return (
                record.program,
                record.status,
                record.finished_at,
                record.receipt,
                record.error,
                record.nodes,
            )


def _name(record: Record) -> str:
    """What to call a record in an error."""
    match record:
        case ProgramRecord():
            return f"program {record.id}"
        case ValueRecord():
            return f"value of {record.variable} in {record.program}"
        case EventRecord():
            return f"event {record.seq} of {record.program}"
        case EndRecord():
            return f"end of {record.program}"
        case AppendRecord():
            return f"nodes of {record.program}"
