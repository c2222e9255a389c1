"""The executor: accepts, runs and recovers all programs of one server; implements `Service`.

Owns the journal, the engines, the scheduler and every live run, and connects them.

Out of scope: what a program does (`ProgramRun`), what may be accepted (`ProgramIntake`), and where
programs are found (`ProgramDirectory`).

Invariants: an accepted program is durable before its submission is answered. Every accepted
program that has not ended is live here, or will be after the next start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .config import Config
from .engines.command_line import EngineCommandLine
from .engines.connection import EngineStartError
from .engines.constraint_validator import ConstraintValidator
from .engines.embedder import Embedder
from .engines.fleet import Fleet, FleetOptions
from .engines.protocol import Engine
from .explainer import ProgramExplainer
from .functions.plugins import ServerFunctions
from .language.submission import SourceCompiler
from .metrics import MetricsSnapshot, ServerMetrics
from .procedure_catalog import ProcedureCatalog
from .program.errors import ConflictError, ConureError, UnavailableError
from .program.functions import FunctionSignature
from .program.grammar import grammar_of
from .program.ir import Append, Constraint, Json, Message, SourceSubmission, Submission
from .program.status import (
    Accepted,
    Problem,
    ProgramStatus,
    PutValue,
    UsageReport,
    VariableStatus,
)
from .program_reader import ProgramReader
from .prompts.served_model import ServedModel
from .runtime.admission.call_quota import CallQuota
from .runtime.admission.intake import ProgramIntake
from .runtime.admission.load import LoadLimits, LoadMonitor
from .runtime.calls.pins import PinKeeper
from .runtime.persistence.journal_retention import retain
from .runtime.persistence.program_directory import ProgramDirectory, run_variable_status
from .runtime.persistence.resumption import Resumption
from .runtime.program_run import MAX_NODES_INLINE, ProgramRun
from .runtime.program_state import ProgramState
from .runtime.reporting.activity import ServerActivity, server_activity
from .runtime.reporting.receipt import usage_report
from .runtime.reporting.status import append_status, stored_append_status
from .runtime.reporting.trace_exporter import TraceExporter
from .runtime.services import RuntimeServices
from .runtime.steps.client_writes import is_same_value, put_value, wait_writable
from .scheduling.policy import policy_named
from .scheduling.scheduler import Scheduler
from .service import EngineInfo, GrammarInfo, ModelInfo, Readiness, TokenizedPrompt
from .store.damage.background_check import check_journal
from .store.journal import DeleteRecord, Journal, RetentionLimits

logger = logging.getLogger(__name__)

DURABILITY_TIMEOUT_S = 5.0
"""How long a request waits for the journal before it is answered with `store.unavailable`."""
DURABILITY_RETRY_AFTER_S = 5.0
"""`Retry-After` of that answer."""
PING_MAX_AGE_S = 5.0
"""How long after its last answer to a ping an engine counts as ready."""
ENGINE_STATUS_TIMEOUT_S = 5.0
"""How long a status request waits for an engine."""


class StartError(ConureError):
    """The server cannot start. The message is one line for the operator."""


class Executor(ProgramReader):
    """Runs the programs of one server process."""

    def __init__(
        self, config: Config, *, functions: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self._functions = ServerFunctions(
            functions or {}, allowed=config.capabilities, folder=config.retrieve
        )
        self.services = RuntimeServices(
            Scheduler(policy_named(config.policy), latency_tokens=config.latency_tokens),
            CallQuota(config.max_queued_calls),
            LoadMonitor(LoadLimits(config.max_programs, config.max_wait_s or None)),
            self._functions.registry,
            idle_s=config.idle_s or None,
        )
        self.programs = ProgramDirectory(self.services)
        self._constraints = ConstraintValidator(lambda: self.services.engines.values())
        self.embedder = Embedder(lambda: self.services.engines.values())
        self._intake = ProgramIntake(
            self.services, self.programs, self._constraints, self._create_run
        )
        self._sources = SourceCompiler(self._functions.registry.signatures)
        self._pins = PinKeeper(self.services, share=config.pin_share)
        self.procedures = ProcedureCatalog(
            self._intake,
            self.programs,
            self._sources,
            self._pins,
            max_pin_s=3600 * config.pin_hours,
        )
        self.explainer = ProgramExplainer(self._intake, self.programs, self.services, self._pins)
        self.traces = TraceExporter(self.programs)
        self.request_times = self.services.request_times
        self._config = config
        self._metrics = ServerMetrics()
        self._resumption: Resumption | None = None
        self._background: list[asyncio.Task[None]] = []

    # --- start and stop -------------------------------------------------------------------

    async def start(self) -> None:
        """Open the journal, start the engines, and resume the programs that had not ended.

        Most of a large number of programs is resumed after the start, in slices; a request for one
        of them resumes it at once.
        """
        config, services = self._config, self.services
        journal = services.open_journal = await asyncio.to_thread(
            Journal.open, config.data, recover=config.recover
        )
        services.watch.mark = journal.turn_mark
        services.clock.continue_after(journal.clock_shift_s)
        fleet = services.fleet = Fleet(
            FleetOptions(command=EngineCommandLine(config), num_engines=config.num_engines),
            first_epoch=journal.generation * 1_000_000,
            on_arrived=self._engine_arrived,
            on_lost=self._engine_lost,
        )
        reading = asyncio.create_task(journal.unfinished())
        try:
            await fleet.start()
            unfinished = await reading
        except BaseException as error:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await self.stop()
            if isinstance(error, EngineStartError):
                raise StartError("engine.start", str(error)) from error
            raise
        self._resumption = Resumption(
            journal, services, self.programs, self._create_run, self._metrics.program_not_resumed
        )
        self._background.append(await self._resumption.start(unfinished))
        self._background.append(
            asyncio.create_task(retain(journal, self.programs, _retention_limits(config)))
        )
        self._background.append(asyncio.create_task(self.procedures.keep_pins()))
        if not journal.report.is_thorough:
            self._background.append(asyncio.create_task(check_journal(journal)))

    async def drain(self) -> None:
        """Accept no programs, start no calls, and wait for the running calls.

        The caller limits the time.
        """
        self._intake.is_draining = True
        scheduler = self.services.scheduler
        scheduler.pause()
        if num_running := scheduler.num_running:
            message = (
                "stopping: waiting up to %g s for %d running calls; a second signal stops at once, "
                "and the programs continue at the next start"
            )
            logger.warning(message, self._config.drain_s, num_running)
        await scheduler.wait_idle()
        for run in self.programs:
            run.events.drain()

    async def stop(self) -> None:
        """Close everything; safe to call twice."""
        self._intake.is_draining = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.programs.suspend_all()
        self.services.turns.stop()
        await asyncio.to_thread(self._functions.close)
        await self.services.encoder.stop()
        if self.services.fleet is not None:
            await self.services.fleet.stop()
        if self.services.open_journal is not None:
            await self.services.open_journal.close()

    def _create_run(self, state: ProgramState) -> ProgramRun:
        run = ProgramRun(state, self.services, on_durable_end=lambda: self._program_ended(run))
        self.programs.add(run)
        return run

    def _program_ended(self, run: ProgramRun) -> None:
        """Account a program whose end is durable."""
        was_live = self.programs.end(run)
        if not was_live or run.receipt is None:
            return
        count = partial(self._metrics.program_ended, run.state, run.receipt)
        if len(run.state.nodes) <= MAX_NODES_INLINE:
            count()
        else:
            asyncio.get_running_loop().run_in_executor(None, count)
        prompt = run.receipt.prompt_tokens
        logger.info(
            "program %s %s in %.2f s: %d calls, %d of %d prompt tokens computed",
            run.state.id,
            run.state.phase,
            run.receipt.wall_s,
            run.receipt.calls,
            prompt.computed,
            prompt.logical,
        )

    # --- engines --------------------------------------------------------------------------

    def _engine_arrived(self, engine: Engine) -> None:
        services, limits = self.services, engine.hello.limits
        model = services.served_model
        if model is None or model.tokenizer_hash != engine.hello.tokenizer_hash:
            model = ServedModel.of(engine.hello)
        # Engines differ in memory, and any may run a call: a prompt must fit the smallest one.
        smallest = min(services.engines.values(), key=lambda each: each.hello.limits.num_blocks)
        services.served_model = replace(model, limits=smallest.hello.limits)
        services.scheduler.add_engine(
            engine.name,
            capacity=limits.num_blocks * limits.block_size,
            max_sequences=limits.max_sequences,
            steps=lambda: engine.num_steps,
            block_size=limits.block_size,
        )
        engine.on_steps = partial(services.scheduler.engine_advanced, engine.name)

    def _engine_lost(self, engine: Engine) -> None:
        self._metrics.engine_lost()
        self.services.scheduler.remove_engine(engine.name)
        lost = [(run, node) for run in self.programs for node in run.engine_lost(engine.name)]
        deaths = [node.num_deaths for _, node in lost]
        self.services.suspects.engine_died(deaths)
        for number, (run, node) in enumerate(lost):
            others = deaths[:number] + deaths[number + 1 :]
            run.retry_call(node, engine.name, others)

    # --- requests that change programs ----------------------------------------------------

    async def compile(self, source: SourceSubmission) -> tuple[Submission, bytes]:
        """Compile a text; see `Service.compile`."""
        return await asyncio.to_thread(self._sources.compile, source)

    async def submit(
        self,
        submission: Submission,
        *,
        body: bytes,
        tenant: str,
        idempotency_key: str | None = None,
    ) -> tuple[Accepted, bool]:
        """Accept a program; see `Service.submit`."""
        return await self._intake.submit(
            submission, body=body, tenant=tenant, idempotency_key=idempotency_key
        )

    async def append(
        self, program: str, append: Append, *, body: bytes, tenant: str, wait_s: float = 0.0
    ) -> ProgramStatus:
        """Add nodes to an open program; see `Service.append`."""
        run = await self.programs.wait_live(program, tenant, wait_s)
        if run is None:
            status = stored_append_status(await self.programs.load(program, tenant), append)
            if status is None:
                raise ConflictError("session.ended", f"program {program} has ended")
            return status
        await self._intake.append(run, append, body)
        await _wait_durable(run.outbox.barrier(), "the append")
        receipt = run.receipt if run.outbox.has_ended else None
        return append_status(run.state, run.outbox.durable_variables, receipt, append)

    async def cancel(self, program: str, *, tenant: str) -> None:
        """Stop a program; see `Service.cancel`."""
        run = self.programs.find_live(program, tenant)
        if run is None:
            await self.find(program, tenant=tenant)
            return
        run.cancel()
        await _wait_durable(run.outbox.wait_ended(), "the end of the program")

    async def erase(self, program: str, *, tenant: str) -> None:
        """Delete a program with its content; see `Service.erase`."""
        await self.cancel(program, tenant=tenant)
        record = DeleteRecord(programs=(program,), is_secure=True)
        await _wait_durable(self.programs.journal.append([record]), "the deletion")
        self.programs.remove(program)

    async def put(
        self, program: str, variable: str, body: PutValue, *, tenant: str
    ) -> VariableStatus:
        """Commit a value that a client sent; see `Service.put`."""
        run = self.programs.find_live(program, tenant)
        if run is not None:
            await wait_writable(run, variable)
            run = self.programs.find_live(program, tenant)  # it may have ended meanwhile
        if run is None:
            status = await self.programs.stored_variable(program, tenant, variable)
            if status is not None and is_same_value(status, body):
                return status
            raise ConflictError("program.ended", f"program {program} has ended")
        run.state.check_variable(variable)
        put_value(run, variable, body)
        await _wait_durable(run.outbox.barrier(), f"the value of {variable}")
        return run_variable_status(run, variable)

    # --- the server -----------------------------------------------------------------------

    async def check_grammar(self, constraint: Constraint, text: str | None) -> GrammarInfo:
        """Check a constraint; see `Service.check_grammar`."""
        match = await self._constraints.match(grammar_of(constraint), text)
        error = Problem(code=match.code, message=match.message) if match.code else None
        return GrammarInfo(
            is_supported=not match.code,
            is_relaxed=match.is_relaxed,
            matches=match.matches,
            error=error,
        )

    def functions(self) -> list[FunctionSignature]:
        """Return the functions that `call` nodes may name."""
        return self.services.functions.signatures

    async def tokenize(
        self,
        model: str,
        prompt: str | list[Message],
        *,
        tools: list[dict[str, Json]],
        bos: bool = False,
        template_options: Mapping[str, Json] | None = None,
    ) -> TokenizedPrompt:
        """Return the token ids of a prompt; see `Service.tokenize`."""
        served = self.services.model
        served.check_name([model], "model")
        options = dict(template_options or {})
        ids = await asyncio.to_thread(
            served.tokenize, prompt, tools=tools, bos=bos, template_options=options
        )
        return TokenizedPrompt(count=len(ids), max_model_len=served.max_len, tokens=ids)

    def models(self) -> list[ModelInfo]:
        """Return the models that programs can name."""
        model = self.services.model
        tools = () if model.tool_format is None else ("tools",)
        embeddings = ("embeddings",) if self.embedder.is_supported else ()
        return [
            ModelInfo(
                id=model.name,
                aliases=model.aliases,
                context_len=model.max_len,
                description=model.description,
                purpose=model.purpose,
                has_chat_template=model.template.is_defined,
                created=int(model.loaded_at),
                capabilities=(*tools, *embeddings),
            )
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; see `Service.decode`."""
        model = self.services.model
        model.check_id(max(ids, default=0), "prompt")
        return model.tokenizer.decode(ids)

    def activity(self, *, tenant: str) -> ServerActivity:
        """Return what the engines hold and which calls wait; see `Service.activity`."""
        return server_activity(
            self.services,
            lambda program: self.programs.peek_live(program, tenant),
            num_programs=len(self.programs),
        )

    async def engines(self) -> list[EngineInfo]:
        """Return each engine's own counters."""
        infos = await asyncio.gather(*map(_engine_info, list(self.services.engines.values())))
        return [info for info in infos if info is not None]

    async def usage(self, *, tenant: str, since: str | None, until: str | None) -> UsageReport:
        """Sum up the cost of a tenant's programs; see `Service.usage`."""
        sums = await self.programs.journal.usage(tenant, since=since, until=until)
        return usage_report(sums, since=since, until=until)

    async def metrics(self) -> bytes:
        """Return the metrics for operators; see `Service.metrics`."""
        services = self.services
        snapshot = MetricsSnapshot(
            num_programs=len(self.programs),
            num_calls=services.call_quota.num_calls,
            max_calls=self._config.max_queued_calls,
            num_waiting=services.scheduler.num_waiting,
            num_decisions=services.scheduler.num_decisions,
            engines=await self.engines(),
            num_engines=self._config.num_engines,
            journal=self.programs.journal.status(),
            pins=self._pins.totals,
        )
        return self._metrics.render(snapshot)

    async def ready(self) -> Readiness:
        """Return whether programs can run now."""
        reasons = []
        if self._intake.is_draining:
            reasons.append("the server is draining")
        journal = self.services.open_journal
        if journal is None:
            reasons.append("the journal is not open")
        elif journal.problem is not None:
            reasons.append(journal.problem)
        now = time.monotonic()
        engines = self.services.engines.values()
        if not any(now - engine.answered_at <= PING_MAX_AGE_S for engine in engines):
            reasons.append(f"no engine answered a ping within {PING_MAX_AGE_S:g} s")
        return Readiness(is_ready=not reasons, reasons=reasons)


def _retention_limits(config: Config) -> RetentionLimits:
    return RetentionLimits(
        max_age_s=config.keep_days * 86_400 or None,
        max_bytes=int(config.keep_gb * 1e9) or None,
    )


async def _engine_info(engine: Engine) -> EngineInfo | None:
    """Return an engine's own counters; None if it does not answer."""
    try:
        report = await asyncio.wait_for(engine.status(), ENGINE_STATUS_TIMEOUT_S)
    except (ConnectionError, TimeoutError):
        return None
    return EngineInfo(id=engine.name, epoch=engine.epoch, model=engine.hello.model, report=report)


async def _wait_durable(written: Awaitable[None], what: str) -> None:
    """Wait until records are durable, but not longer than `DURABILITY_TIMEOUT_S`."""
    try:
        await asyncio.wait_for(asyncio.shield(written), DURABILITY_TIMEOUT_S)
    except TimeoutError:
        raise UnavailableError(
            "store.unavailable",
            f"{what} is not durable yet (journal timeout): check its status or retry",
            retry_after_s=DURABILITY_RETRY_AFTER_S,
        ) from None
