"""All programs of one server: accepted, run, recovered; the `Service` behind the routes.

Owns the journal, the engines, the scheduler and every live run, and joins them. What a
program does is `run`'s business; this file decides only whether a program comes in, finds
programs for readers, and moves work when engines come and go.

Kept true: an accepted program is on disk before its submission is answered; a program
belongs to one tenant and is found by no other; whatever was accepted and has not ended is
live here, or will be after the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from .config import Config
from .engines.command import command_of
from .engines.engine import Engine, EngineStartError
from .engines.fleet import Fleet, FleetOptions
from .engines.grammars import Grammars
from .metrics import Metrics, Moment
from .program.control import count_calls
from .program.errors import (
    ConflictError,
    ConureError,
    NotFoundError,
    UnavailableError,
)
from .program.grammar import grammar_of
from .program.graph import Graph
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
from .prompts.model import Model
from .runs.admission import check_options, check_program, check_variables, num_calls
from .runs.answers import put_value, stands_already
from .runs.encoder import Encoder
from .runs.execution import Execution
from .runs.outbox import iso
from .runs.receipt import usage_report
from .runs.recovery import restore
from .runs.report import program_status, stored_status, unreadable, variable_status
from .runs.room import Room
from .runs.run import Run
from .scheduling.policy import policy_named
from .scheduling.scheduler import Scheduler
from .service import EngineInfo, GrammarInfo, ModelInfo, Readiness
from .store.journal import (
    DuplicateKeyError,
    EventRecord,
    Journal,
    ProgramRecord,
    StoredProgram,
)

logger = logging.getLogger(__name__)

NUM_RECENT = 64
"""Ended programs that are still answered from memory; the others are read from the journal."""
RECENT_BYTES = 64 * 1024 * 1024
"""JSON of all of them together."""
PAGE = 500
ANSWERS_WITHIN_S = 5.0
NUM_FUNCTION_THREADS = 32


class StartError(ConureError):
    """The server cannot start; the message is one line for its operator."""


class Executor:
    """Runs programs; one for each server process."""

    def __init__(
        self, config: Config, *, functions: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self.functions: Mapping[str, Callable[..., Any]] = dict(functions or {})
        # Apart from the threads that the server itself needs: these may be blocked for long.
        self.function_threads = ThreadPoolExecutor(
            NUM_FUNCTION_THREADS, thread_name_prefix="function"
        )
        self.scheduler = Scheduler(policy_named(config.policy), strict_tokens=config.latency_tokens)
        self.encoder = Encoder()
        self.room = Room(config.max_queued_calls)
        self.grammars = Grammars(lambda: self._fleet.engines.values() if self._fleet else ())
        self._config = config
        self._journal: Journal | None = None
        self._fleet: Fleet | None = None
        self._model: Model | None = None
        self._runs: dict[str, Run] = {}
        self._recent: OrderedDict[str, Run] = OrderedDict()
        self._recent_bytes = 0
        self._metrics = Metrics()
        self._is_draining = False
        self._is_stopped = False

    # --- run.World ------------------------------------------------------------------------

    @property
    def journal(self) -> Journal:
        """The open journal."""
        assert self._journal is not None, "start() comes first"
        return self._journal

    @property
    def model(self) -> Model:
        """The model of the engines."""
        assert self._model is not None, "start() comes first"
        return self._model

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if it is alive."""
        return None if self._fleet is None else self._fleet.engines.get(name)

    def _run_ended(self, run: Run) -> None:
        """The end of a program is on disk."""
        if self._runs.pop(run.execution.id, None) is None:
            return
        self.room.leave(run.execution)
        if run.receipt is not None:
            self._metrics.program_ended(run.execution, run.receipt)
        self._recent[run.execution.id] = run
        self._recent_bytes += run.outbox.num_bytes
        while self._recent and (
            len(self._recent) > NUM_RECENT or self._recent_bytes > RECENT_BYTES
        ):
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= oldest.outbox.num_bytes

    # --- life -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the journal, start the engines, let unfinished programs go on."""
        self._journal = Journal.open(self._config.data)
        self._fleet = Fleet(
            FleetOptions(command=command_of(self._config), num_engines=self._config.num_engines),
            first_epoch=self._journal.generation * 1_000_000,
            arrived=self._engine_arrived,
            lost=self._engine_lost,
        )
        try:
            await self._fleet.start()
        except EngineStartError as error:
            await self.stop()
            raise StartError("engine.start", str(error)) from error
        ends = [self._resume(stored) for stored in await self._journal.unfinished()]
        if ends := [end for end in ends if end is not None]:
            await asyncio.wait(ends, timeout=ANSWERS_WITHIN_S)

    async def drain(self) -> None:
        """Take nothing more, start no call, and wait for those that run."""
        self._is_draining = True
        self.scheduler.pause()
        if num := self.scheduler.num_running:
            message = "stopping: %d running calls have up to %g s to end"
            logger.warning(message, num, self._config.drain_s)
        await self.scheduler.wait_idle()
        for run in self._runs.values():
            run.feed.drain()

    async def stop(self) -> None:
        """Close everything; safe to call twice."""
        self._is_draining = self._is_stopped = True
        for run in self._runs.values():
            run.park()
        self._runs.clear()
        self.function_threads.shutdown(wait=False, cancel_futures=True)
        await self.encoder.stop()
        if self._fleet is not None:
            await self._fleet.stop()
        if self._journal is not None:
            await self._journal.close()

    def _resume(self, stored: StoredProgram) -> asyncio.Future[None] | None:
        """Let a program go on; if it cannot, end it: resolves when its end is on disk."""
        try:
            execution, past = restore(stored)
            self._add(execution).resume(past)
        except Exception:
            # One program that cannot be read back must not keep the others from going on.
            logger.exception("program %s cannot be resumed", stored.id)
            with contextlib.suppress(Exception):  # what is left of it may be broken anyhow
                if stored.id in self._runs:
                    self._forget(self._runs[stored.id])
            return self._bury(stored)
        return None

    def _bury(self, stored: StoredProgram) -> asyncio.Future[None]:
        problem = Problem(
            code="program.unreadable",
            message="the server could not take it up after a start; its log says why",
        )
        now = time.time()
        end = unreadable(stored, problem, at=now)
        seq = self.journal.next_seq()
        told = {
            "program": stored.id,
            "status": end.status,
            "receipt": msgspec.Raw(end.receipt),
            "seq": seq,
            "at": iso(now),
        }
        event = EventRecord(
            program=stored.id,
            seq=seq,
            type="program.finished",
            data=msgspec.json.encode(told),
            at=now,
        )
        written = self.journal.append([event, end])
        written.add_done_callback(partial(_log_failure, stored.id))
        return written

    def _add(self, execution: Execution) -> Run:
        run = Run(execution, self, ended=lambda: self._run_ended(run))
        self._runs[execution.id] = run
        self.room.enter(execution)
        return run

    def _engine_arrived(self, engine: Engine) -> None:
        limits = engine.hello.limits
        if self._model is None or self._model.tokenizer_hash != engine.hello.tokenizer_hash:
            self._model = Model.of(engine.hello)
        self.scheduler.engine_arrived(
            engine.name,
            capacity=limits.num_blocks * limits.block_size,
            max_sequences=limits.max_sequences,
            steps=lambda: engine.num_steps,
            block_size=limits.block_size,
        )

    def _engine_lost(self, engine: Engine) -> None:
        self._metrics.engine_lost()
        self.scheduler.engine_lost(engine.name)
        for run in list(self._runs.values()):
            run.engine_lost(engine.name)

    # --- programs in ----------------------------------------------------------------------

    async def submit(
        self,
        submission: Submission,
        *,
        body: bytes,
        tenant: str,
        idempotency_key: str | None = None,
    ) -> tuple[Accepted, bool]:
        """Accept a program; see `Service.submit`."""
        body_hash = hashlib.blake2b(body, digest_size=32).digest()
        if idempotency_key is not None:
            known = await self._reading.find_idempotent(tenant, idempotency_key)
            if known is not None:
                return await self._replay(tenant, body_hash, *known), True
        self._check_room()
        check_options(submission, self.scheduler.policy.name)
        graph = Graph.build(
            submission.program,
            submission.inputs,
            open=submission.open,
            objectives=submission.objectives,
        )
        self._check_room(num_calls(graph))
        await check_program(graph, submission.inputs, self.model, self.functions, self.grammars)
        self._check_room(num_calls(graph))  # others came in meanwhile
        execution = Execution(
            f"p_{secrets.token_hex(12)}",
            tenant,
            graph,
            submission.inputs,
            submission.options,
            name=submission.program.name,
            is_open=submission.open,
            created_at=time.time(),
        )
        run = self._add(execution)
        record = ProgramRecord(
            id=execution.id,
            tenant=tenant,
            idempotency_key=idempotency_key,
            body_hash=body_hash,
            body=body,
            created_at=execution.created_at,
        )
        accepted = run.accept(record)
        # Its calls need not wait for the disk: nothing that they make leaves before it is there.
        run.start()
        try:
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            # Whoever asked is gone, but what may be on disk must be live here as well.
            accepted.add_done_callback(lambda done: self._settle(run, done))
            raise
        except DuplicateKeyError as error:
            self._forget(run)
            return await self._replay(tenant, body_hash, error.program, error.body_hash), True
        except ConureError:
            self._forget(run)
            raise
        return _accepted(execution.id, list(graph.outputs)), False

    def _settle(self, run: Run, accepted: asyncio.Future[None]) -> None:
        if accepted.cancelled() or accepted.exception() is not None:
            self._forget(run)

    def _forget(self, run: Run) -> None:
        """A program that was not accepted after all."""
        self._runs.pop(run.execution.id, None)
        self.room.leave(run.execution)
        run.park()

    async def _replay(
        self, tenant: str, body_hash: bytes, program: str, known_hash: bytes
    ) -> Accepted:
        if known_hash != body_hash:
            raise ConflictError(
                "idempotency.conflict",
                f"this Idempotency-Key belongs to program {program}, which had another body",
            )
        status = await self.status(program, tenant=tenant)
        return _accepted(program, status.outputs)

    def _check_room(self, more: int = 0) -> None:
        if self._is_draining:
            raise UnavailableError("server.draining", "the server is going away", retry_after_s=5)
        self.room.check(more)

    async def append(
        self, program: str, append: Append, *, body: bytes, tenant: str
    ) -> ProgramStatus:
        """Add nodes to an open program; see `Service.append`."""
        run = self._live(program, tenant)
        if run is None:
            await self._stored(program, tenant)
            raise ConflictError("session.ended", f"program {program} has ended")
        if not run.execution.is_open:
            raise ConflictError("session.closed", f"program {program} takes no more nodes")
        more = count_calls(append.nodes)
        self._check_room(more)
        check_variables(append.variables, "variables")
        await check_program(
            run.execution.graph, {}, self.model, self.functions, self.grammars, append=append
        )
        self._check_room(more)  # others came in meanwhile
        if run.is_over or not run.execution.is_open:
            raise ConflictError("session.closed", f"program {program} takes no more nodes")
        run.append(append, body)
        self.room.count(run.execution)
        await _in_time(run.outbox.barrier(), "the nodes")
        receipt = run.receipt if run.outbox.has_ended else None
        return program_status(run.execution, run.outbox.settled, receipt, only=append)

    async def cancel(self, program: str, *, tenant: str) -> ProgramStatus:
        """Stop a program; see `Service.cancel`."""
        run = self._live(program, tenant)
        if run is not None:
            run.cancel()
            await _in_time(run.outbox.wait_ended(), "the end of the program")
        return await self.status(program, tenant=tenant)

    async def put(
        self, program: str, variable: str, body: PutValue, *, tenant: str
    ) -> VariableStatus:
        """Commit what comes from the client; see `Service.put`."""
        run = self._live(program, tenant)
        if run is None:
            status = (await self._stored(program, tenant)).variables.get(variable)
            if status is not None and stands_already(status, body):
                return status
            raise ConflictError("program.ended", f"program {program} has ended")
        run.execution.check_variable(variable)
        put_value(run, variable, body)
        await _in_time(run.outbox.barrier(), f"the answer to {variable}")
        if run.execution.is_resolved(variable) and not await run.outbox.wait_for(
            variable, ANSWERS_WITHIN_S
        ):
            raise _not_on_disk(f"the value of {variable}")
        return _variable(run, variable)

    # --- programs out ---------------------------------------------------------------------

    async def find(self, program: str, *, tenant: str) -> None:
        """Make sure that there is such a program; see `Service.find`."""
        if self._live(program, tenant) is None and self._recently(program, tenant) is None:
            await self._stored(program, tenant)

    async def status(self, program: str, *, tenant: str) -> ProgramStatus:
        """What is known about a program; see `Service.status`."""
        run = self._live(program, tenant) or self._recently(program, tenant)
        if run is None:
            return await self._stored(program, tenant)
        receipt = run.receipt if run.outbox.has_ended else None
        return program_status(run.execution, run.outbox.settled, receipt)

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
        run = self._live(program, tenant) or self._recently(program, tenant)
        if run is None:
            found = (await self._stored(program, tenant)).variables.get(variable)
            if found is None:
                raise NotFoundError(
                    "variable.not_found", f"program {program} has no variable {variable}"
                )
            return found
        run.execution.check_variable(variable)
        run.want(variable, objective)
        if wait_s > 0:
            await run.outbox.wait_for(variable, wait_s)
        return _variable(run, variable)

    async def events(
        self, program: str, *, tenant: str, after: int, is_durable: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Events of a program; see `Service.events`."""
        run = self._live(program, tenant) or self._recently(program, tenant)
        if run is None:
            await self._stored(program, tenant)
        last = after
        # What was before this process, or before memory forgot it, is in the journal.
        while run is None or last < run.feed.first_seq - 1:
            page = await self._reading.events(tenant, program, last, PAGE)
            if run is not None:
                page = [record for record in page if record.seq < run.feed.first_seq]
            if not page:
                break
            for record in page:
                last = record.seq
                yield Event(record.seq, record.type, msgspec.json.decode(record.data))  # type: ignore[arg-type]  # written from an EventType
        if run is not None:
            reading = run.feed.read(last, is_durable=is_durable)
            try:
                async for event in reading:
                    yield event
            finally:
                await reading.aclose()

    async def check_grammar(self, constraint: Constraint, text: str | None) -> GrammarInfo:
        """What is known about a constraint; see `Service.check_grammar`."""
        found = await self.grammars.match(grammar_of(constraint), text)
        error = Problem(code=found.code, message=found.message) if found.code else None
        return GrammarInfo(
            is_supported=not found.code,
            is_relaxed=found.is_relaxed,
            matches=found.matches,
            error=error,
        )

    def models(self) -> list[ModelInfo]:
        """The models that programs can name."""
        model = self.model
        return [
            ModelInfo(
                id=model.name,
                context_len=model.max_len,
                description=model.description,
                created=int(model.loaded_at),
                capabilities=() if model.tool_format is None else ("tools",),
            )
        ]

    async def engines(self) -> list[EngineInfo]:
        """What each engine holds and has computed, by its own counters."""
        infos = []
        for engine in list(self._fleet.engines.values()) if self._fleet else []:
            try:
                report = await asyncio.wait_for(engine.status(), ANSWERS_WITHIN_S)
            except (ConnectionError, TimeoutError):
                continue
            infos.append(
                EngineInfo(
                    id=engine.name, epoch=engine.epoch, model=engine.hello.model, report=report
                )
            )
        return infos

    async def usage(self, *, tenant: str, since: str | None, until: str | None) -> UsageReport:
        """What a tenant's programs cost; see `Service.usage`."""
        sums = await self._reading.usage(tenant, since=since, until=until)
        return usage_report(sums, since=since, until=until)

    async def metrics(self) -> bytes:
        """What operators watch; see `Service.metrics`."""
        moment = Moment(
            num_programs=len(self._runs),
            num_calls=self.room.num_calls,
            max_calls=self._config.max_queued_calls,
            num_waiting=self.scheduler.num_waiting,
            num_decisions=self.scheduler.num_decisions,
            engines=await self.engines(),
            num_engines=self._config.num_engines,
            journal=self._reading.status(),
        )
        return self._metrics.page(moment)

    async def ready(self) -> Readiness:
        """Whether programs can run now."""
        reasons = []
        if self._is_draining:
            reasons.append("the server is draining")
        if self._journal is None or not self._journal.healthy:
            reasons.append("the journal cannot be written")
        engines = self._fleet.engines.values() if self._fleet else []
        now = time.monotonic()
        if not any(now - engine.answered_at <= ANSWERS_WITHIN_S for engine in engines):
            reasons.append("no engine answered a ping within 5 s")
        return Readiness(is_ready=not reasons, reasons=reasons)

    # --- finding --------------------------------------------------------------------------

    def _live(self, program: str, tenant: str) -> Run | None:
        run = _owned(self._runs.get(program), tenant)
        if run is not None:
            run.touch()  # somebody cares: an attached program lives on
        return run

    def _recently(self, program: str, tenant: str) -> Run | None:
        return _owned(self._recent.get(program), tenant)

    @property
    def _reading(self) -> Journal:
        """The journal, for a request; it may come after the end."""
        self._check_running()
        return self.journal

    def _check_running(self) -> None:
        if self._is_stopped:
            raise UnavailableError("server.draining", "the server is going away", retry_after_s=5)

    async def _stored(self, program: str, tenant: str) -> ProgramStatus:
        stored = await self._reading.load_program(tenant, program)
        if stored is None or stored.end is None:
            self._check_running()  # a program that a stop has just parked has no end either
            raise NotFoundError("program.not_found", f"there is no program {program}")
        return stored_status(stored)


def _owned(run: Run | None, tenant: str) -> Run | None:
    return run if run is not None and run.execution.tenant == tenant else None


async def _in_time(written: Awaitable[None], what: str) -> None:
    """Wait until something is on disk, but not for ever for a disk that stalls."""
    try:
        await asyncio.wait_for(asyncio.shield(written), ANSWERS_WITHIN_S)
    except TimeoutError:
        raise _not_on_disk(what) from None


def _not_on_disk(what: str) -> UnavailableError:
    return UnavailableError(
        "store.unavailable",
        f"the disk has not taken {what} yet, but may still do so; look, or send it again",
        retry_after_s=ANSWERS_WITHIN_S,
    )


def _log_failure(program: str, written: asyncio.Future[None]) -> None:
    if not written.cancelled() and written.exception() is not None:
        logger.error("the end of program %s was not written: %r", program, written.exception())


def _variable(run: Run, variable: str) -> VariableStatus:
    is_ended = run.outbox.has_ended
    return variable_status(run.execution, run.outbox.settled, variable, is_ended=is_ended)


def _accepted(program: str, outputs: list[str]) -> Accepted:
    return Accepted(id=program, status="accepted", outputs=outputs, url=f"/v1/programs/{program}")
