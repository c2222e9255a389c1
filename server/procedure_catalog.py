"""Stores procedures, moves their aliases, pins their prefixes, and submits them as programs."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from msgspec import UNSET

from .language.compiler import locate
from .language.submission import SourceCompiler
from .program.errors import ConflictError, ConureError, NotFoundError, ProgramError
from .program.graph.graph import graph_of
from .program.ir import GenerateNode, Program, SourceSubmission, Submission
from .program.nodes.bodies import walk
from .program.procedures import (
    Procedure,
    PutProcedure,
    RunProcedure,
    StoredProcedure,
    stored_procedure,
    version_of,
)
from .program.status import Accepted
from .prompts.constant_prefix import constant_prefix
from .prompts.served_model import ServedModel
from .runtime.admission.intake import ProgramIntake
from .runtime.admission.preparation import expand_program
from .runtime.calls.pins import PinKeeper, PinKey, maximal
from .runtime.persistence.program_directory import ProgramDirectory
from .store.journal import PinRecord

logger = logging.getLogger(__name__)

PIN_CHECK_S = 1.0


class ProcedureCatalog:
    """Implements `ProcedureService`."""

    def __init__(
        self,
        intake: ProgramIntake,
        programs: ProgramDirectory,
        sources: SourceCompiler,
        pins: PinKeeper,
        *,
        max_pin_s: float,
    ) -> None:
        self._intake = intake
        self._programs = programs
        self._sources = sources
        self._pins = pins
        self._max_pin_s = max_pin_s
        self._unfilled_pins: dict[PinKey, float] = {}
        """The ends of pins in the journal that were not filled since the start of the server."""

    async def put(self, name: str, put: PutProcedure, *, tenant: str) -> StoredProcedure:
        """Store a procedure."""
        given = await self._program(put)
        try:
            procedure = await self._check(name, given, tenant)
        except (ProgramError, NotFoundError) as error:
            if put.source is UNSET:
                raise
            raise locate(error, given) from None
        prefixes: list[list[int]] = []
        if put.pin_s is not None:
            prefixes = await self._check_pin(tenant, procedure, put.pin_s)
        await self._intake.library.store(tenant, procedure, put.alias)
        if put.pin_s is not None:
            await self._pin(tenant, procedure, prefixes, put.pin_s)
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

    async def remove(self, reference: str, *, tenant: str) -> None:
        """Remove one version and its pin."""
        procedure = await self._intake.library.find(tenant, reference)
        await self._intake.library.remove(tenant, procedure)
        self._unpin(PinKey(tenant, procedure.name, procedure.version))

    async def remove_alias(self, name: str, alias: str, *, tenant: str) -> None:
        """Remove an alias."""
        await self._intake.library.remove_alias(tenant, name, alias)

    # --- pins -----------------------------------------------------------------------------

    async def pin(self, reference: str, pin_s: float | None, *, tenant: str) -> StoredProcedure:
        """Pin the constant prefixes of a version; None: remove its pin."""
        procedure = await self._intake.library.find(tenant, reference)
        if pin_s is not None:
            prefixes = await self._check_pin(tenant, procedure, pin_s)
            await self._pin(tenant, procedure, prefixes, pin_s)
        else:
            self._unpin(PinKey(tenant, procedure.name, procedure.version))
            # The journal may have a pin that did not fit, or that was not filled yet.
            await self._append_pin(tenant, procedure, 0.0)
        return await self.find(procedure.reference, tenant=tenant)

    async def _check_pin(self, tenant: str, procedure: Procedure, pin_s: float) -> list[list[int]]:
        """Return the prefixes of a procedure, which can be pinned for a time."""
        if pin_s > self._max_pin_s:
            raise ProgramError(
                "procedure.pin_time",
                f"a prefix can be pinned for {self._max_pin_s:g} s, got {pin_s:g}: request less, "
                "or start the server with a larger --pin-hours",
                path="pin_s",
            )
        prefixes = await asyncio.to_thread(_prefixes, procedure, self._pins.model)
        self._pins.check_room(PinKey(tenant, procedure.name, procedure.version), prefixes)
        return prefixes

    async def _pin(
        self, tenant: str, procedure: Procedure, prefixes: list[list[int]], pin_s: float
    ) -> None:
        """Pin prefixes, once the pin is durable."""
        key = PinKey(tenant, procedure.name, procedure.version)
        expires_at = self._pins.now() + pin_s
        await self._append_pin(tenant, procedure, expires_at)
        self._unfilled_pins.pop(key, None)
        try:
            self._pins.pin(key, prefixes, expires_at)
        except ConflictError:  # another pin has taken the room meanwhile
            await self._append_pin(tenant, procedure, 0.0)
            raise

    def _unpin(self, key: PinKey) -> None:
        self._unfilled_pins.pop(key, None)
        self._pins.unpin(key)

    async def _append_pin(self, tenant: str, procedure: Procedure, expires_at: float) -> None:
        record = PinRecord(
            tenant=tenant, name=procedure.name, version=procedure.version, expires_at=expires_at
        )
        await self._programs.journal.append([record], fail_fast=True)

    async def keep_pins(self) -> None:
        """Fill the pins of the journal, and check all pins until cancelled."""
        self._unfilled_pins = {
            PinKey(record.tenant, record.name, record.version): record.expires_at
            for record in await self._programs.journal.list_pins(self._pins.now())
        }
        for key in list(self._unfilled_pins):
            await self._fill(key)
        while True:
            await asyncio.sleep(PIN_CHECK_S)
            self._pins.check()

    async def _fill(self, key: PinKey) -> None:
        """Fill a pin of the journal, unless it is removed or replaced meanwhile."""
        reference = f"{key.name}@{key.version}"
        try:
            procedure = await self._intake.library.find(key.tenant, reference)
            prefixes = await asyncio.to_thread(_prefixes, procedure, self._pins.model)
            if (expires_at := self._unfilled_pins.pop(key, None)) is not None:
                self._pins.pin(key, prefixes, expires_at)
        except ConureError as error:
            logger.warning("the prefix of %s is not pinned again: %s", reference, error)

    # --- reading and running --------------------------------------------------------------

    async def find(self, reference: str, *, tenant: str) -> StoredProcedure:
        """Return one version of a procedure."""
        found = await self._intake.library.find(tenant, reference)
        listing = await self._programs.journal.list_procedures(tenant, found.name)
        aliases = [alias for _, alias, version in listing.aliases if version == found.version]
        pin = self._pins.cost(PinKey(tenant, found.name, found.version))
        return stored_procedure(found, aliases, pin)

    async def list_all(self, *, tenant: str) -> list[StoredProcedure]:
        """Return all versions of all procedures."""
        listing = await self._programs.journal.list_procedures(tenant, None)
        aliases: dict[tuple[str, str], list[str]] = {}
        for name, alias, version in listing.aliases:
            aliases.setdefault((name, version), []).append(alias)
        return [
            StoredProcedure(
                name=name,
                version=version,
                aliases=aliases.get((name, version), []),
                pin=self._pins.cost(PinKey(tenant, name, version)) or UNSET,
            )
            for name, version, _ in listing.versions
        ]

    async def run(
        self, reference: str, run: RunProcedure, *, tenant: str, idempotency_key: str | None
    ) -> tuple[Accepted, bool]:
        """Submit a procedure as a program."""
        # The key belongs to the request: the alias in it may have moved or be gone since then.
        request = b"%s\n%s" % (reference.encode(), msgspec.json.encode(run))
        accepted = await self._intake.find_accepted(
            request, tenant=tenant, idempotency_key=idempotency_key
        )
        if accepted is not None:
            return accepted, True
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
            request=request,
            is_expanded=True,
        )


def _prefixes(procedure: Procedure, model: ServedModel) -> list[list[int]]:
    """Return the constant beginnings of the prompts of a procedure."""
    definitions = graph_of(Submission(program=procedure.program)).definitions
    calls = [
        node for _, node in walk(procedure.program.nodes, "") if isinstance(node, GenerateNode)
    ]
    return maximal(constant_prefix(call, definitions, model) for call in calls)
