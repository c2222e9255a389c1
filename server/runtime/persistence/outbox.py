"""The outbox of one program: writes its records to the journal, then publishes them.

The records and events of one turn of the event loop go to the journal as one batch. When the
batch is durable, its events are published to readers and the waiters of its variables wake. So
nothing that has left the server is missing after a crash, and every durable record has its
predecessors.

Invariants: batches are written in the order in which their records were added, after the program
itself. A waiter wakes exactly once, by its variable or by the end of the program, and only after
that is durable. Records that are not durable yet have a bound: a program whose records exceed it
continues when the journal has caught up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import msgspec

from ...program.errors import ConureError, RunError, UnavailableError
from ...program.ir import Json
from ...program.status import Event, EventType, Problem
from ...store.journal import (
    TRACE,
    AppendRecord,
    EndRecord,
    EventRecord,
    Journal,
    ProgramRecord,
    ValueRecord,
)
from ..clock import SteadyClock
from ..quota import ProgramQuota
from ..reporting.trace_records import TraceRecord, UntracedCall
from ..turns import Turns
from .event_stream import EventStream

OutboxRecord: TypeAlias = ProgramRecord | AppendRecord | ValueRecord | EventRecord | EndRecord
"""What a program writes."""

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
MAX_PENDING_BYTES: Final = 2 * 1024 * 1024
"""Maximum bytes of records that are not durable. A program above it waits for the journal."""
_LIMITED: Final[frozenset[EventType]] = frozenset({"client.requested", "yield"})
"""Events with data of the program. `NodeContext.publish` checks values before their events."""


@dataclass(slots=True)
class _Batch:
    records: list[OutboxRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    is_last: bool = False
    num_bytes: int = 0


class Outbox:
    """Persists one program's records in order and publishes them once they are durable."""

    def __init__(
        self,
        program: str,
        journal: Journal,
        events: EventStream,
        quota: ProgramQuota,
        clock: SteadyClock,
        on_ended: Callable[[], None],
    ) -> None:
        self.durable_variables: set[str] = set()
        """Variables whose value, or the lack of it, is durable."""
        self._rejected: dict[str, BaseException] = {}
        self._program = program
        self._journal = journal
        self._clock = clock
        self._events = events
        self._quota = quota
        self._on_ended = on_ended
        self._batch = _Batch()
        self._pending_bytes = 0
        """JSON of the records that were added and are not durable."""
        self._delayed: list[Callable[[], None]] = []
        """Work that continues when the journal has caught up."""
        self._is_scheduled = False
        self._accepting: asyncio.Future[None] | None = None
        """Set while the program itself is being written; all other batches wait for it."""
        self._written: asyncio.Future[None] | None = None
        """The write of the last batch."""
        self._failure: BaseException | None = None
        """Why the journal rejected a batch, the first one if it rejected several."""
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        """Whether the end of the program is durable."""
        return self._ended.done() and self._ended.exception() is None

    @property
    def has_waiters(self) -> bool:
        """Whether a request waits for a variable."""
        return any(self._waiters.values())

    # --- adding ---------------------------------------------------------------------------

    def emit(self, event_type: EventType, **data: Json) -> None:
        """Add an event.

        Raises:
            RunError: `quota.journal_bytes` or `quota.events` if an event with data of the program
                (`_LIMITED`) does not fit.
        """
        now = self._clock.now()
        seq = self._journal.next_seq()
        body: dict[str, Json] = {
            "program": self._program,
            **data,
            "seq": seq,
            "at": self._clock.timestamp(now),
        }
        encoded = msgspec.json.encode(body)
        if event_type in _LIMITED:
            self._quota.check_journal(len(encoded))
        self._quota.num_events += 1
        record = EventRecord(program=self._program, seq=seq, type=event_type, data=encoded, at=now)
        self._add(record, len(encoded))
        self._batch.events.append(Event(seq, event_type, body, encoded))

    def record_trace(self, record: TraceRecord) -> None:
        """Add a record of the program's trace, or the reason why it does not fit."""
        encoded = msgspec.json.encode(record)
        try:
            self._quota.check_journal(len(encoded))
        except RunError as error:
            encoded = msgspec.json.encode(
                UntracedCall(
                    node=record.node,
                    job=record.job,
                    finished_at=record.finished_at,
                    reason=Problem(code=error.code, message=error.message),
                )
            )
        self._quota.num_events += 1
        seq, now = self._journal.next_seq(), self._clock.now()
        self.add(EventRecord(program=self._program, seq=seq, type=TRACE, data=encoded, at=now))

    def add(self, record: OutboxRecord) -> None:
        """Add a record."""
        self._add(record, _size(record))

    def _add(self, record: OutboxRecord, size: int) -> None:
        self._quota.journal_bytes += size
        self._pending_bytes += size
        self._batch.num_bytes += size
        self._batch.records.append(record)
        self._schedule()

    def wait_turn(self, turns: Turns, work: Callable[[], None]) -> None:
        """Continue work in a later turn, and not before the journal has caught up: when at most
        `MAX_PENDING_BYTES` of records are not durable.
        """
        if self._pending_bytes <= MAX_PENDING_BYTES:
            turns.call_later(work)
        else:
            self._delayed.append(partial(turns.call_later, work))

    def mark_durable_on_commit(self, variables: Iterable[str]) -> None:
        """Mark variables as durable, and wake their waiters, once all records so far are."""
        self._batch.resolved.extend(variables)
        self._schedule()

    def accept(self, record: ProgramRecord) -> asyncio.Future[None]:
        """Write a new program to the journal, followed by everything added so far.

        The future fails if the journal rejects the program. Then nothing of it is stored, and
        records added later are not written.
        """
        self._is_scheduled = False
        self._quota.journal_bytes += _size(record)
        batch, self._batch = self._batch, _Batch()
        accepting = self._accepting = self._journal.append([record, *batch.records], fail_fast=True)

        def on_accepted(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._accepting = None
                self._on_written(done, batch)
                if not self._ended.done():  # otherwise the server is stopping
                    self.flush()

        accepting.add_done_callback(on_accepted)
        return accepting

    def end(self) -> None:
        """Write the last batch. All waiters wake once it is durable."""
        self._batch.is_last = True
        self.flush()

    def abandon(self, reason: ConureError | None = None) -> None:
        """Fail all waiters, and do not report the end.

        Args:
            reason: their error; None: the server stops.
        """
        error = reason or UnavailableError(
            "server.draining", "the server is stopping", retry_after_s=RETRY_AFTER_S
        )
        _fail([self._ended, *(each for many in self._waiters.values() for each in many)], error)
        self._waiters.clear()
        self._delayed.clear()
        self._on_ended = _ignore

    # --- writing --------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the current batch now instead of at the end of this turn of the loop."""
        self._is_scheduled = False
        if self._accepting is not None:
            return  # written once the program itself is durable
        batch, self._batch = self._batch, _Batch()
        if batch.records or batch.resolved or batch.is_last:
            self._written = written = self._journal.append(batch.records)
            written.add_done_callback(lambda done: self._on_written(done, batch))

    async def barrier(self) -> None:
        """Wait until everything added so far is durable.

        Raises:
            ConureError: if the journal rejected the program.
            JournalError: if the journal rejected any batch of the program.
        """
        if self._accepting is not None:
            await asyncio.shield(self._accepting)
        self.flush()
        if self._written is not None:
            await asyncio.shield(self._written)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_if_scheduled)

    def _flush_if_scheduled(self) -> None:
        if self._is_scheduled:
            self.flush()

    def _on_written(self, done: asyncio.Future[None], batch: _Batch) -> None:
        self._pending_bytes -= batch.num_bytes
        self._finish(done, batch)
        if self._pending_bytes <= MAX_PENDING_BYTES:
            delayed, self._delayed = self._delayed, []
            for wait_turn in delayed:
                wait_turn()

    def _finish(self, done: asyncio.Future[None], batch: _Batch) -> None:
        """Publish a batch that is durable, or fail one that was rejected."""
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            # The journal retries failed writes, so a batch that it rejects is a bug of the server.
            logger.error("program %s: a batch was not written: %r", self._program, error)
            self._reject(batch, error)
            return
        self._events.publish(batch.events)
        for variable in batch.resolved:
            self.durable_variables.add(variable)
            _wake(self._waiters.pop(variable, []))
        if batch.is_last and not self._ended.done():
            self._events.close()
            for waiters in self._waiters.values():
                _wake(waiters)
            self._waiters.clear()
            self._ended.set_result(None)
            on_ended, self._on_ended = self._on_ended, _ignore
            on_ended()

    def _reject(self, batch: _Batch, error: BaseException) -> None:
        """Fail the waiters of a batch that will never be durable."""
        self._failure = self._failure or error
        for variable in batch.resolved:
            self._rejected[variable] = error
            _fail(self._waiters.pop(variable, []), error)
        if batch.is_last and not self._ended.done():
            self._events.drain()
            _fail([self._ended, *(each for many in self._waiters.values() for each in many)], error)
            self._waiters.clear()

    # --- waiting --------------------------------------------------------------------------

    async def wait_for(self, variable: str, wait_s: float) -> bool:
        """Wait until a variable is durable or the program has ended; return False after `wait_s`.

        Raises:
            UnavailableError: `server.draining` if the server stops first.
            ConureError: why the journal refused the program.
            JournalError: if the journal rejected the variable or the end of the program.
        """
        if variable in self.durable_variables:
            return True
        if variable in self._rejected:
            raise self._rejected[variable].with_traceback(None)
        if self._ended.done():
            self._ended.result()
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(variable, []).append(waiter)
        try:
            await asyncio.wait_for(waiter, wait_s)
        except TimeoutError:
            return False
        finally:
            waiters = self._waiters.get(variable, [])
            if waiter in waiters:
                waiters.remove(waiter)
        return True

    async def wait_ended(self) -> None:
        """Wait until the end of the program is durable.

        Raises:
            UnavailableError: `server.draining` if the server stops first.
            JournalError: if the journal rejected the end.
        """
        await asyncio.shield(self._ended)


def _ignore() -> None:
    """Do nothing: the end was reported."""


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _fail(waiters: list[asyncio.Future[None]], error: BaseException) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # the waiting request may be gone


def _size(record: OutboxRecord) -> int:
    """Return the approximate size of a record in bytes."""
    match record:
        case ProgramRecord() | AppendRecord():
            return len(record.body)
        case ValueRecord():
            return len(record.value)
        case EventRecord():
            return len(record.data)
        case EndRecord():
            return len(record.nodes)
