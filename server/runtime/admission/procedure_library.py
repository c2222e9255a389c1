"""The stored procedures of tenants: storing, finding, and moving aliases.

Invariants: a version never changes. An alias names a stored version, and it moves only to a version
with the same signature.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from cachetools import LRUCache

from ...program.checks import listed
from ...program.decoding.typed_json import decode_record
from ...program.errors import ConflictError, NotFoundError
from ...program.ir import AnyNode, Program
from ...program.procedures import (
    ExpandedCalls,
    Procedure,
    calls_in,
    expand_calls,
    parse_reference,
)
from ...program.suggestion import suggestion
from ...store.journal import (
    AliasRecord,
    AliasRemoval,
    Journal,
    ProcedureRecord,
    ProcedureRemoval,
)

MAX_SHOWN_NAMES = 10
"""Aliases or versions in a message."""
MAX_COMPARED_NAMES = 200
"""Procedures of a tenant up to which a similar name is looked for, which takes 0.8 ms per name."""
MAX_CACHED_BYTES = 64 * 1024 * 1024


class ProcedureLibrary:
    """Finds and stores procedures."""

    def __init__(self, journal: Callable[[], Journal]) -> None:
        self._journal = journal
        self._moving = asyncio.Lock()
        self._decoded: LRUCache[tuple[str, str, str], tuple[Procedure, int]] = LRUCache(
            MAX_CACHED_BYTES, getsizeof=lambda entry: entry[1]
        )

    async def find(self, tenant: str, reference: str) -> Procedure:
        """Return the procedure that a reference with valid syntax names.

        Raises:
            NotFoundError: `procedure.not_found`.
        """
        procedure = await self._find(tenant, reference)
        if procedure is None:
            raise await self._not_found(tenant, reference)
        return procedure

    async def _find(self, tenant: str, reference: str) -> Procedure | None:
        name, version, alias = parse_reference(reference)
        if version is not None and (cached := self._decoded.get((tenant, name, version))):
            return cached[0]
        record = await self._journal().find_procedure(tenant, name, version=version, alias=alias)
        if record is None:
            return None
        key = (tenant, name, record.version)
        if key not in self._decoded:
            program = decode_record(record.program, Program)
            procedure = Procedure(name=name, version=record.version, program=program)
            size = len(record.program)
            if size > MAX_CACHED_BYTES:
                return procedure
            self._decoded[key] = (procedure, size)
        return self._decoded[key][0]

    async def _not_found(self, tenant: str, reference: str) -> NotFoundError:
        """Return the error of a reference without a procedure, with what there is instead."""
        name, version, alias = parse_reference(reference)
        listing = await self._journal().list_procedures(tenant, name)
        if not listing.versions:
            others = await self._journal().list_procedures(tenant, None)
            names = {each for each, _, _ in others.versions}
            similar = suggestion(name, names if len(names) <= MAX_COMPARED_NAMES else ())
            message = f"there is no procedure `{name}`: "
            message += similar or f"store it by PUT /v1/procedures/{name}"
        else:
            kind = "version" if alias is None else "alias"
            known = listing.versions if alias is None else listing.aliases
            shown = listed([each for _, each, _ in known[-MAX_SHOWN_NAMES:]])
            message = f"procedure `{name}` has no {kind} `{version or alias}`; it has "
            message += shown or f"no {kind}"
            if len(known) > MAX_SHOWN_NAMES:
                message += f" and {len(known) - MAX_SHOWN_NAMES:,} others"
        return NotFoundError("procedure.not_found", message)

    async def expand(self, tenant: str, nodes: Sequence[AnyNode], path: str) -> ExpandedCalls:
        """Expand the procedure calls in submitted nodes.

        Raises:
            NotFoundError: `procedure.not_found`, with the path of the call.
            ProgramError: as `expand_calls`.
        """
        procedures: dict[str, Procedure] = {}
        for at, call in calls_in(nodes, path):
            if call.procedure not in procedures:
                try:
                    procedures[call.procedure] = await self.find(tenant, call.procedure)
                except NotFoundError as error:
                    error.path = f"{at}.procedure"
                    raise
        return expand_calls(nodes, procedures, path)

    async def store(self, tenant: str, procedure: Procedure, alias: str | None) -> None:
        """Store a version and let an alias name it; return once both are durable.

        Raises:
            ConflictError: `procedure.signature`.
        """
        records: list[ProcedureRecord | AliasRecord] = [
            ProcedureRecord(
                tenant=tenant,
                name=procedure.name,
                version=procedure.version,
                created_at=time.time(),
                program=msgspec.json.encode(procedure.program),
            )
        ]
        # One alias moves at a time: the check and the write belong together.
        async with self._moving:
            if alias is not None:
                await self._check_alias(tenant, procedure, alias)
                records.append(_alias(tenant, procedure, alias))
            await self._journal().append(records, fail_fast=True)

    async def move_alias(self, tenant: str, procedure: Procedure, alias: str) -> None:
        """Let an alias name a stored version; return once it is durable.

        Raises:
            ConflictError: `procedure.signature`.
        """
        async with self._moving:
            await self._check_alias(tenant, procedure, alias)
            await self._journal().append([_alias(tenant, procedure, alias)], fail_fast=True)

    async def remove(self, tenant: str, procedure: Procedure) -> None:
        """Remove a version that no alias names; return once that is durable.

        Raises:
            ConflictError: `procedure.in_use`.
        """
        async with self._moving:
            listing = await self._journal().list_procedures(tenant, procedure.name)
            aliases = [alias for _, alias, used in listing.aliases if used == procedure.version]
            if aliases:
                raise ConflictError(
                    "procedure.in_use",
                    f"the aliases {', '.join(aliases)} name {procedure.reference}: move or "
                    "remove them first",
                )
            record = ProcedureRemoval(tenant=tenant, name=procedure.name, version=procedure.version)
            await self._journal().append([record], fail_fast=True)
            self._decoded.pop((tenant, procedure.name, procedure.version), None)

    async def remove_alias(self, tenant: str, name: str, alias: str) -> None:
        """Remove an alias; return once that is durable.

        Raises:
            NotFoundError: `procedure.not_found`.
        """
        async with self._moving:
            await self.find(tenant, f"{name}:{alias}")
            record = AliasRemoval(tenant=tenant, name=name, alias=alias)
            await self._journal().append([record], fail_fast=True)

    async def _check_alias(self, tenant: str, procedure: Procedure, alias: str) -> None:
        before = await self._find(tenant, f"{procedure.name}:{alias}")
        if before is not None and before.signature.contract != procedure.signature.contract:
            raise ConflictError(
                "procedure.signature",
                f"{procedure.name}:{alias} names version {before.version}, whose parameters or "
                f"results differ from those of {procedure.version}: use another alias, and move "
                "its callers",
            )


def _alias(tenant: str, procedure: Procedure, alias: str) -> AliasRecord:
    return AliasRecord(tenant=tenant, name=procedure.name, alias=alias, version=procedure.version)
