"""What the routes ask of the executor: programs in, values and events out.

The one seam between HTTP and the machine behind it. Routes know this protocol and the
records of `program`; they never see a graph, a journal or an engine. An implementation
never sees a request, a header or a status line.

Kept true: every call names a tenant, and another tenant's program is not found. A refusal
is a ConureError; any other exception is a bug. A call that waits (`get`, the next event)
may be cancelled at any await, and cancelling it undoes nothing but the waiting.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from msgspec import Struct

from conure.engine.api import StatusReport

from .program.ir import Append, Constraint, Objective, Submission
from .program.status import (
    Accepted,
    Event,
    Problem,
    ProgramStatus,
    PutValue,
    UsageReport,
    VariableStatus,
)


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A model that programs can name."""

    id: str
    context_len: int
    """Tokens of one context at most, prompt and output together."""
    description: str = ""
    created: int = 0
    """Unix time at which it was loaded, in seconds."""
    capabilities: tuple[str, ...] = ()
    """What it can do beyond text; `tools` where its template has a way to write calls."""


class GrammarInfo(Struct, frozen=True, kw_only=True):
    """What is known about a constraint."""

    is_supported: bool
    """Outputs can be held to it."""
    is_relaxed: bool = False
    """Parts of it are enforced by looking at the finished text only."""
    matches: bool | None = None
    """Whether the text belongs to it; null where no text was sent."""
    error: Problem | None = None
    """Why it is not supported."""


class Readiness(Struct, frozen=True, kw_only=True):
    """Whether programs can run now; `reasons` say why not, empty when ready."""

    is_ready: bool
    reasons: list[str] = []


class EngineInfo(Struct, frozen=True, kw_only=True):
    """One engine, by its own counters."""

    id: str
    epoch: int
    """Which of its lives this is."""
    model: str
    report: StatusReport
    """Blocks free, held and cached; tokens computed, shared, taken from cache and decoded."""


class Service(Protocol):
    """Runs programs for tenants."""

    async def start(self) -> None:
        """Opens the journal, starts the engines, and lets unfinished programs go on.

        Raises:
            ConureError: if the data folder is locked, the model is missing or no engine starts.
        """
        ...

    async def stop(self) -> None:
        """Closes everything; programs that have not ended go on after the next start."""
        ...

    async def drain(self) -> None:
        """Takes no more programs, tells event readers (`server.draining`), parks what runs."""
        ...

    async def submit(
        self,
        submission: Submission,
        *,
        body: bytes,
        tenant: str,
        idempotency_key: str | None = None,
    ) -> tuple[Accepted, bool]:
        """Accepts a program; returns once it is on disk.

        Args:
            submission: the decoded body.
            body: the bytes it was decoded from (or an encoding of it).
            tenant: who submits.
            idempotency_key: a second submission under the same key answers as the first.

        Returns:
            The answer, and whether it repeats an earlier submission's.

        Raises:
            ProgramError: if it cannot be a program.
            ConflictError: if the key was used with another body.
            UnavailableError: if the queue is full or the server drains.
        """
        ...

    async def append(
        self, program: str, append: Append, *, body: bytes, tenant: str
    ) -> ProgramStatus:
        """Adds nodes to an open program, or closes it: all or nothing.

        Returns:
            The program, with no other nodes and variables than those that were added.

        Raises:
            NotFoundError: if there is no such program.
            ConflictError: if it is closed or has ended.
            ProgramError: if the whole would not be a program.
            UnavailableError: if the disk does not take it within 5 s; it may still do so.
        """
        ...

    async def cancel(self, program: str, *, tenant: str) -> ProgramStatus:
        """Stops a program; one that has ended stays as it is.

        Raises:
            NotFoundError: if there is no such program.
            UnavailableError: if the disk does not take its end within 5 s; it still stops.
        """
        ...

    async def find(self, program: str, *, tenant: str) -> None:
        """Makes sure that there is such a program.

        Raises:
            NotFoundError: if there is none.
        """
        ...

    async def status(self, program: str, *, tenant: str) -> ProgramStatus:
        """Returns what is known about a program.

        Raises:
            NotFoundError: if there is no such program.
        """
        ...

    async def get(
        self,
        program: str,
        variable: str,
        *,
        tenant: str,
        wait_s: float,
        objective: Objective | None = None,
    ) -> VariableStatus:
        """Waits for a variable to end, `wait_s` seconds at most, and returns its status.

        A variable that failed, was killed or was skipped is returned with its `error`; one
        that is still open is returned as it stands. An `objective` (latency, throughput,
        ttft, tpot) upgrades what the producers of the variable are scheduled by.

        Raises:
            NotFoundError: if there is no such program or variable.
        """
        ...

    async def put(
        self, program: str, variable: str, body: PutValue, *, tenant: str
    ) -> VariableStatus:
        """Commits a value or an error that comes from the client; returns once it is on disk.

        Raises:
            NotFoundError: if there is no such program or variable.
            ConflictError: if the variable has another value, or an engine produces it.
        """
        ...

    def events(
        self, program: str, *, tenant: str, after: int, is_durable: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Yields the journaled events after sequence number `after`, then what comes.

        Deltas carry no sequence number. Ends after `program.finished` or `server.draining`.
        The caller closes the generator.

        Args:
            program: id of the program.
            tenant: whose it is.
            after: the last sequence number that was seen.
            is_durable: leave out what has no sequence number, and be woken by none of it.

        Raises:
            NotFoundError: if there is no such program (at the first iteration).
        """
        ...

    async def check_grammar(self, constraint: Constraint, text: str | None) -> GrammarInfo:
        """Finds out whether outputs can be held to a constraint, and whether a text keeps it.

        Raises:
            UnavailableError: if no engine answers.
        """
        ...

    async def usage(self, *, tenant: str, since: str | None, until: str | None) -> UsageReport:
        """Sums up what a tenant's programs cost that ended on these days (UTC), both included."""
        ...

    async def metrics(self) -> bytes:
        """Returns what operators watch, in Prometheus' text format: no names of tenants,
        programs or models, so as many lines today as tomorrow.
        """
        ...

    def models(self) -> list[ModelInfo]:
        """Returns the models that programs can name, the default one first."""
        ...

    async def engines(self) -> list[EngineInfo]:
        """What each engine holds and has computed."""
        ...

    async def ready(self) -> Readiness:
        """Whether the store can be written and the engines answered within the last 5 s."""
        ...
