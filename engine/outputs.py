"""The outputs under way: sampled ids in, ids and text and ends out.

Joins a `Generation` to its context, its constraint and the reports that leave. What a
constraint forces is appended without a step of the model: its KV is computed together with
the next token, as the rest of a prompt would be. An output that is over before the prompt in
front of it has KV waits for that, so that its Filled always comes before its Finished.

Knows contexts, generations, constraints and reports. Refuses to know steps, rows, ranks and
who gets blocks. Kept true: every output that `begin` accepts ends in one Finished, or in one
call of `host.fail`, unless it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from . import api
from .constraint import Constraint
from .context import Context, Totals
from .detokenizer import NUM_CONTEXT, Detokenizer, load_tokenizer
from .generation import Ending, Generation
from .memory import KVMemory
from .refusals import check_generate, check_length
from .runner import Runner
from .seen import Seen, has_penalty


class Constraints(Protocol):
    """What is needed of `constraints.Constraints`, which an engine can do without."""

    def new(self, source: str, room: int) -> Constraint: ...
    def take(self, constraint: Constraint, token_id: int) -> None: ...
    def validate(self, constraint: Constraint, text: str) -> None: ...
    def check(self, command: api.Check) -> None: ...
    def retire(self, constraint: Constraint) -> None: ...
    def collect(self) -> list[Constraint | api.Checked]: ...


class Host(Protocol):
    """Who contexts belong to."""

    def report(self, report: api.Report) -> None:
        """Send a report with the next step."""
        ...

    def fail(self, context_id: int, code: str, message: str) -> None:
        """End a context with a failure."""
        ...

    def rest(self, context: Context) -> None:
        """A context has less to do than before."""
        ...


class Outputs:
    """All outputs of one engine."""

    def __init__(
        self,
        host: Host,
        runner: Runner,
        memory: KVMemory,
        totals: Totals,
        constraints: Constraints | None,
    ) -> None:
        """Begin with none; without `constraints` they are refused."""
        self._host = host
        self._memory = memory
        self._totals = totals
        self._constraints = constraints
        self._limits = runner.limits
        self._num_slots = runner.limits.num_blocks * runner.limits.block_size
        self._eos_ids = frozenset(runner.eos_ids)
        self._tokenizer = load_tokenizer(runner.tokenizer_json)
        # Who waits for which constraint.
        self._held: dict[Constraint, tuple[Context, Generation]] = {}

    def begin(self, context: Context, command: api.Generate) -> None:
        """Let a context generate; `start` follows, once it shares what it can.

        Raises:
            EngineError: if the context is empty or too long, or the constraint is none.
        """
        sampling, length = command.sampling, len(context.ids)
        check_generate(command, length, self._limits, self._constraints is not None)
        stop_ids = frozenset(sampling.stop_token_ids)
        generation = Generation(
            sampling,
            num_prompt=length,
            end=min(length + sampling.max_tokens, self._limits.context_len),
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_ids,
            eos_ids=self._eos_ids,
            detokenizer=Detokenizer(self._tokenizer, context.ids[-NUM_CONTEXT:], sampling.stop),
        )
        if command.constraint is not None and self._constraints is not None:
            room = generation.end - length
            generation.constraint = self._constraints.new(command.constraint, room)
        context.generation = generation
        if generation.end <= length:
            generation.ending = Ending("length", None)
            self._finish(context, generation)
            return
        context.decoded.append([length, length])
        context.row.num_prompt = length
        context.row.seen = Seen(length) if has_penalty(sampling) else None

    def start(self, context: Context) -> None:
        """Take what the constraint of a new output forces; safe where nothing is."""
        generation = context.generation
        if generation is None or generation.constraint is None:
            return
        if generation.is_held:
            self._held[generation.constraint] = context, generation
        else:
            self._extend(context, generation, generation.constraint.forced, num_sampled=0)

    def take(self, context: Context, generation: Generation, token_id: int) -> None:
        """Append a sampled id, and those that its constraint has follow; or end the output."""
        self._totals.decoded += 1
        generation.num_decoded += 1
        constraint = generation.constraint
        if constraint is None and generation.sampling.logprobs is None:
            # The plain case, once for each token that is decoded.
            before = len(context.ids)
            text = generation.push(context.ids, token_id)
            if (new := context.ids[before:]) or text:
                self._host.report(api.Tokens(context.id, new, text))
            self._settle(context, generation)
            return
        new = [token_id]
        if constraint is not None and token_id not in generation.stop_ids:
            assert self._constraints is not None
            self._constraints.take(constraint, token_id)
            if constraint.is_held:
                self._held[constraint] = context, generation
            else:
                new += constraint.forced
        self._extend(context, generation, new, num_sampled=1)

    def end(self, context: Context, generation: Generation) -> None:
        """Finish an output that is over, once its prompt is filled and its text is checked."""
        if generation.ending is None or len(context.tallies) > 1 or generation.is_held:
            return
        constraint = generation.constraint
        if generation.wants_validation and constraint is not None:
            assert self._constraints is not None
            self._constraints.validate(constraint, generation.detokenizer.text)
            self._held[constraint] = context, generation
            return
        self._finish(context, generation)

    def drop(self, context: Context) -> None:
        """Let go of a context's output without another word; safe without one."""
        generation, context.generation = context.generation, None
        context.row.mask = None
        if generation is not None and generation.constraint is not None:
            assert self._constraints is not None
            self._constraints.retire(generation.constraint)
            self._held.pop(generation.constraint, None)

    def collect(self) -> None:
        """Go on with the outputs whose constraints are ready, and answer Checks."""
        if self._constraints is None:
            return
        for item in self._constraints.collect():
            if isinstance(item, api.Checked):
                self._host.report(item)
                continue
            context, generation = self._held.pop(item, (None, None))
            if context is None or generation is None:
                continue  # given up meanwhile
            if generation.ending is None:
                self._extend(context, generation, item.forced, num_sampled=0)
            elif item.error is not None:
                self._host.fail(context.id, item.error.code, item.error.message)
            else:
                self.end(context, generation)

    def check(self, command: api.Check) -> None:
        """Find out about a constraint; the answer is reported when it is there."""
        if self._constraints is not None:
            self._constraints.check(command)
            return
        code, message = "engine.unsupported_constraint", "this engine has no constraints"
        self._host.report(api.Checked(command.nonce, code, message))

    def _extend(
        self, context: Context, generation: Generation, new: Sequence[int], *, num_sampled: int
    ) -> None:
        """Append ids to an output, `num_sampled` of them from the model, before forced ones."""
        before = len(context.ids)
        num_taken, text = generation.take(context.ids, new)
        generation.num_forced += max(0, num_taken - num_sampled)
        if num_taken or text:
            chances: list[api.Chance] = []
            if generation.sampling.logprobs is not None:
                sampled, context.row.chance = context.row.chance, None
                chances = [sampled] if num_sampled and sampled is not None else []
                chances = [*chances, *[api.Chance(0.0)] * (num_taken - len(chances))][:num_taken]
            self._host.report(api.Tokens(context.id, context.ids[before:], text, chances))
        self._settle(context, generation)

    def _settle(self, context: Context, generation: Generation) -> None:
        """Decide what follows from ids that were appended."""
        length = len(context.ids)
        context.decoded[-1][1] = length
        constraint = generation.constraint
        if constraint is not None and (error := generation.error) is not None:
            self._host.fail(context.id, error.code, error.message)
        elif generation.ending is not None:
            self.end(context, generation)
        elif length > self._num_slots:
            # The pool is smaller than the model's context: no way to go on, ever.
            self._refuse(context, length)
        elif constraint is not None:
            context.row.mask = generation.mask(length)

    def _finish(self, context: Context, generation: Generation) -> None:
        """Report an output that is over; cut the context behind what it keeps."""
        finished = generation.finished(context.id)
        self._host.report(finished)
        self.drop(context)
        self._host.rest(context)
        length = generation.num_prompt + finished.num_kept
        if length < len(context.ids):
            self._memory.truncate(context, length)
            context.ids = context.row.ids = context.ids[:length]
            context.high_water = min(context.high_water, length)
            context.decoded[-1][1] = length

    def _refuse(self, context: Context, length: int) -> None:
        try:
            check_length(length, self._limits)
        except api.EngineError as error:
            self._host.fail(context.id, error.code, error.message)
