"""The engine: contexts of one model, told what to do by commands, step by step.

`apply` takes commands, `step` lets the model run once, and what comes of both is reported in
the Step that `step` returns. One thread calls both; nothing here blocks but the runner. Where
the runner computes by itself a step is on its way when `step` returns (`flight`): it is read
by the next call, behind the start of its follower if that may be.

Knows contexts, commands and reports. Refuses to know sockets, tensors, what becomes of
sampled ids (`outputs`), and which tokens or blocks a step gets (`batcher`, `memory`). Kept
true: every Generate that `apply` accepts ends in one Finished or Failed unless it is aborted
or freed; a context that failed is gone, and answers later commands with the same failure
instead of starting anew; a step that raises fails the contexts that were in it and nobody
else.

A context that the server frees while forks still wait for its tokens goes on without a
name until they have them: its reports are dropped, and what it should keep is kept then.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from . import api
from .batcher import plan
from .context import CACHED, COMPUTED, RECOMPUTED, SHARED, Context, Tally, Totals
from .flight import Broken, Flight, following
from .memory import KVMemory
from .outputs import Constraints, Outputs
from .refusals import check_fork, check_length, check_start
from .runner import Done, Row, Runner

_log = logging.getLogger(__name__)
_MAX_FAILED = 4096


class Engine:
    """Contexts over one runner."""

    def __init__(
        self, runner: Runner, epoch: int, *, constraints: Constraints | None = None
    ) -> None:
        """Begin with no context.

        Args:
            runner: The model.
            epoch: Tells this life of the engine from others.
            constraints: Keeps outputs to grammars; without it they are refused.
        """
        self._runner = runner
        self._epoch = epoch
        self._limits = runner.limits
        self._has_constraints = constraints is not None
        self._totals = Totals()
        self._memory = KVMemory(self._limits.num_blocks, self._limits.block_size, self._totals)
        self._contexts: dict[int, Context] = {}
        # What failed, until the server frees it; bounded, oldest first.
        self._failed: OrderedDict[int, api.Failed] = OrderedDict()
        # Freed, but somebody still waits for their tokens.
        self._nameless: list[Context] = []
        self._work: list[Context] = []
        self._is_sorted = True
        self._has_idle = False
        self._outputs = Outputs(self, runner, self._memory, self._totals, constraints)
        self._num_arrived = 0
        self._num_steps = 0
        self._flight: Flight | None = None
        self._reports: list[api.Report] = []

    # What the server says.

    def hello(self) -> api.Hello:
        """Return the first frame: who this is and how text becomes its tokens."""
        runner = self._runner
        return api.Hello(
            protocol=api.PROTOCOL_VERSION,
            epoch=self._epoch,
            model=runner.model,
            tokenizer_json=runner.tokenizer_json,
            tokenizer_hash=hashlib.sha256(runner.tokenizer_json.encode()).hexdigest(),
            chat_template=runner.chat_template,
            special_tokens=dict(runner.special_tokens),
            bos_id=runner.bos_id,
            eos_ids=list(runner.eos_ids),
            limits=self._limits,
            capabilities=[
                *runner.capabilities,
                *(["constraints"] if self._has_constraints else []),
            ],
            description=runner.description,
        )

    def apply(self, command: api.Command) -> None:
        """Obey one command; what it brings about is reported by the next `step`."""
        match command:
            case api.Fill() | api.Generate():
                try:
                    self._start(command)
                except api.EngineError as error:
                    self.fail(command.context, error.code, error.message)
            case api.Free():
                self._free(command.context, command.keep)
            case api.Abort():
                self._free(command.context, 0)
            case api.Update():
                self._update(command)
            case api.Status():
                self._reports.append(self.status(command.nonce))
            case api.Ping():
                self._reports.append(api.Pong(command.nonce))
            case api.Check():
                self._outputs.check(command)

    @property
    def is_idle(self) -> bool:
        """Nothing to compute and nothing to report: `step` would return None, until a command
        comes or a constraint is ready.
        """
        return (
            not self._reports
            and self._flight is None
            and all(c.is_released or c.is_stalled for c in self._work)
        )

    def status(self, nonce: int = 0) -> api.StatusReport:
        """Return what the engine holds and what it did since it started.

        `num_computed_tokens` counts prompts; generated tokens are in `num_decoded_tokens`.
        """
        pool, totals = self._memory.pool, self._totals
        return api.StatusReport(
            nonce=nonce,
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_held=pool.num_held,
            num_cached=pool.num_cached,
            num_contexts=len(self._contexts),
            num_steps=self._num_steps,
            num_computed_tokens=totals.computed,
            num_shared_tokens=totals.shared,
            num_cached_tokens=totals.cached,
            num_recomputed_tokens=totals.recomputed,
            num_decoded_tokens=totals.decoded,
        )

    def check(self) -> None:
        """Assert every invariant of the state between steps; linear, for tests."""
        assert all(context.has_work == context.is_queued for context in self._living())
        self._memory.check(self._living(), () if self._flight is None else self._flight.contexts)

    # One step.

    def step(self) -> api.Step | None:
        """Run the model once over whatever is due; None where there is nothing to do."""
        self._outputs.collect()
        self._sort()
        former = self._flight
        if former is not None:
            self._flight = self._follow(former)
            self._land(former)
            self._sort()
        if self._flight is None and not all(context.is_stalled for context in self._work):
            self._flight = self._begin()
        started = self._flight
        if started is not None and started.handle.is_ready:
            self._flight = None
            self._land(started)
        elif former is None and started is None and not self._reports:
            return None
        reports, self._reports = self._reports, []
        pool = self._memory.pool
        return api.Step(self._epoch, self._num_steps, pool.num_free, pool.num_cached, reports)

    def _begin(self) -> Flight:
        """Start a step of whatever is due."""
        self._num_steps += 1
        self._memory.begin_step(self._num_steps)
        batch = plan(self._work, self._memory, self._limits)
        is_empty = not (batch.chosen or batch.complete)
        assert not is_empty or any(c.is_held for c in self._work), "work that no step can do"
        return self._launch(batch.chosen, [context.row for context in batch.chosen], batch.complete)

    def _follow(self, flight: Flight) -> Flight | None:
        """Start the step behind one that is not read yet, if that may be."""
        memory = self._memory
        followers = following(flight, self._work, self._limits, memory.num_spare)
        if not followers:
            return None
        self._num_steps += 1
        memory.begin_step(self._num_steps)
        rows: list[Row] = []
        for context, place in followers:
            generation, length = context.generation, len(context.ids)
            assert generation is not None
            end = memory.reserve(context, length, length + 1)
            assert end == length + 1, "there are spare blocks for all"
            rows.append(
                Row(
                    context.id,
                    context.ids,
                    length,
                    1,
                    context.blocks,
                    generation.sampling,
                    generation.num_prompt,
                    follows=place,
                )
            )
        return self._launch([context for context, _ in followers], rows, [])

    def _launch(self, contexts: list[Context], rows: list[Row], complete: list[Context]) -> Flight:
        """Start a step; one that cannot be started fails when it is read."""
        flight = Flight(contexts, rows, [c.generation for c in contexts], complete, Done([]))
        if rows:
            try:
                flight.handle = self._runner.start(rows, self._memory.copies)
            except Exception as error:
                flight.handle = Broken(error)
        flight.unmade = self._memory.launch()
        return flight

    def _land(self, flight: Flight) -> None:
        """Read a step, and take in what it computed."""
        num_sampled = sum(row.sampling is not None for row in flight.rows)
        try:
            sampled = flight.handle.read()
            if len(sampled) != num_sampled:
                raise RuntimeError(f"runner gave {len(sampled)} ids for {num_sampled} rows")
        except Exception as error:
            _log.exception("step=%d contexts=%d failed", self._num_steps, len(flight.rows))
            self._fail_step(flight, error)
        else:
            self._commit(flight, iter(sampled))
            for context in flight.complete:
                if not context.is_released:
                    self._answer_fills(context)
        self._memory.end_step()
        self._drop_idle()

    def _commit(self, flight: Flight, sampled: Iterator[int]) -> None:
        """Take what a step computed into its contexts, then their new ids."""
        memory, totals = self._memory, self._totals
        size = memory.block_size
        for context, row, begun in zip(
            flight.contexts, flight.rows, flight.generations, strict=True
        ):
            token_id = None if row.sampling is None else next(sampled)
            if context.is_released:
                continue
            generation = context.generation
            if row.follows is not None and generation is not begun:
                # The output was over with the step before, but that was not read yet.
                memory.trim(context)
                continue
            end = row.start + row.num_new
            if generation is not None and context.high_water == row.start >= generation.num_prompt:
                context.high_water = end
            else:
                computed, recomputed = context.count_computed(row.start, end)
                totals.computed += computed
                totals.recomputed += recomputed
            context.num_computed = end
            if end // size > context.depth:
                memory.settle(context)
            if len(context.tallies) > 1:
                self._answer_fills(context)
            if token_id is not None and generation is not None:
                self._outputs.take(context, generation, token_id)

    def _answer_fills(self, context: Context) -> None:
        """Report the Fills whose tokens all have KV."""
        tallies = context.tallies
        while tallies[0].end is not None and tallies[0].end <= context.num_computed:
            counts = tallies.pop(0).counts
            self._has_idle = True
            if context.keep is None:
                self._reports.append(
                    api.Filled(
                        context.id,
                        counts[COMPUTED],
                        counts[SHARED],
                        counts[CACHED],
                        counts[RECOMPUTED],
                    )
                )
        if context.generation is not None:
            self._outputs.end(context, context.generation)

    # What outputs ask for.

    def report(self, report: api.Report) -> None:
        """Send a report with the next step."""
        self._reports.append(report)

    def rest(self, context: Context) -> None:
        """A context has less to do than before; maybe nothing."""
        self._has_idle = True

    def fail(self, context_id: int, code: str, message: str) -> None:
        """Report a failure and free the context, if there is one."""
        failure = self._failed[context_id] = api.Failed(context_id, code, message)
        self._reports.append(failure)
        if len(self._failed) > _MAX_FAILED:
            self._failed.popitem(last=False)
        context = self._contexts.pop(context_id, None)
        if context is not None:
            self._outputs.drop(context)
            self._memory.release(context)
            self._has_idle = True

    # Contexts coming and going.

    def _start(self, command: api.Fill | api.Generate) -> None:
        """Begin a Fill or a Generate.

        Raises:
            EngineError: if the command cannot be done; the context is to be freed.
        """
        if (failure := self._failed.get(command.context)) is not None:
            raise api.EngineError(failure.code, failure.message)
        context = self._contexts.get(command.context)
        check_start(command, context)
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
        elif context.rank != command.rank:
            context.rank = command.rank
            self._is_sorted = False
        if isinstance(command, api.Generate):
            self._outputs.begin(context, command)
        if is_new and parent is not None:
            self._memory.fork(context, parent, command.parent_len)
        if isinstance(command, api.Fill):
            self._begin_fill(context, command)
        else:
            self._outputs.start(context)
        if context.has_work and not context.is_queued and not context.is_released:
            context.is_queued = True
            self._work.append(context)
            self._is_sorted = False

    def _begin_fill(self, context: Context, command: api.Fill) -> None:
        length = len(context.ids) + len(command.tokens)
        check_length(length, self._limits)
        context.ids.extend(command.tokens)
        context.tallies[-1].end = length
        context.tallies.append(Tally())
        # One that has work is computed by others in a step on its way: it is answered then.
        if length == context.num_computed and not context.is_queued:
            self._answer_fills(context)

    def _update(self, command: api.Update) -> None:
        context = self._contexts.get(command.context)
        if context is None:
            return
        context.rank = command.rank
        context.next_use = command.next_use
        self._is_sorted = False

    def _free(self, context_id: int, keep: int) -> None:
        self._failed.pop(context_id, None)
        context = self._contexts.pop(context_id, None)
        if context is None:
            return
        # Nothing more is said about it, not even what was answered before this step.
        self._reports = [r for r in self._reports if getattr(r, "context", None) != context_id]
        self._outputs.drop(context)
        if context.num_waiting and context.has_work:
            # Somebody forked from tokens that are still to come: see the head of this file.
            context.keep = keep
            self._nameless.append(context)
            return
        self._memory.release(context, keep)
        self._has_idle = True

    def _fail_step(self, flight: Flight, error: Exception) -> None:
        """Fail the contexts of a step that raised; others are computed again."""
        for context in flight.contexts:
            if context.is_released:
                continue
            if context.keep is None:
                self.fail(context.id, "engine.step", f"the model failed: {error!r}")
            else:
                self._memory.release(context)
        self._memory.undo(flight.unmade)
        self._has_idle = True

    def _sort(self) -> None:
        """Order the list of work, and keep only who has some."""
        self._drop_idle()
        if not self._is_sorted:
            self._work.sort(key=attrgetter("rank", "arrival"))
            self._is_sorted = True

    def _drop_idle(self) -> None:
        """Keep in the list of work only who has some."""
        if self._nameless:
            self._nameless = [c for c in self._nameless if not c.is_released]
        elif not self._has_idle:
            return
        self._has_idle = False
        still: list[Context] = []
        for context in self._work:
            if context.has_work and not context.is_released:
                still.append(context)
            else:
                context.is_queued = False
        self._work = still

    def _living(self) -> list[Context]:
        """Every context with or without a name that is not released."""
        return [*self._contexts.values(), *(c for c in self._nameless if not c.is_released)]
