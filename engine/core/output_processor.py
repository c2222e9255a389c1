"""The output processor: turns sampled ids into text, stops and reports.

Connects a `GenerationState` to its context, its constraint and the engine's reports. Tokens
that a constraint forces are appended without running the model: their KV is computed together
with the next token, like that of a prompt. An output that ends before its prompt has KV is
reported after the prompt, so that Filled always precedes Finished.

Out of scope: steps, rows, ranks and blocks.

Invariants: every output that `begin` accepts ends in one Finished, or in one call of
`ContextOwner.fail`, unless it is discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from .. import protocol
from ..constraints.state import ConstraintState
from ..kv.manager import KVCacheManager
from ..runner.base import Runner
from ..sampling.token_counts import TokenBiases, TokenCounts, has_penalty
from ..text.detokenizer import NUM_CONTEXT, Detokenizer, load_tokenizer
from .command_validation import check_generate, check_ids, check_length
from .context import Context, EngineCounters
from .generation import FinishReason, GenerationState

_log: Final = logging.getLogger(__name__)


class ConstraintProvider(Protocol):
    """The part of `constraints.compiler.ConstraintCompiler` that outputs need.

    An engine without grammar support has none.
    """

    def create(self, source: str, max_tokens: int) -> ConstraintState: ...
    def advance(self, constraint: ConstraintState, token_id: int) -> None: ...
    def rewind(self, constraint: ConstraintState, num_tokens: int, rest: str) -> None: ...
    def validate_text(self, constraint: ConstraintState, text: str) -> None: ...
    def submit_check(self, command: protocol.ValidateConstraint) -> None: ...
    def release(self, constraint: ConstraintState) -> None: ...
    def collect(self) -> list[ConstraintState | protocol.Checked]: ...


class ContextOwner(Protocol):
    """What the output processor needs of the engine core."""

    def report(self, report: protocol.Report) -> None:
        """Send a report with the next StepReport."""
        ...

    def fail(self, context_id: int, code: str, message: str) -> None:
        """End a context with a failure."""
        ...

    def expect_idle(self) -> None:
        """Note that a context may have no work left."""
        ...


class OutputProcessor:
    """All running outputs of one engine."""

    def __init__(
        self,
        owner: ContextOwner,
        runner: Runner,
        kv: KVCacheManager,
        counters: EngineCounters,
        constraints: ConstraintProvider | None,
    ) -> None:
        """Start without outputs. Without `constraints`, constrained outputs are rejected."""
        self._owner = owner
        self._kv = kv
        self._counters = counters
        self._constraints = constraints
        self._limits = runner.limits
        self._num_ids = runner.num_ids
        self._num_slots = runner.limits.num_blocks * runner.limits.block_size
        self._eos_ids = frozenset(runner.eos_ids)
        self._tokenizer = load_tokenizer(runner.tokenizer_json)
        self._token_lengths: dict[int, int] = {}
        """Characters of tokens that were decoded alone."""
        self._blocked: dict[ConstraintState, tuple[Context, GenerationState]] = {}
        """Outputs that wait for their constraint."""

    def begin(self, context: Context, command: protocol.GenerateCommand) -> None:
        """Start an output. `append_forced` must follow, once the context shares existing KV.

        Raises:
            EngineError: if the context is empty or too long, or the constraint is invalid.
        """
        sampling, length = command.sampling, len(context.ids)
        check_generate(command, length, self._limits, self._constraints is not None)
        stop_ids = frozenset(sampling.stop_token_ids)
        generation = GenerationState(
            sampling,
            num_prompt=length,
            end=min(length + sampling.max_tokens, self._limits.context_len),
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_ids,
            eos_ids=self._eos_ids,
            detokenizer=Detokenizer(
                self._tokenizer, context.ids[-NUM_CONTEXT:], sampling.stop, self._token_lengths
            ),
        )
        if command.constraint is not None and self._constraints is not None:
            max_tokens = generation.end - length
            generation.constraint = self._constraints.create(command.constraint, max_tokens)
        context.generation = generation
        if generation.end <= length:
            generation.finish_reason = FinishReason("length", None)
            if not context.fills:
                self._finish(context, generation)
                return
        context.generated_ranges.append([length, length])
        context.row.num_prompt = length
        context.row.token_counts = TokenCounts(length) if has_penalty(sampling) else None
        bias = sampling.logit_bias
        context.row.biases = TokenBiases.of(bias) if bias else None

    def append_forced(self, context: Context) -> None:
        """Append the tokens that the constraint of a new output forces, if there are any."""
        generation = context.generation
        if generation is None or generation.constraint is None:
            return
        if generation.is_blocked:
            self._blocked[generation.constraint] = context, generation
        else:
            self._append(context, generation, generation.constraint.forced, num_sampled=0)

    def process_token(self, context: Context, generation: GenerationState, token_id: int) -> None:
        """Append a sampled id and the ids that its constraint then forces, or end the output.

        A negative id fails the context: the logits that it would be sampled from are NaN.
        """
        if token_id < 0:
            self._fail_without_token(context, len(context.ids))
            return
        self._counters.decoded += 1
        generation.num_decoded += 1
        constraint = generation.constraint
        if constraint is None and generation.sampling.logprobs is None:
            # The common case, once per decoded token.
            before = len(context.ids)
            text = generation.append_token(context.ids, token_id)
            if (new := context.ids[before:]) or text:
                self._owner.report(protocol.Tokens(context.id, new, text))
            self._after_append(context, generation)
            return
        new = [token_id]
        if constraint is not None and generation.must_advance(token_id):
            assert self._constraints is not None
            self._constraints.advance(constraint, token_id)
            if constraint.is_busy:
                self._blocked[constraint] = context, generation
            else:
                new += constraint.forced
        self._append(context, generation, new, num_sampled=1)

    def finish_if_complete(self, context: Context, generation: GenerationState) -> None:
        """Finish an output that has ended, once its prompt is filled and its text validated."""
        if generation.finish_reason is None or context.fills or generation.is_blocked:
            return
        constraint = generation.constraint
        if constraint is not None and generation.is_cut and generation.detokenizer.stop is not None:
            # The constraint has consumed more, but the text before the stop string may be complete.
            assert self._constraints is not None
            self._constraints.rewind(constraint, *generation.detokenizer.split_at_text_end())
            if constraint.is_busy:
                self._blocked[constraint] = context, generation
                return
        if generation.needs_validation and constraint is not None:
            assert self._constraints is not None
            constraint.error = None  # of advancing over the last token
            generation.is_validating = True
            self._constraints.validate_text(constraint, generation.detokenizer.text)
            self._blocked[constraint] = context, generation
            return
        self._finish(context, generation)

    def discard(self, context: Context) -> None:
        """End a context's output without a report, if it has one."""
        generation, context.generation = context.generation, None
        context.row.mask = None
        if generation is not None and generation.constraint is not None:
            assert self._constraints is not None
            self._constraints.release(generation.constraint)
            self._blocked.pop(generation.constraint, None)

    def poll_constraints(self) -> None:
        """Continue outputs whose constraints are ready, and report validated constraints."""
        if self._constraints is None:
            return
        for item in self._constraints.collect():
            if isinstance(item, protocol.Checked):
                self._owner.report(item)
                continue
            context, generation = self._blocked.pop(item, (None, None))
            if context is None or generation is None:
                continue  # The output was discarded meanwhile.
            if generation.finish_reason is None:
                self._append(context, generation, item.forced, num_sampled=0)
            elif (error := generation.error) is not None:
                self._owner.fail(context.id, error.code, error.message)
            else:
                # The output ended while its grammar was advanced, or its text was validated.
                generation.end_if_complete()
                self.finish_if_complete(context, generation)

    def validate_constraint(self, command: protocol.ValidateConstraint) -> None:
        """Start the validation of a constraint. Its result is reported when it is known."""
        if self._constraints is not None:
            self._constraints.submit_check(command)
            return
        code, message = "engine.unsupported_constraint", "this engine does not support constraints"
        self._owner.report(protocol.Checked(command.nonce, code, message))

    def _append(
        self, context: Context, generation: GenerationState, new: Sequence[int], *, num_sampled: int
    ) -> None:
        """Append ids to an output; the first `num_sampled` were sampled, the others forced."""
        try:
            check_ids(new, self._num_ids)
        except protocol.EngineError as error:
            self._owner.fail(context.id, error.code, error.message)
            return
        before = len(context.ids)
        num_appended, text = generation.append(context.ids, new)
        generation.num_forced += max(0, num_appended - num_sampled)
        if num_appended or text:
            logprobs: list[protocol.TokenLogprob] = []
            if generation.sampling.logprobs is not None:
                logprobs = _logprobs(context, num_sampled, num_appended)
            self._owner.report(protocol.Tokens(context.id, context.ids[before:], text, logprobs))
        self._after_append(context, generation)

    def _after_append(self, context: Context, generation: GenerationState) -> None:
        """Finish or fail an output, or set the mask of its next token."""
        length = len(context.ids)
        context.generated_ranges[-1][1] = length
        constraint = generation.constraint
        if constraint is not None and (error := generation.error) is not None:
            self._owner.fail(context.id, error.code, error.message)
        elif generation.finish_reason is not None:
            self.finish_if_complete(context, generation)
        elif length > self._num_slots:
            # All blocks together are smaller than the context length, and they are used up.
            self._fail_too_large(context, length)
        elif constraint is not None:
            context.row.mask = generation.mask(length)

    def _finish(self, context: Context, generation: GenerationState) -> None:
        """Report an output that has ended, and truncate the context to the ids it keeps."""
        finished = generation.report(context.id)
        self._owner.report(finished)
        self.discard(context)
        self._owner.expect_idle()
        length = generation.num_prompt + finished.num_kept
        if length < len(context.ids):
            self._kv.truncate(context, length)
            context.ids = context.row.ids = context.ids[:length]
            context.num_counted = min(context.num_counted, length)
            context.generated_ranges[-1][1] = length

    def _fail_without_token(self, context: Context, length: int) -> None:
        _log.error("context=%d tokens=%d: the logits are NaN", context.id, length)
        self._owner.fail(
            context.id,
            "engine.step",
            f"the logits of the model are NaN after {length} tokens; start the engine with another "
            "--dtype, such as float32, or check the weights of the model",
        )

    def _fail_too_large(self, context: Context, length: int) -> None:
        try:
            check_length(length, self._limits)
        except protocol.EngineError as error:
            self._owner.fail(context.id, error.code, error.message)


def _logprobs(context: Context, num_sampled: int, num_appended: int) -> list[protocol.TokenLogprob]:
    """Take the logprob of the sampled id from the context's row; forced ids have logprob 0."""
    sampled, context.row.logprob = context.row.logprob, None
    logprobs = [sampled] if num_sampled and sampled is not None else []
    num_forced = num_appended - len(logprobs)
    return [*logprobs, *[protocol.TokenLogprob(0.0)] * num_forced][:num_appended]
