"""Sessions: open programs, and the ids that clients use for them and their variables.

A session is known by the id of its program or by a name, which is the idempotency key of the
program. A client chooses the name; for Microsoft's client, the server draws a number.

Invariant: the journal alone maps an id to a program, so it means the same after a restart.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from litestar import Request

from ...program.decoding.bodies import revalidate
from ...program.errors import ConflictError, NotFoundError
from ...program.ir import MAX_TITLE_CHARS, Objective, Options, Program, Submission
from ...program.status import ENDED, VariableStatus
from ...service import Service
from ..programs.waiting import wait_for
from ..request_context import service_of, session_idle_s_of, tenant_of, while_connected

CRITERIA: dict[str, Objective] = {
    "latency": "latency",
    "throughput": "throughput",
    "ttft": "ttft",
    "tpot": "tpot",
}
"""Objectives by the names that clients use, in lower case."""

PROGRAM_ID = re.compile(r"p_[0-9a-f]{24}")
_SERVER_ID = re.compile(rf"({PROGRAM_ID.pattern})\.([A-Za-z_]\w*)", re.ASCII)
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w{0,95}", re.ASCII)


def variable_name(given: str) -> str:
    """Return the variable of an id that the client chose: the id itself if it is a name."""
    if _VARIABLE_NAME.fullmatch(given):
        return given
    return f"v_{hashlib.blake2b(given.encode(), digest_size=16).hexdigest()}"


def split_id(semantic_var_id: str) -> tuple[str | None, str]:
    """Return the program and the variable of an id; no program if the client chose the id."""
    if found := _SERVER_ID.fullmatch(semantic_var_id):
        return found[1], found[2]
    return None, variable_name(semantic_var_id)


class Sessions:
    """The sessions of a request's tenant."""

    def __init__(self, service: Service, tenant: str, idle_timeout_s: float) -> None:
        self.service = service
        self.tenant = tenant
        self._idle_timeout_s = idle_timeout_s

    @classmethod
    def of(cls, request: Request[Any, Any, Any]) -> Sessions:
        """Return the sessions that a request may use."""
        return cls(service_of(request), tenant_of(request), session_idle_s_of(request))

    async def open(self, *, name: str | None = None, on_demand: bool = False) -> str:
        """Start a session and return the id of its program.

        Args:
            name: the client's id. A second call with the same name returns the same program.
            on_demand: whether calls wait until one of their outputs is requested. The limit of
                an output is then an upper bound, reduced to what the context leaves.
        """
        if name is not None and (known := await self.find(name)) is not None:
            return known
        options = Options(
            idle_timeout_s=self._idle_timeout_s,
            start="demand" if on_demand else "eager",
            clip_outputs=on_demand,
        )
        title = "session" if name is None else f"session {name}"[:MAX_TITLE_CHARS]
        program = Program(name=title)
        submission, body = revalidate(Submission(program=program, open=True, options=options))
        key = None if name is None else _key(name)
        accepted, _ = await self.service.submit(
            submission, body=body, tenant=self.tenant, idempotency_key=key
        )
        return accepted.id

    async def find(self, session: str) -> str | None:
        """Return the program of a session; None if the client's name is unknown."""
        if PROGRAM_ID.fullmatch(session):
            return session
        return await self.service.find_submitted(_key(session), tenant=self.tenant)

    async def resolve(self, session: str) -> str:
        """Return the program of an existing session.

        Raises:
            NotFoundError: `session.not_found`.
        """
        program = await self.find(session)
        if program is None:
            raise NotFoundError(
                "session.not_found",
                f"session {session!r} does not exist; /v1/submit or /v1/set with this id starts it",
                path="session_id",
            )
        return program

    async def check_live(self, program: str) -> None:
        """Raise ConflictError if a session has ended, NotFoundError if it does not exist."""
        if await self.service.find(program, tenant=self.tenant) in ENDED:
            raise ConflictError("session.ended", f"session {program} has ended")

    async def wait(
        self,
        request: Request[Any, Any, Any],
        program: str,
        variable: str,
        objective: Objective | None,
    ) -> VariableStatus:
        """Wait for a variable as long as the client is connected.

        Raises:
            MissingValueError: if the variable ended without a value.
        """
        work = wait_for(self.service, program, variable, tenant=self.tenant, objective=objective)
        return await while_connected(request, work)


def _key(session: str) -> str:
    # A header cannot contain a line break, so no Idempotency-Key of a client is the same.
    return f"session\n{session}"
