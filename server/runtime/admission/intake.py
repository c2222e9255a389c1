"""Accepts submissions: checks them, starts their programs, and applies idempotency keys.

Invariant: an accepted program is durable before its submission is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ...engines.constraint_validator import ConstraintValidator
from ...program.errors import ConflictError, ConureError, UnavailableError
from ...program.expressions.regex import PatternsTakeLongError, checking
from ...program.graph.critical_path import longest_chain
from ...program.graph.graph import CheckedAppend, Graph, check_append, graph_of
from ...program.graph.inputs import check_inputs
from ...program.graph.objectives import is_background
from ...program.ir import Append, Objective, Submission
from ...program.nodes.bodies import count_calls
from ...program.status import Accepted
from ...store.journal import DuplicateKeyError, ProgramRecord
from ..calls.priority_table import PriorityTable, first_table
from ..persistence.program_directory import ProgramDirectory
from ..persistence.stored_appends import encode_append, has_deadlines, with_deadlines_after
from ..program_run import MAX_NODES_INLINE, ProgramRun
from ..program_state import ProgramState, check_same_append, request_id_taken
from ..services import RuntimeServices
from .backlog import Backlog
from .checks import check_options, check_program, num_calls
from .load import Load, Newcomer
from .preparation import prepare, prepare_append
from .procedure_library import ProcedureLibrary

DRAINING_RETRY_AFTER_S = 5.0
MAX_INLINE_BYTES = 16_384
"""Bytes of a body that is checked on the event loop."""
MAX_INLINE_STATES = 5_000
"""States of patterns that the check of a body compiles on the event loop: a few milliseconds."""
MAX_RECHECKS = 3
"""How often an append is checked again in a thread if its program grows meanwhile."""
LARGE_BODY_BYTES = 1024 * 1024
"""A larger submission is accepted only while live programs leave memory for it."""
MAX_LIVE_BYTES = 2 * 1024**3
"""JSON bytes of all live programs beyond which large submissions get 429."""

T = TypeVar("T")


class ProgramIntake:
    """Accepts or rejects submissions and appends."""

    def __init__(
        self,
        services: RuntimeServices,
        programs: ProgramDirectory,
        constraints: ConstraintValidator,
        create_run: Callable[[ProgramState], ProgramRun],
    ) -> None:
        self.is_draining = False
        self.library = ProcedureLibrary(lambda: programs.journal)
        self._services = services
        self._programs = programs
        self._constraints = constraints
        self._create_run = create_run
        self._accepting: dict[tuple[str, str], asyncio.Future[None]] = {}
        """Submissions that are not durable yet, by tenant and idempotency key."""
        self._backlog = Backlog(services.call_quota, services.scheduler.policy)

    async def submit(
        self,
        submission: Submission,
        *,
        body: bytes,
        tenant: str,
        idempotency_key: str | None,
        request: bytes | None = None,
        is_expanded: bool = False,
    ) -> tuple[Accepted, bool]:
        """Accept a program; see `Service.submit`.

        Args:
            submission: the program.
            body: its JSON.
            tenant: its owner.
            idempotency_key: identifies the request.
            request: what the client sent, if it is not `body`.
            is_expanded: whether its procedure calls are expanded already.
        """
        body_hash = _hash(body if request is None else request)
        if (known := await self._find_accepted(tenant, idempotency_key)) is not None:
            return await self._replay(tenant, body_hash, *known), True
        try:
            self._check_memory(len(body))
            library = None if is_expanded else self.library
            submission, body = await prepare(submission, body, tenant, library)
            graph = await self._check(submission, body, tenant)
            state, priorities = await self._off_loop(
                body, lambda: self._create_state(submission, tenant, graph)
            )
            self._check_id(submission.id)
        except BaseException as error:
            # The id may belong to a request with the same key, whose answer the client did not get.
            if isinstance(error, ConflictError):
                known = await self._find_accepted(tenant, idempotency_key)
            if known is None:
                self._programs.release_waiters(submission.id or "")
                raise
            return await self._replay(tenant, body_hash, *known), True
        run = self._create_run(state)
        record = ProgramRecord(
            id=state.id,
            tenant=tenant,
            idempotency_key=idempotency_key,
            body_hash=body_hash,
            body=body,
            created_at=state.created_at,
            name=state.name,
        )
        accepted = run.accept(record)
        self._note_accepting(tenant, idempotency_key, accepted)
        # Its calls need not wait for the journal: their results do.
        run.start(priorities)
        try:
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            # The client is gone, but a program that may be durable must stay live.
            accepted.add_done_callback(partial(self._discard_if_refused, state.id, submission.id))
            raise
        except DuplicateKeyError as error:
            self._programs.discard(state.id, error)
            return await self._replay(tenant, body_hash, error.program, error.body_hash), True
        except ConureError as error:
            refusal = _refusal(error, submission.id)
            self._programs.discard(state.id, refusal)
            if refusal is error:
                raise
            raise refusal from error
        return _accepted(state.id, list(graph.outputs)), False

    async def find_accepted(
        self, request: bytes, *, tenant: str, idempotency_key: str | None
    ) -> Accepted | None:
        """Return the answer to an earlier request with the same key; None if there is none.

        Raises:
            ConflictError: `idempotency.conflict` if that request was another one.
        """
        known = await self._find_accepted(tenant, idempotency_key)
        return None if known is None else await self._replay(tenant, _hash(request), *known)

    async def _find_accepted(self, tenant: str, key: str | None) -> tuple[str, bytes] | None:
        """Return the program of an idempotency key, and the hash of its submission.

        A program that is not durable yet is waited for.
        """
        if key is None:
            return None
        if (accepting := self._accepting.get((tenant, key))) is not None:
            await asyncio.wait([accepting])
        return await self._programs.journal.find_idempotent(tenant, key)

    def _note_accepting(
        self, tenant: str, key: str | None, accepting: asyncio.Future[None]
    ) -> None:
        """Remember a submission until it is durable or rejected."""
        if key is None:
            return

        def forget(done: asyncio.Future[None]) -> None:
            if self._accepting.get((tenant, key)) is done:
                del self._accepting[tenant, key]

        self._accepting[tenant, key] = accepting
        accepting.add_done_callback(forget)

    def _create_state(
        self, submission: Submission, tenant: str, graph: Graph
    ) -> tuple[ProgramState, PriorityTable | None]:
        """Return the state of a program, and the priorities of its calls if there are many."""
        state = ProgramState(
            submission.id or f"p_{secrets.token_hex(12)}",
            tenant,
            graph,
            submission.inputs,
            submission.options,
            name=submission.program.name,
            is_open=submission.open,
            created_at=self._services.clock.now(),
        )
        if len(state.nodes) <= MAX_NODES_INLINE:
            return state, None
        return state, first_table(state, self._services.scheduler.service_time)

    async def check(
        self, submission: Submission, body: bytes, tenant: str, *, is_expanded: bool = False
    ) -> tuple[Submission, Graph]:
        """Return what `submit` would run, completed, without running it.

        Raises:
            ConureError: as `submit`.
        """
        library = None if is_expanded else self.library
        submission, _ = await prepare(submission, body, tenant, library)
        return submission, await self._check(submission, body, tenant)

    async def _check(self, submission: Submission, body: bytes, tenant: str) -> Graph:
        services = self._services
        # No chain is longer than all calls.
        most = count_calls(submission.program.nodes)
        background = is_background(_objectives_of(submission))
        newcomer = Newcomer(most, most, background)
        self._check_capacity(newcomer)
        self._check_id(submission.id)
        await self._check_not_ended(submission.id, tenant)
        check_options(submission, services.scheduler.policy.name)
        graph = await self._off_loop(body, lambda: _checked_graph(submission))
        num_new_calls = num_calls(graph)
        if services.load.is_busy(self._load()):
            depth = await self._off_loop(body, lambda: longest_chain(graph))
            newcomer = Newcomer(num_new_calls, depth, background)
        self._check_capacity(newcomer, num_new_calls)
        await check_program(
            graph,
            submission.inputs,
            services.model,
            services.functions,
            self._constraints,
            services.turns,
            clip_outputs=submission.options.clip_outputs,
            is_large=len(body) > MAX_INLINE_BYTES,
        )
        self._check_capacity(newcomer, num_new_calls)  # other programs were accepted meanwhile
        self._check_id(submission.id)
        return graph

    def _check_id(self, program: str | None) -> None:
        """Check that no live program has an id; the journal refuses the ids of ended ones."""
        if program is not None and self._programs.is_live(program):
            raise _id_taken(program)

    async def _check_not_ended(self, program: str | None, tenant: str) -> None:
        """Check that no ended program of the tenant has an id. Until the journal refused it, a new
        program would hide the ended one.
        """
        if program is None:
            return
        if await self._programs.journal.find_status(tenant, program) is not None:
            raise _id_taken(program)

    async def append(self, run: ProgramRun, append: Append, body: bytes) -> None:
        """Add nodes to a live program; see `Service.append`. Durable after the next barrier."""
        try:
            append, body, checked = await self._check_append(run, append, body)
        except ConureError:
            if not _has_append(run.state, append):
                raise
            return
        if _has_append(run.state, append):
            return  # the first request, whose answer the client did not get, has added them
        run.append(append, body, checked)
        self._services.call_quota.count(run.state)

    async def _check_append(
        self, run: ProgramRun, append: Append, body: bytes
    ) -> tuple[Append, bytes, CheckedAppend]:
        """Return an append with all defaults, its JSON, and what the graph becomes with it."""
        self._check_open(run)
        self._check_memory(len(body))
        graph = run.state.graph
        append, body = await prepare_append(append, body, run.state.tenant, self.library, graph)
        if has_deadlines(append):
            age_s = self._services.clock.now() - run.state.created_at
            body = encode_append(append, age_s)
            append = with_deadlines_after(append, age_s)
        num_new_calls = count_calls(append.nodes)
        newcomer = Newcomer(num_new_calls, is_background=True)  # what it continues was accepted
        self._check_capacity(newcomer, num_new_calls, is_append=True)
        checked = await self._off_loop(body, lambda: check_append(graph, append))
        services = self._services
        await check_program(
            graph,
            {},
            services.model,
            services.functions,
            self._constraints,
            services.turns,
            append=append,
            is_large=len(body) > MAX_INLINE_BYTES,
        )
        for _ in range(MAX_RECHECKS):
            if checked.version == graph.version:
                break
            checked = await self._off_loop(body, lambda: check_append(graph, append))
        # Other programs were accepted meanwhile.
        self._check_capacity(newcomer, num_new_calls, is_append=True)
        self._check_open(run)
        return append, body, checked

    async def _off_loop(self, body: bytes, check: Callable[[], T]) -> T:
        """Run a check whose time grows with a body, and that changes nothing.

        It runs in a thread if the body is large or its patterns take long to compile.
        """
        if len(body) <= MAX_INLINE_BYTES:
            try:
                with checking(MAX_INLINE_STATES, is_trial=True):
                    return check()
            except PatternsTakeLongError:
                pass  # the thread starts again

        def check_with_patterns() -> T:
            with checking():
                return check()

        return await self._services.turns.in_thread(check_with_patterns)

    def _check_open(self, run: ProgramRun) -> None:
        if run.is_over or not run.state.is_open:
            message = f"program {run.state.id} is closed and accepts no more nodes"
            raise ConflictError("session.closed", message)

    def _load(self, *, is_append: bool = False) -> Load:
        services = self._services
        return Load(
            num_programs=0 if is_append else len(self._programs),
            num_calls=services.call_quota.num_calls,
            num_sequences=services.num_sequences,
        )

    def _check_capacity(
        self, newcomer: Newcomer, num_new_calls: int = 0, *, is_append: bool = False
    ) -> None:
        if self.is_draining:
            raise UnavailableError(
                "server.draining", "the server is stopping", retry_after_s=DRAINING_RETRY_AFTER_S
            )
        services = self._services
        services.call_quota.check(num_new_calls)
        services.load.check(
            newcomer,
            self._load(is_append=is_append),
            lambda: self._backlog.num_ahead(
                newcomer, call_s=services.load.call_s, now_s=services.clock.now()
            ),
        )

    def _check_memory(self, size: int) -> None:
        """Check that there is memory for a large submission in addition to the live programs.

        Raises:
            UnavailableError: `queue.full` (429).
        """
        if size <= LARGE_BODY_BYTES:
            return
        num_bytes = self._programs.num_bytes
        if num_bytes + size > MAX_LIVE_BYTES:
            raise UnavailableError(
                "queue.full",
                f"live programs have {num_bytes:,} bytes; {size:,} more would exceed the limit of "
                f"{MAX_LIVE_BYTES:,}: retry later",
                retry_after_s=2,
                status=429,
            )

    def _discard_if_refused(
        self, program: str, chosen_id: str | None, accepted: asyncio.Future[None]
    ) -> None:
        error = accepted.exception()
        if isinstance(error, ConureError):
            self._programs.discard(program, _refusal(error, chosen_id))

    async def _replay(
        self, tenant: str, body_hash: bytes, program: str, known_hash: bytes
    ) -> Accepted:
        """Answer a submission whose idempotency key is known."""
        if known_hash != body_hash:
            raise ConflictError(
                "idempotency.conflict",
                f"this Idempotency-Key belongs to program {program}, which has a different body",
            )
        status = await self._programs.status(program, tenant, nodes=())
        return _accepted(program, status.outputs)


def _hash(request: bytes) -> bytes:
    return hashlib.blake2b(request, digest_size=32).digest()


def _objectives_of(submission: Submission) -> dict[str, Objective]:
    """Return the objective of each output; the default is `latency`."""
    defaults: dict[str, Objective] = dict.fromkeys(submission.program.outputs, "latency")
    return defaults | submission.objectives


def _has_append(state: ProgramState, append: Append) -> bool:
    """Return whether an append was applied.

    Raises:
        ConflictError: `idempotency.conflict` if another append with its request id was applied.
    """
    known = state.append_ids.get(append.request_id or "")
    if known is None:
        return False
    check_same_append(state.id, known, append)
    has_names = append.variables.keys() <= state.graph.variables.keys()
    if not has_names or any(
        name not in state.values or state.values[name] != value
        for name, value in append.inputs.items()
    ):
        raise request_id_taken(state.id, append)
    return True


def _refusal(error: ConureError, chosen_id: str | None) -> ConureError:
    """Return the error of a submission that the journal has refused."""
    if chosen_id is not None and error.code == "store.invariant":
        return _id_taken(chosen_id)
    return error


def _id_taken(program: str) -> ConflictError:
    return ConflictError(
        "program.id_taken", f"there is a program {program}; choose a random id, or let the server"
    )


def _accepted(program: str, outputs: list[str]) -> Accepted:
    return Accepted(id=program, status="accepted", outputs=outputs, url=f"/v1/programs/{program}")


def _checked_graph(submission: Submission) -> Graph:
    graph = graph_of(submission)
    if submission.options.require_inputs:
        check_inputs(graph)
    return graph
