"""The engine core: executes commands on the contexts of one model, step by step.

`apply` executes a command, `step` runs the model once, and the StepReport that `step` returns
has the results of both. One thread calls both methods; only the runner may block. With an
asynchronous runner, a step is still in flight when `step` returns (see `lookahead`). The next
call of `step` reads it, if possible after starting the step that follows.

Out of scope: sockets, tensors, the processing of sampled ids (`output_processor`), the choice of
tokens (`batch_scheduler`) and of blocks (`kv.manager`).

Invariants: every Generate that `apply` accepts ends in one Finished or Failed, unless it is
aborted or freed. A failed context no longer exists; further commands on it fail with the same
error, until it is freed or `_MAX_FAILED` others have failed. A step that raises fails the contexts
in it and no others, unless the device is lost: then `step` raises `DeviceLostError`, the process
ends, and the server replaces it.

The server may free a context while forks still wait for its tokens. Such a context is
*detached*: it runs without reports until the forks have its tokens, and is then released.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from cachetools import LRUCache

from .. import protocol
from ..kv.manager import KVCacheManager
from ..runner.base import CompletedStep, Handle, Runner, ScheduledSequence
from . import pooling
from .batch_scheduler import schedule_step
from .command_validation import check_fork, check_ids, check_length, check_start
from .context import CACHED, COMPUTED, RECOMPUTED, SHARED, Context, EngineCounters
from .lookahead import FailedLaunch, InFlightStep, is_stale, schedule_lookahead
from .output_processor import ConstraintProvider, OutputProcessor

_log = logging.getLogger(__name__)
_MAX_FAILED: Final = 4096
"""Failed contexts that the engine remembers. The server frees a failed context at once."""


class EngineCore:
    """Contexts of one model, over one runner."""

    def __init__(
        self, runner: Runner, epoch: int, *, constraints: ConstraintProvider | None = None
    ) -> None:
        """Start without contexts.

        Args:
            runner: The model.
            epoch: Generation of the engine process.
            constraints: Compiles constraints. Without it, constrained outputs are rejected.
        """
        self._runner = runner
        self._epoch = epoch
        self._limits = runner.limits
        self._has_constraints = constraints is not None
        self._counters = EngineCounters()
        self._kv = KVCacheManager(self._limits.num_blocks, self._limits.block_size, self._counters)
        self._contexts: dict[int, Context] = {}
        # Failures of contexts that the server has not freed yet.
        self._failed: LRUCache[int, protocol.Failed] = LRUCache(_MAX_FAILED)
        # Freed by the server while forks wait for their tokens.
        self._detached: list[Context] = []
        # Contexts with work. `_prepare_active` removes idle ones and sorts the others.
        self._active: list[Context] = []
        self._is_sorted = True
        self._may_have_idle = False
        self._outputs = OutputProcessor(self, runner, self._kv, self._counters, constraints)
        self._num_arrived = 0
        self._num_steps = 0
        """Steps that the runner has started. A step that only answers Fills has no rows, and is
        not one of them."""
        self._num_tokens = 0
        self._in_flight: InFlightStep | None = None
        self._lacks_memory = False
        """True while contexts that wait for their constraints hold all the memory that others need.
        A command or a finished constraint ends this."""
        self._reports: list[protocol.Report] = []

    # --- commands -----------------------------------------------------------------------

    def hello(self) -> protocol.Hello:
        """Return the first frame: the model, its tokenizer and the engine's limits."""
        runner = self._runner
        return protocol.Hello(
            protocol=protocol.PROTOCOL_VERSION,
            epoch=self._epoch,
            model=runner.model,
            tokenizer_json=runner.tokenizer_json,
            tokenizer_hash=hashlib.sha256(runner.tokenizer_json.encode()).hexdigest(),
            chat_template=runner.chat_template,
            special_tokens=dict(runner.special_tokens),
            bos_id=runner.bos_id,
            eos_ids=list(runner.eos_ids),
            num_ids=runner.num_ids,
            limits=self._limits,
            capabilities=[
                *runner.capabilities,
                *(["constraints"] if self._has_constraints else []),
            ],
            description=runner.description,
            purpose=runner.purpose,
            aliases=runner.aliases,
        )

    def apply(self, command: protocol.Command) -> None:
        """Execute one command. The next `step` reports its results."""
        self._lacks_memory = False
        match command:
            case protocol.Fill() | protocol.GenerateCommand() | protocol.Embed():
                try:
                    self._start(command)
                except protocol.EngineError as error:
                    self.fail(command.context, error.code, error.message)
            case protocol.Free():
                self._free(command)
            case protocol.Abort():
                self._abort(command.context)
            case protocol.Update():
                self._update(command)
            case protocol.Status():
                self._reports.append(self.status(command.nonce))
            case protocol.Ping():
                self._reports.append(protocol.Pong(command.nonce))
            case protocol.ValidateConstraint():
                self._outputs.validate_constraint(command)

    @property
    def is_idle(self) -> bool:
        """Whether `step` would return None until a command arrives or a constraint is ready."""
        return (
            not self._reports
            and self._in_flight is None
            and (self._lacks_memory or all(c.is_released or c.is_stalled for c in self._active))
        )

    def status(self, nonce: int = 0) -> protocol.StatusReport:
        """Return what the engine holds, and its token counts since it started.

        `num_computed_tokens` counts prompts; generated tokens are in `num_decoded_tokens`.
        """
        pool, counters = self._kv.pool, self._counters
        return protocol.StatusReport(
            nonce=nonce,
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_held=pool.num_held,
            num_cached=pool.num_cached,
            num_contexts=len(self._contexts),
            num_steps=self._num_steps,
            num_computed_tokens=counters.computed,
            num_shared_tokens=counters.shared,
            num_cached_tokens=counters.cached,
            num_recomputed_tokens=counters.recomputed,
            num_decoded_tokens=counters.decoded,
        )

    def check(self) -> None:
        """Assert every invariant of the state between steps. Linear; for tests."""
        contexts = self._live_contexts()
        assert all(context.has_work == context.is_queued for context in contexts)
        self._kv.check(contexts, () if self._in_flight is None else self._in_flight.contexts)

    # --- steps --------------------------------------------------------------------------

    def step(self) -> protocol.StepReport | None:
        """Run the model once. Return None if there is nothing to run and nothing to report."""
        self._outputs.poll_constraints()
        self._prepare_active()
        previous = self._in_flight
        if previous is not None:
            self._in_flight = self._launch_lookahead(previous)
            self._complete_step(previous)
            if self._in_flight is not None:
                self._in_flight.sample_deferred()
        if self._in_flight is None and not all(context.is_stalled for context in self._active):
            self._in_flight = self._launch_scheduled()
        started = self._in_flight
        if started is not None and started.handle.is_ready:
            self._in_flight = None
            self._complete_step(started)
        elif previous is None and started is None and not self._reports:
            return None
        reports, self._reports = self._reports, []
        pool = self._kv.pool
        return protocol.StepReport(
            epoch=self._epoch,
            number=self._num_steps,
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_tokens=self._num_tokens,
            is_idle=self.is_idle,
            reports=reports,
        )

    def _launch_scheduled(self) -> InFlightStep | None:
        """Start a step with the rows that the batch scheduler chooses, if there are any."""
        self._kv.begin_step()
        batch = schedule_step(self._active, self._kv, self._limits)
        self._lacks_memory = not (batch.scheduled or batch.complete)
        if self._lacks_memory:
            assert any(c.is_blocked for c in self._active), "no context can run"
            self._kv.seal_step()
            return None
        rows = [context.row for context in batch.scheduled]
        return self._launch(batch.scheduled, rows, batch.complete)

    def _launch_lookahead(self, previous: InFlightStep) -> InFlightStep | None:
        """Start the next step before `previous` is read, if there are rows for it."""
        if previous.is_cut:
            return None
        self._kv.begin_step()
        batch = schedule_lookahead(previous, self._active, self._kv, self._limits)
        if not batch.rows:
            self._kv.seal_step()
            return None
        step = self._launch(batch.contexts, batch.rows, batch.complete)
        step.is_cut = batch.is_cut
        return step

    def _launch(
        self, contexts: list[Context], rows: list[ScheduledSequence], complete: list[Context]
    ) -> InFlightStep:
        """Start a step. An error of the launch is raised when the step is read."""
        handle: Handle = CompletedStep([])
        if rows:
            self._num_steps += 1
            try:
                handle = self._runner.start(rows, self._kv.copies)
            except Exception as error:
                handle = FailedLaunch(error)
        generations = [context.generation for context in contexts]
        written = self._kv.seal_step()
        return InFlightStep(
            self._num_steps, contexts, rows, generations, complete, handle, written_blocks=written
        )

    def _complete_step(self, step: InFlightStep) -> None:
        """Read a step, and commit its results."""
        num_sampled = sum(row.sampling is not None for row in step.rows)
        self._num_tokens += sum(row.num_new for row in step.rows)
        try:
            sampled = step.handle.read()
            if len(sampled) != num_sampled:
                raise RuntimeError(
                    f"the runner returned {len(sampled)} ids for {num_sampled} sampling rows"
                )
        except Exception as error:
            _log.exception("step=%d contexts=%d failed", step.number, len(step.rows))
            # The frames of a failed launch hold its tensors; its handle holds the error.
            error.__traceback__ = None
            self._fail_step(step, error)
            self._runner.check_device()
        else:
            self._commit(step, iter(sampled))
            for context in step.complete:
                if not context.is_released:
                    self._answer_fills(context)
        self._kv.end_step()
        self._remove_idle()

    def _commit(self, step: InFlightStep, sampled: Iterator[int]) -> None:
        """Mark the tokens of a step as computed, and process the sampled ids."""
        kv, counters, discarded = self._kv, self._counters, step.discarded
        size = kv.block_size
        for context, row, generation_at_start in zip(
            step.contexts, step.rows, step.generations, strict=True
        ):
            token_id = None if row.sampling is None else next(sampled)
            if is_stale(context, row, generation_at_start):
                if not context.is_released:
                    kv.trim(context)
                continue
            if context.is_released:
                # Its forks may have shared the KV that this step has computed.
                counters.add_computed(*context.count_computed(row.start, row.length))
                continue
            generation, end = context.generation, row.length
            # The common case: a generated token counts as neither computed nor recomputed.
            if generation is not None and context.num_counted == row.start >= generation.num_prompt:
                context.num_counted = end
            else:
                counters.add_computed(*context.count_computed(row.start, row.length))
            context.num_computed = end
            pooling.add(context, row)
            if end // size > context.depth:
                kv.commit(context)
            if context.fills:
                self._answer_fills(context)
            if token_id is None or generation is None or context in discarded:
                continue
            # A lookahead step has rows of its own, and the output processor reads the context's.
            context.row.logprob = row.logprob
            self._outputs.process_token(context, generation, token_id)

    def _answer_fills(self, context: Context) -> None:
        """Report the Fills whose tokens all have KV."""
        while (counts := context.pop_complete_fill()) is not None:
            self._may_have_idle = True
            if context.hidden_sum is not None:
                self._reports.append(pooling.embedded(context))
                del self._contexts[context.id]
                self._kv.release(context)
                return
            if context.pending_free is None:
                self._reports.append(
                    protocol.Filled(
                        context.id,
                        counts[COMPUTED],
                        counts[SHARED],
                        counts[CACHED],
                        counts[RECOMPUTED],
                    )
                )
        if context.generation is not None:
            self._outputs.finish_if_complete(context, context.generation)

    # --- callbacks of the output processor ----------------------------------------------

    def report(self, report: protocol.Report) -> None:
        """Send a report with the next StepReport."""
        self._reports.append(report)

    def expect_idle(self) -> None:
        """Note that a context may have no work left."""
        self._may_have_idle = True

    def fail(self, context_id: int, code: str, message: str) -> None:
        """Report a failure, and free the context if it exists."""
        failure = self._failed[context_id] = protocol.Failed(context_id, code, message)
        self._reports.append(failure)
        context = self._contexts.pop(context_id, None)
        if context is not None:
            self._outputs.discard(context)
            self._kv.release(context)
            self._may_have_idle = True

    # --- contexts -----------------------------------------------------------------------

    def _start(self, command: protocol.Fill | protocol.GenerateCommand | protocol.Embed) -> None:
        """Start a Fill, a Generate or an Embed.

        Raises:
            EngineError: if the command cannot be executed; the caller frees the context.
        """
        if (failure := self._failed.get(command.context)) is not None:
            raise protocol.EngineError(failure.code, failure.message)
        context = self._contexts.get(command.context)
        check_start(command, context)
        if is_pooled := isinstance(command, protocol.Embed):
            command = pooling.fill_of(command, self._runner.capabilities)
        parent = None
        if command.parent is not None:
            parent = self._contexts.get(command.parent)
            check_fork(command, parent)
        is_new = context is None
        if context is None:
            ids = [] if parent is None else parent.ids[: command.parent_len]
            self._num_arrived += 1
            context = Context(command.context, command.salt, command.rank, self._num_arrived, ids)
            self._contexts[context.id] = context
            if is_pooled:
                pooling.begin(context)
        elif context.rank != command.rank:
            context.rank = command.rank
            self._is_sorted = False
        if isinstance(command, protocol.GenerateCommand):
            self._outputs.begin(context, command)
        if is_new and parent is not None:
            self._kv.fork(context, parent, command.parent_len)
        if isinstance(command, protocol.Fill):
            self._begin_fill(context, command)
        else:
            self._outputs.append_forced(context)
        if context.has_work and not context.is_queued and not context.is_released:
            context.is_queued = True
            self._active.append(context)
            self._is_sorted = False

    def _begin_fill(self, context: Context, command: protocol.Fill) -> None:
        length = len(context.ids) + len(command.tokens)
        check_length(length, self._limits)
        check_ids(command.tokens, self._runner.num_ids)
        context.ids.extend(command.tokens)
        context.add_fill()
        # A queued context may share blocks of a step in flight: it is answered after that step.
        if length == context.num_computed and not context.is_queued:
            self._answer_fills(context)

    def _update(self, command: protocol.Update) -> None:
        context = self._contexts.get(command.context)
        if context is None:
            return
        context.rank = command.rank
        context.next_use = command.next_use
        self._is_sorted = False

    def _free(self, command: protocol.Free) -> None:
        context_id = command.context
        self._failed.pop(context_id, None)
        context = self._contexts.pop(context_id, None)
        if context is None:
            return
        # Drop its reports, including those collected before this command.
        self._reports = [
            report
            for report in self._reports
            if not isinstance(report, protocol.ContextReport) or report.context != context_id
        ]
        self._outputs.discard(context)
        if context.num_waiting_forks and context.has_work:
            context.pending_free = command
            self._detached.append(context)
            return
        self._kv.release(context, command)
        self._may_have_idle = True

    def _abort(self, context_id: int) -> None:
        """Free a context, and report the tokens of its output, if it has not ended."""
        context = self._contexts.get(context_id)
        num_decoded = num_forced = 0
        if context is not None and (generation := context.generation) is not None:
            num_decoded, num_forced = generation.num_decoded, generation.num_forced
            if self._in_flight is not None:
                num_decoded += self._in_flight.samples(context)
        self._free(protocol.Free(context_id))
        self._reports.append(protocol.Aborted(context_id, num_decoded, num_forced))

    def _fail_step(self, step: InFlightStep, error: Exception) -> None:
        """Fail the contexts of a step that raised. Contexts that shared its blocks recompute."""
        for context in step.contexts:
            if context.is_released:
                continue
            if context.pending_free is None:
                self.fail(context.id, "engine.step", f"the model failed: {error!r}")
            else:
                self._kv.release(context)
        self._kv.rollback(step.written_blocks)
        if self._in_flight is not None:
            # The step that was started after it is dropped, and its rows run again.
            self._kv.rollback(self._in_flight.written_blocks)
            self._in_flight = None
        self._may_have_idle = True

    def _prepare_active(self) -> None:
        """Remove idle contexts from the active list, and sort it by priority."""
        self._remove_idle()
        if not self._is_sorted:
            self._active.sort(key=attrgetter("rank", "arrival"))
            self._is_sorted = True

    def _remove_idle(self) -> None:
        """Remove contexts without work from the active list."""
        if self._detached:
            self._detached = [c for c in self._detached if not c.is_released]
        elif not self._may_have_idle:
            return
        self._may_have_idle = False
        active: list[Context] = []
        for context in self._active:
            if context.has_work and not context.is_released:
                active.append(context)
            else:
                context.is_queued = False
        self._active = active

    def _live_contexts(self) -> list[Context]:
        """Return every context that is not released, detached ones included."""
        return [*self._contexts.values(), *(c for c in self._detached if not c.is_released)]
