"""Stores procedures, moves their aliases, and submits them as programs."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import UNSET

from .language.compiler import locate
from .language.submission import SourceCompiler
from .program.errors import NotFoundError, ProgramError
from .program.ir import Program, SourceSubmission, Submission
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

    def __init__(
        self, intake: ProgramIntake, programs: ProgramDirectory, sources: SourceCompiler
    ) -> None:
        self._intake = intake
        self._programs = programs
        self._sources = sources

    async def put(self, name: str, put: PutProcedure, *, tenant: str) -> StoredProcedure:
        """Store a procedure."""
        given = await self._program(put)
        try:
            procedure = await self._check(name, given, tenant)
        except (ProgramError, NotFoundError) as error:
            if put.source is UNSET:
                raise
            raise locate(error, given) from None
        await self._intake.library.store(tenant, procedure, put.alias)
        return await self.find(procedure.reference, tenant=tenant)

    async def _program(self, put: PutProcedure) -> Program:
        """Return the graph of a procedure, compiled if it is a text.

        Raises:
            ProgramError: `program.invalid` unless there is exactly one of the two; a
                LanguageError for an invalid text.
        """
        if (put.program is UNSET) == (put.source is UNSET):
            raise ProgramError(
                "program.invalid",
                "a procedure has either `program`, a graph, or `source`, a text",
                path="source",
            )
        if put.program is not UNSET:
            return put.program
        assert put.source is not UNSET
        source = SourceSubmission(source=put.source, language=put.language)
        submission, _ = await asyncio.to_thread(self._sources.compile, source)
        return submission.program

    async def _check(self, name: str, given: Program, tenant: str) -> Procedure:
        """Return the procedure of a program that has passed all checks of a submission."""
        program = await expand_program(given, tenant, self._intake.library)
        submission = Submission(program=program)
        body = msgspec.json.encode(submission)
        await self._intake.check(submission, body, tenant, is_expanded=True)
        procedure = Procedure(name=name, version=version_of(program), program=program)
        if not procedure.signature.results:
            raise ProgramError(
                "procedure.result",
                "a procedure needs a result: list variables in `outputs`, or `return` a value in "
                "a text",
                path="program.outputs",
            )
        return procedure

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
