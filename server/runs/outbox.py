"""What one program tells the world, in order, and only once the disk has it.

Records and events of a program collect here during a turn of the loop and go to the
journal as one batch. When the batch is on disk its events are published to readers and its
variables are *settled*: whoever waits for them wakes. So nothing that left the server is
ever missing after a crash, and whatever is on disk is preceded by what it depends on.

Knows the journal, the feed and waiters. Refuses to know why anything happened.

Kept true: batches leave in the order in which their records were added, behind the program
itself; a waiter is woken exactly once, by its variable or by the end of the program, and
never before the disk has what it is woken for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from ..program.errors import UnavailableError
from ..program.ir import Json
from ..program.status import Event, EventType
from ..store.journal import (
    AppendRecord,
    EndRecord,
    EventRecord,
    Journal,
    ProgramRecord,
    Record,
    ValueRecord,
)
from .feed import Feed

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class _Batch:
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    is_last: bool = False


class Outbox:
    """The way of one program's records to the disk, and of their news to its readers."""

    def __init__(
        self, program: str, journal: Journal, feed: Feed, ended: Callable[[], None]
    ) -> None:
        self.settled: set[str] = set()
        """Variables whose value or absence is on disk."""
        self.num_bytes = 0
        """JSON that was added so far: about what the program holds in memory."""
        self._refused: dict[str, BaseException] = {}
        self._program = program
        self._journal = journal
        self._feed = feed
        self._on_ended = ended
        self._batch = _Batch()
        self._is_scheduled = False
        self._accepting: asyncio.Future[None] | None = None
        """The program itself is on its way to the disk: what else there is waits for it."""
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        """Whether the end of the program is on disk."""
        return self._ended.done() and self._ended.exception() is None

    @property
    def has_waiters(self) -> bool:
        """Whether somebody waits for a variable."""
        return any(self._waiters.values())

    # --- adding ---------------------------------------------------------------------------

    def emit(self, event_type: EventType, **data: Json) -> None:
        """Write an event."""
        now = time.time()
        seq = self._journal.next_seq()
        body: dict[str, Json] = {"program": self._program, **data, "seq": seq, "at": iso(now)}
        self.add(
            EventRecord(
                program=self._program,
                seq=seq,
                type=event_type,
                data=msgspec.json.encode(body),
                at=now,
            )
        )
        self._batch.events.append(Event(seq, event_type, body))

    def add(self, record: Record) -> None:
        """Write a record."""
        self.num_bytes += _size(record)
        self._batch.records.append(record)
        self._schedule()

    def settle(self, variables: Iterable[str]) -> None:
        """Wake whoever waits for these variables once everything added so far is on disk."""
        self._batch.settled.extend(variables)
        self._schedule()

    def accept(self, record: ProgramRecord) -> asyncio.Future[None]:
        """Put a new program on disk, with what was added so far behind it.

        The future fails if the disk refuses; then nothing of the program was kept, and nothing
        that was added since leaves.
        """
        self._is_scheduled = False
        self.num_bytes += _size(record)
        batch, self._batch = self._batch, _Batch()
        accepting = self._accepting = self._journal.append([record, *batch.records], accept=True)

        def on_disk(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._accepting = None
                self._on_disk(done, batch)
                if not self._ended.done():  # else the server went away meanwhile, maybe the journal
                    self.flush()

        accepting.add_done_callback(on_disk)
        return accepting

    def end(self) -> None:
        """Nothing comes after what was added: wake everybody once that is on disk."""
        self._batch.is_last = True
        self.flush()

    def abandon(self) -> None:
        """The server goes away: whoever waits hears that, and nothing more is told."""
        error = UnavailableError(
            "server.draining", "the server is about to stop", retry_after_s=RETRY_AFTER_S
        )
        _fail([self._ended, *(each for many in self._waiters.values() for each in many)], error)
        self._waiters.clear()

    # --- to the disk ----------------------------------------------------------------------

    def flush(self) -> None:
        """Hand over what there is now instead of at the end of this turn."""
        self._is_scheduled = False
        if self._accepting is not None:
            return  # follows once there is a program that it belongs to
        batch, self._batch = self._batch, _Batch()
        if batch.records or batch.settled or batch.is_last:
            written = self._journal.append(batch.records)
            written.add_done_callback(lambda done: self._on_disk(done, batch))

    async def barrier(self) -> None:
        """Wait until everything that happened so far is on disk.

        Raises:
            ConureError: of a program that was not accepted, why.
        """
        if self._accepting is not None:
            await asyncio.shield(self._accepting)
        self.flush()
        await self._journal.barrier()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_if_scheduled)

    def _flush_if_scheduled(self) -> None:
        if self._is_scheduled:
            self.flush()

    def _on_disk(self, done: asyncio.Future[None], batch: _Batch) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            # The journal retries a disk that refuses; what is refused for good is a bug of ours.
            logger.error("program %s: a batch was not written: %r", self._program, error)
            self._refuse(batch, error)
            return
        self._feed.publish(batch.events)
        for variable in batch.settled:
            self.settled.add(variable)
            _wake(self._waiters.pop(variable, []))
        if batch.is_last and not self._ended.done():
            self._feed.close()
            for waiters in self._waiters.values():
                _wake(waiters)
            self._waiters.clear()
            self._ended.set_result(None)
            self._on_ended()

    def _refuse(self, batch: _Batch, error: BaseException) -> None:
        """Nobody may wait for what will never be on disk."""
        for variable in batch.settled:
            self._refused[variable] = error
            _fail(self._waiters.pop(variable, []), error)
        if batch.is_last and not self._ended.done():
            self._feed.drain()
            _fail([self._ended, *(each for many in self._waiters.values() for each in many)], error)
            self._waiters.clear()

    # --- waiting --------------------------------------------------------------------------

    async def wait_for(self, variable: str, wait_s: float) -> bool:
        """Wait until a variable is settled or the program has ended; False: not in `wait_s`.

        Raises:
            UnavailableError: `server.draining` if the server stops first.
            JournalError: if the journal refused the variable, or the end, for good.
        """
        if variable in self.settled:
            return True
        if variable in self._refused:
            raise self._refused[variable]
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
        """Wait until the end of the program is on disk.

        Raises:
            UnavailableError: `server.draining` if the server stops first.
            JournalError: if the journal refused the end for good.
        """
        await asyncio.shield(self._ended)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _fail(waiters: list[asyncio.Future[None]], error: BaseException) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # who waited may be gone already


def _size(record: Record) -> int:
    """Bytes of what a record holds, roughly."""
    match record:
        case ProgramRecord() | AppendRecord():
            return len(record.body)
        case ValueRecord():
            return len(record.value)
        case EventRecord():
            return len(record.data)
        case EndRecord():
            return len(record.nodes)


def iso(unix_s: float) -> str:
    """Unix seconds as ISO 8601 in UTC, with microseconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
