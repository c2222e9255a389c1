"""The engine: contexts of one model, told what to do by commands, step by step.

`apply` takes commands, `step` lets the model run once, and what comes of both is reported in
the Step that `step` returns. One thread calls both; nothing here blocks but the runner.

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
from .memory import KVMemory
from .outputs import Constraints, Outputs
from .refusals import check_fork, check_length, check_start
from .runner import Runner

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
        return not self._reports and all(c.is_released or c.is_stalled for c in self._work)

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
        self._memory.check(self._living())

    # One step.

    def step(self) -> api.Step | None:
        """Run the model once over whatever is due; None where there is nothing to do."""
        self._outputs.collect()
        self._drop_idle()
        if not self._is_sorted:
            self._work.sort(key=attrgetter("rank", "arrival"))
            self._is_sorted = True
        if not all(context.is_stalled for context in self._work):
            self._run()
        elif not self._reports:
            return None
        reports, self._reports = self._reports, []
        pool = self._memory.pool
        return api.Step(self._epoch, self._num_steps, pool.num_free, pool.num_cached, reports)

    def _run(self) -> None:
        self._num_steps += 1
        memory = self._memory
        memory.begin_step(self._num_steps)
        batch = plan(self._work, memory, self._limits)
        is_empty = not (batch.chosen or batch.complete)
        assert not is_empty or any(c.is_held for c in self._work), "work that no step can do"
        rows = [context.row for context in batch.chosen]
        num_sampled = sum(row.sampling is not None for row in rows)
        try:
            sampled = self._runner.run(rows, memory.copies) if rows else []
            if len(sampled) != num_sampled:
                raise RuntimeError(f"runner gave {len(sampled)} ids for {num_sampled} rows")
        except Exception as error:
            _log.exception("step=%d contexts=%d failed", self._num_steps, len(rows))
            self._fail_step(batch.chosen, error)
        else:
            self._commit(batch.chosen, iter(sampled))
            for context in batch.complete:
                self._answer_fills(context)
        memory.end_step()
        self._drop_idle()

    def _commit(self, chosen: list[Context], sampled: Iterator[int]) -> None:
        """Take what a step computed into the contexts, then their new ids."""
        memory, totals = self._memory, self._totals
        size = memory.block_size
        for context in chosen:
            row = context.row
            end = row.start + row.num_new
            generation = context.generation
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
            if row.sampling is not None and generation is not None:
                self._outputs.take(context, generation, next(sampled))

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
        if length == context.num_computed:
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

    def _fail_step(self, chosen: list[Context], error: Exception) -> None:
        """Fail the contexts of a step whose runner raised; others are computed again."""
        for context in chosen:
            if context.keep is None:
                self.fail(context.id, "engine.step", f"the model failed: {error!r}")
            else:
                self._memory.release(context)
        self._memory.undo_step()
        self._has_idle = True

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
