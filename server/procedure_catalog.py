"""Stores procedures, moves their aliases, and submits them as programs."""

from __future__ import annotations

import msgspec

from .program.errors import ProgramError
from .program.ir import Submission
from .program.procedures import (
    Procedure,
    PutProcedure,
    RunProcedure,
    StoredProcedure,
    stored_procedure,
    version_of,
)
from .program.status import Accepted
from .runtime.admission.intake import ProgramIntake
from .runtime.admission.preparation import expand_program
from .runtime.persistence.program_directory import ProgramDirectory


class ProcedureCatalog:
    """Implements `ProcedureService`."""

    def __init__(self, intake: ProgramIntake, programs: ProgramDirectory) -> None:
        self._intake = intake
        self._programs = programs

    async def put(self, name: str, put: PutProcedure, *, tenant: str) -> StoredProcedure:
        """Store a procedure."""
        library = self._intake.library
        program = await expand_program(put.program, tenant, library)
        submission = Submission(program=program)
        body = msgspec.json.encode(submission)
        await self._intake.check(submission, body, tenant, is_expanded=True)
        procedure = Procedure(name=name, version=version_of(program), program=program)
        if not procedure.signature.results:
            raise ProgramError(
                "procedure.result",
                "a procedure needs a result: list variables in `outputs`",
                path="program.outputs",
            )
        await library.store(tenant, procedure, put.alias)
        return await self.find(procedure.reference, tenant=tenant)

    async def put_alias(
        self, name: str, alias: str, version: str, *, tenant: str
    ) -> StoredProcedure:
        """Move an alias."""
        library = self._intake.library
        procedure = await library.find(tenant, f"{name}@{version}")
        await library.move_alias(tenant, procedure, alias)
        return await self.find(procedure.reference, tenant=tenant)

    async def find(self, reference: str, *, tenant: str) -> StoredProcedure:
        """Return one version of a procedure."""
        found = await self._intake.library.find(tenant, reference)
        listing = await self._programs.journal.list_procedures(tenant, found.name)
        aliases = [alias for _, alias, version in listing.aliases if version == found.version]
        return stored_procedure(found, aliases)

    async def list_all(self, *, tenant: str) -> list[StoredProcedure]:
        """Return all versions of all procedures."""
        listing = await self._programs.journal.list_procedures(tenant, None)
        aliases: dict[tuple[str, str], list[str]] = {}
        for name, alias, version in listing.aliases:
            aliases.setdefault((name, version), []).append(alias)
        return [
            StoredProcedure(name=name, version=version, aliases=aliases.get((name, version), []))
            for name, version, _ in listing.versions
        ]

    async def run(
        self, reference: str, run: RunProcedure, *, tenant: str, idempotency_key: str | None
    ) -> tuple[Accepted, bool]:
        """Submit a procedure as a program."""
        procedure = await self._intake.library.find(tenant, reference)
        submission = Submission(
            program=procedure.program,
            inputs=run.inputs,
            objectives=run.objectives,
            options=run.options,
        )
        return await self._intake.submit(
            submission,
            body=msgspec.json.encode(submission),
            tenant=tenant,
            idempotency_key=idempotency_key,
            is_expanded=True,
        )
