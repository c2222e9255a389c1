"""The programs of a server: live runs, recently ended runs in memory, and the journal.

Invariants: a program belongs to one tenant, and other tenants do not find it. Every accepted
program that has not ended is live here, or will be after the next start of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from typing import NoReturn, cast

import msgspec
from cachetools import LRUCache

from ...program.errors import ConureError, NotFoundError, UnavailableError
from ...program.status import (
    ENDED,
    Event,
    Phase,
    ProgramPage,
    ProgramStatus,
    ProgramSummary,
    VariableStatus,
)
from ...store.journal import EventRecord, Journal, ProgramListing, StoredProgram
from ..clock import format_timestamp
from ..program_run import ProgramRun
from ..reporting.status import (
    committed_variable,
    program_status,
    stored_status,
    stored_variable,
    variable_status,
)
from ..reporting.status_parts import live_status_parts, stored_status_parts
from ..services import RuntimeServices
from .event_stream import TextOffsets

MAX_RECENT = 64
"""Ended programs that are answered from memory; older ones are read from the journal."""
MAX_RECENT_BYTES = 64 * 1024 * 1024
"""Limit on the `num_bytes` of all recent programs together."""
MAX_NUMBER = 2**63 - 1
PAGE, PAGE_BYTES = 500, 64 * 1024
"""Events read from the journal at a time, and their bytes: what a reader that stops may hold."""
RETRY_AFTER_S = 5.0


class ProgramDirectory:
    """Finds the programs of a server for their tenants."""

    def __init__(self, services: RuntimeServices) -> None:
        self.is_stopped = False
        self.pending: dict[str, StoredProgram] = {}
        """Unfinished programs of an earlier server process that are not resumed yet, oldest
        first."""
        self.resume: Callable[[StoredProgram], None] = lambda _: None
        """Resumes a pending program."""
        self._services = services
        self._live: dict[str, ProgramRun] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        """Requests that wait for programs whose submissions are under way, by id."""
        self._recent: LRUCache[str, ProgramRun] = LRUCache(
            MAX_RECENT_BYTES, getsizeof=lambda run: run.num_bytes
        )

    def __iter__(self) -> Iterator[ProgramRun]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        """The number of programs that have not ended."""
        return len(self._live) + len(self.pending)

    @property
    def num_bytes(self) -> int:
        """Rough memory of all live programs: the bytes of their values, and 4 KiB per node."""
        return sum(run.num_bytes for run in self._live.values())

    @property
    def num_nodes(self) -> int:
        """Nodes of all programs in memory."""
        runs = [*self._live.values(), *self._recent.values()]
        return sum(len(run.state.nodes) for run in runs)

    # --- live programs --------------------------------------------------------------------

    def add(self, run: ProgramRun) -> None:
        """Add a program."""
        self._live[run.state.id] = run
        self._services.call_quota.add(run.state)
        self.release_waiters(run.state.id)

    def end(self, run: ProgramRun) -> bool:
        """Move a program whose end is durable to the recent ones; False if it is not live."""
        if self._live.pop(run.state.id, None) is None:
            return False
        self._services.call_quota.remove(run.state)
        if run.num_bytes <= self._recent.maxsize:
            self._recent[run.state.id] = run
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem()
        return True

    def discard(self, program: str, reason: ConureError) -> None:
        """Remove a program that was not accepted or cannot be resumed, if it is live.

        The requests that wait for it fail with the reason.
        """
        run = self._live.pop(program, None)
        if run is not None:
            self._services.call_quota.remove(run.state)
            run.suspend(reason)

    def remove(self, program: str) -> None:
        """Remove an ended program that was deleted from the journal."""
        self._recent.pop(program, None)

    def suspend_all(self) -> None:
        """Suspend all programs because the server stops."""
        self.is_stopped = True
        self.pending.clear()
        for run in self:
            run.suspend()
        self._live.clear()

    def find_live(self, program: str, tenant: str) -> ProgramRun | None:
        """Return a live program, and renew its lease. Resumes a pending one."""
        if program in self.pending and self.pending[program].tenant == tenant:
            self.resume(self.pending.pop(program))
        run = self._live.get(program)
        if run is None or run.state.tenant != tenant:
            return None
        run.renew_lease()
        return run

    def peek_live(self, program: str, tenant: str) -> ProgramRun | None:
        """Return a live program, without renewing its lease."""
        run = self._live.get(program)
        return run if run is not None and run.state.tenant == tenant else None

    def is_live(self, program: str) -> bool:
        """Return whether a program of any tenant with this id has not ended."""
        return program in self._live or program in self.pending

    async def wait_live(self, program: str, tenant: str, wait_s: float) -> ProgramRun | None:
        """Return a live program; wait for its submission, which may arrive after its appends."""
        if self.find(program, tenant) is None and wait_s > 0:
            arrived = asyncio.get_running_loop().create_future()
            waiters = self._waiters.setdefault(program, set())
            waiters.add(arrived)
            try:
                await asyncio.wait([arrived], timeout=wait_s)
            finally:
                waiters.discard(arrived)
                if not waiters and self._waiters.get(program) is waiters:
                    del self._waiters[program]
        return self.find_live(program, tenant)

    def release_waiters(self, program: str) -> None:
        """Wake the requests that wait for a program: it has arrived or was refused."""
        for waiter in self._waiters.pop(program, ()):
            if not waiter.done():
                waiter.set_result(None)

    def find(self, program: str, tenant: str) -> ProgramRun | None:
        """Return a program that is live or in memory."""
        run = self.find_live(program, tenant) or self._recent.get(program)
        return run if run is not None and run.state.tenant == tenant else None

    # --- stored programs ------------------------------------------------------------------

    @property
    def journal(self) -> Journal:
        """The journal.

        Raises:
            UnavailableError: `server.draining` if the server has stopped.
        """
        if self.is_stopped:
            raise _draining()
        return self._services.journal

    def _refuse_unknown(self, program: str) -> NoReturn:
        if self.is_stopped:  # a program that the stop suspended has no end either
            raise _draining()
        raise NotFoundError("program.not_found", f"there is no program {program}")

    async def load(self, program: str, tenant: str) -> StoredProgram:
        """Return an ended program from the journal.

        Raises:
            NotFoundError: `program.not_found`.
        """
        stored = await self.journal.load_program(tenant, program)
        if stored is None or stored.end is None:
            self._refuse_unknown(program)
        return stored

    async def stored_phase(self, program: str, tenant: str) -> Phase:
        """Return the phase of an ended program from the journal.

        Raises:
            NotFoundError: `program.not_found`.
        """
        status = await self.journal.find_status(tenant, program)
        if status is None:
            self._refuse_unknown(program)
        return cast(Phase, status)  # written from a Phase

    async def stored_variable(
        self, program: str, tenant: str, variable: str
    ) -> VariableStatus | None:
        """Return a variable of an ended program from the journal; None if there is none.

        Raises:
            NotFoundError: `program.not_found`.
        """
        found = await self.journal.load_variable(tenant, program, variable)
        if found is None:
            self._refuse_unknown(program)
        status = committed_variable(*found, variable)
        if status is None:  # an input, perhaps: it is in the submission or in an append
            status = stored_variable(await self.load(program, tenant), variable)
        return status

    async def status(
        self, program: str, tenant: str, nodes: Sequence[str] | None = None
    ) -> ProgramStatus:
        """Return the status of a program, wherever it is.

        Args:
            program: id of the program.
            tenant: owner of the program.
            nodes: ids of the nodes to show, without variables; None: all nodes and variables.

        Raises:
            NotFoundError: `program.not_found`.
        """
        run = self.find(program, tenant)
        if run is None:
            return stored_status(await self.load(program, tenant), nodes)
        receipt = run.receipt if run.outbox.has_ended else None
        names = None if nodes is None else ()
        durable = run.outbox.durable_variables
        status = program_status(run.state, durable, receipt, names=names, nodes=nodes)
        return status if receipt else msgspec.structs.replace(status, quotas=run.quotas)

    async def status_parts(self, program: str, tenant: str) -> Iterator[bytes]:
        """Return the JSON of the status of a program in parts.

        Raises:
            NotFoundError: `program.not_found`.
        """
        run = self.find(program, tenant)
        if run is None:
            return stored_status_parts(await self.load(program, tenant))
        receipt = run.receipt if run.outbox.has_ended else None
        durable = run.outbox.durable_variables
        return live_status_parts(run.state, durable, receipt, run.quotas)

    async def list(
        self, tenant: str, *, status: str | None, cursor: int | None, limit: int, search: str = ""
    ) -> ProgramPage:
        """Return a page of the programs of a tenant, newest first."""
        before = MAX_NUMBER if cursor is None else cursor
        # One program more than the page shows whether there is a next page.
        found = await self.journal.list_programs(
            tenant, status=status, search=search, before=before, limit=limit + 1
        )
        listed = found[:limit]
        has_more = len(found) > limit
        return ProgramPage(
            programs=[_summary(listing, self._live.get(listing.id)) for listing in listed],
            next=str(listed[-1].number) if has_more else None,
        )

    async def events(
        self,
        program: str,
        tenant: str,
        after: int,
        *,
        is_durable: bool,
        texts: Collection[str] | None,
        follow: bool,
    ) -> AsyncGenerator[Event, None]:
        """Iterate over the events of a program: from the journal, then from memory.

        Raises:
            NotFoundError: `program.not_found`.
        """
        run = self.find(program, tenant)
        if run is None:
            await self.stored_phase(program, tenant)
            while page := await self.journal.events(tenant, program, after, PAGE, PAGE_BYTES):
                for record in page:
                    after = record.seq
                    yield _stored_event(record)
            return
        last = after
        offsets: TextOffsets = {}
        with run.events.reader():  # also while it pauses between two pages of the journal
            while True:
                while last < run.events.first_seq - 1:
                    first_seq = run.events.first_seq
                    page = await self.journal.events(tenant, program, last, PAGE, PAGE_BYTES)
                    page = [record for record in page if record.seq < run.events.first_seq]
                    # Events that were dropped from memory during the query are not in its page.
                    if not page and run.events.first_seq == first_seq:
                        break
                    for record in page:
                        last = record.seq
                        yield _stored_event(record)
                if not follow:
                    for event in run.events.recorded(last):
                        yield event
                    return
                reading = run.events.read(last, is_durable=is_durable, texts=texts, offsets=offsets)
                try:
                    async for event in reading:
                        last = last if event.seq is None else event.seq
                        yield event
                finally:
                    await reading.aclose()
                if run.events.is_draining or last >= run.events.dropped_seq:
                    return


def _summary(listing: ProgramListing, run: ProgramRun | None) -> ProgramSummary:
    status, finished_at = listing.status, listing.finished_at
    if status is None:
        status = "running" if run is None or run.state.phase in ENDED else run.state.phase
    return ProgramSummary(
        id=listing.id,
        name=listing.name,
        status=status,  # type: ignore[arg-type]  # written from a Phase
        created_at=format_timestamp(listing.created_at),
        finished_at=None if finished_at is None else format_timestamp(finished_at),
        calls=listing.num_calls,
    )


def _draining() -> UnavailableError:
    return UnavailableError(
        "server.draining", "the server is stopping", retry_after_s=RETRY_AFTER_S
    )


def _stored_event(record: EventRecord) -> Event:
    data = msgspec.json.decode(record.data)
    return Event(record.seq, record.type, data, record.data)  # type: ignore[arg-type]  # written from an EventType


def run_variable_status(run: ProgramRun, variable: str) -> VariableStatus:
    """Return the status of a variable of a program in memory."""
    durable = run.outbox.durable_variables
    return variable_status(run.state, durable, variable, is_ended=run.outbox.has_ended)
