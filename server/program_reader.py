"""The part of the service that reads programs: their phase, status, values and events.

Invariant: reading a variable lets its producers start, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator, Sequence

from .program.errors import NotFoundError
from .program.ir import Objective
from .program.status import Event, Phase, ProgramPage, ProgramStatus, VariableStatus
from .runtime.persistence.program_directory import ProgramDirectory, run_variable_status


class ProgramReader:
    """Reads the programs of one server process for their tenants.

    The base class of `Executor`, which sets `programs`.
    """

    programs: ProgramDirectory

    @property
    def num_nodes(self) -> int:
        """Nodes of all programs in memory."""
        return self.programs.num_nodes

    async def find(self, program: str, *, tenant: str) -> Phase:
        """Return the phase of a program; see `Service.find`."""
        run = self.programs.find(program, tenant)
        if run is None:
            return await self.programs.stored_phase(program, tenant)
        return run.state.phase

    async def find_submitted(self, idempotency_key: str, *, tenant: str) -> str | None:
        """Return the program of an idempotency key; see `Service.find_submitted`."""
        known = await self.programs.journal.find_idempotent(tenant, idempotency_key)
        return None if known is None else known[0]

    @property
    def last_seq(self) -> int:
        """The last sequence number of an event; see `Service.last_seq`."""
        return self.programs.journal.last_seq

    async def status(
        self, program: str, *, tenant: str, nodes: Sequence[str] | None = None
    ) -> ProgramStatus:
        """Return the status of a program; see `Service.status`."""
        return await self.programs.status(program, tenant, nodes)

    async def status_parts(self, program: str, *, tenant: str) -> Iterator[bytes]:
        """Return the JSON of a status in parts; see `Service.status_parts`."""
        return await self.programs.status_parts(program, tenant)

    async def list_programs(
        self, *, tenant: str, status: str | None, cursor: int | None, limit: int, search: str = ""
    ) -> ProgramPage:
        """List programs; see `Service.list_programs`."""
        return await self.programs.list(
            tenant, status=status, cursor=cursor, limit=limit, search=search
        )

    async def get(
        self,
        program: str,
        variable: str,
        *,
        tenant: str,
        wait_s: float,
        objective: Objective | None = None,
    ) -> VariableStatus:
        """Wait for a variable; see `Service.get`."""
        run = self.programs.find(program, tenant)
        if run is None:
            status = await self.programs.stored_variable(program, tenant, variable)
            if status is None:
                message = f"program {program} has no variable {variable}"
                raise NotFoundError("variable.not_found", message)
            return status
        run.state.check_variable(variable)
        if objective is None and wait_s > 0 and variable not in run.state.graph.objectives:
            objective = "latency"  # this client waits for it
        run.demand(variable, objective)
        if wait_s > 0:
            await run.outbox.wait_for(variable, wait_s)
        return run_variable_status(run, variable)

    async def events(
        self,
        program: str,
        *,
        tenant: str,
        after: int,
        is_durable: bool = False,
        texts: Collection[str] | None = None,
        follow: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """Iterate over the events of a program; see `Service.events`."""
        reading = self.programs.events(
            program, tenant, after, is_durable=is_durable, texts=texts, follow=follow
        )
        try:
            async for event in reading:
                yield event
        finally:
            await reading.aclose()
