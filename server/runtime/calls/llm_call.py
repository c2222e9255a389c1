"""The execution of one generate node: renders a ready slot, runs it on an engine, reports a value.

A call has one context, which grows slot by slot. A slot is an output with the literal text before
it: the engine fills the text, then generates the output.

Responsibility: the ids of the prompt, the context that stores them, and the engine's reports.

Out of scope: readers of the value. The call reports the value to its `NodeContext`, which publishes
it.

Invariants: `ids` are the tokens of the completed slots, so a context that is lost with its engine
can be filled again elsewhere and a committed output is never sampled again. A call has at most one
queued request and at most one context. After `abandon` it reports nothing more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from conure.engine import protocol

from ...program.errors import ConureError, PromptError, RunError
from ...program.expressions.budget import WorkBudget
from ...program.graph.objectives import PerformanceObjective
from ...program.ir import GenerateNode, Json
from ...prompts.prompt import RenderedPrompt, render_chat, render_slot, slot_segments
from ...prompts.served_model import EXPECTED_OUTPUT_TOKENS, ServedModel
from ...prompts.tokenizer import EncodedText, PromptPiece
from ...prompts.tool_calls import ContentStream
from ...scheduling.policy import Rank
from ...scheduling.request import ResourceRequest, hash_prefixes
from ...scheduling.scheduler import Placement, QueuedCall
from ...store.journal import ValueRecord
from ..node_context import NodeContext
from ..node_state import NodeState
from .call_priorities import CallPriorities
from .call_recorder import CallRecorder
from .kv_context import CallKVContext, PromptPlan
from .outputs import (
    OutputResult,
    OutputSpec,
    ShownTokens,
    final_sampling,
    logprobs_of,
    output_specs,
    value_of,
)
from .prefix_registry import PrefixRegistry
from .priority_table import num_static_chars

logger = logging.getLogger(__name__)

CHARS_PER_SEGMENT = 4
"""Characters that take as long to encode as a segment takes to render."""
NUM_TAIL = 4
"""How many tokens before an output can change how its first token is decoded."""


class LLMCall:
    """The execution of one generate node."""

    def __init__(
        self,
        node_state: NodeState,
        context: NodeContext,
        registry: PrefixRegistry,
        plan: PromptPlan,
        *,
        ready_at_s: float,
        rank: Rank,
        performance: PerformanceObjective,
        priorities: CallPriorities,
        on_started: Callable[[], None],
        recorder: CallRecorder | None = None,
    ) -> None:
        assert isinstance(node_state.node, GenerateNode)
        self.node_state = node_state
        self.node: GenerateNode = node_state.node
        self.model: ServedModel = context.services.model
        self.outputs = output_specs(self.node, self.model.tool_format)
        self._slot_segments = slot_segments(self.node)
        self.slot = 0
        self.ids: list[int] = []
        self.is_over = False
        self.ready_at_s = ready_at_s
        """When the call's first slot became ready, on the monotonic clock."""
        self._program = context.state.id
        self._context = context
        self._plan = plan
        self._rank = rank
        self._performance = performance
        self._priorities = priorities
        self._on_started = on_started
        self._request: QueuedCall | None = None
        self._kv = CallKVContext(
            self._program, node_state, plan, registry, context.services, rank=rank.at_s
        )
        self._prompt: list[int] = []
        """Ids that the current slot appends before its output."""
        self._sampling: protocol.SamplingParams | None = None
        self._output: list[int] = []
        """Ids of the current output so far."""
        self._logprobs: list[protocol.TokenLogprob] = []
        self._shown_tokens = ShownTokens()
        self._content: ContentStream | None = None
        self._leftover = ""
        """End of the last output's text that `ids` do not contain. The next slot encodes it."""
        self._num_generated = 0
        """Generated ids among `ids`."""
        self._is_slot_counted = False
        """Whether `usage` contains the prompt of the current slot."""
        self._num_filling = 0
        """Tokens sent to the engine whose cost it has not reported."""
        self._num_ahead = 0
        """Tokens of other calls that the engine had not prefilled when this call started."""
        self._phase_start_s = 0.0
        """When the call was queued, sent to an engine or filled, whichever is last, on the
        monotonic clock."""
        self._started_s = 0.0
        """When the current slot was sent to an engine, on the monotonic clock."""
        self._recorder = recorder

    @property
    def _output_name(self) -> str:
        """The name of the current output, unique among all programs."""
        return f"{self._program}/{self.node.id}/{self.slot}"

    # --- before the engine ----------------------------------------------------------------

    def num_chars(self, slot: int) -> int:
        """Return the estimated cost of rendering and encoding a slot, in characters of text.

        Counts the literal text of the slot, and `CHARS_PER_SEGMENT` for each segment.
        """
        if not isinstance(self.node.prompt, list):
            return num_static_chars(self.node)
        segments = [self.node.prompt[index] for index in self._slot_segments[slot]]
        return sum(
            CHARS_PER_SEGMENT + (len(each.text) if isinstance(each.text, str) else 0)
            for each in segments
        )

    def render(
        self, slot: int, values: dict[str, Json], budget: WorkBudget | None = None
    ) -> RenderedPrompt:
        """Return the text that a slot appends. Pure; may run in a thread.

        The steps of expressions are charged to `budget`.

        Raises:
            PromptError: if the values do not form a prompt.
            ExpressionError: if the expression of an input fails.
        """
        if isinstance(self.node.prompt, list):
            rendered = render_slot(
                self.node, slot, values, budget, segments=self._slot_segments[slot]
            )
            if not self._leftover:
                return rendered
            shift = len(self._leftover)
            pieces = (PromptPiece(self._leftover, False), *rendered.pieces)
            ends = tuple(end + shift for end in rendered.ends)
            return RenderedPrompt(pieces, ends, rendered.prefix_break)
        return render_chat(self.node, values, self.model.template, budget)

    def encode(self, slot: int, rendered: RenderedPrompt) -> EncodedText:
        """Return the ids that a slot appends. Pure; may run in a thread."""
        return self.model.encode(self.node, slot, rendered.pieces)

    def enqueue(self, slot: int, rendered: RenderedPrompt, encoded: EncodedText) -> None:
        """Queue the slot for an engine.

        Raises:
            PromptError: `prompt.too_long`, `prompt.empty`.
        """
        self.slot = slot
        self._prompt = encoded.ids
        self.node_state.prefix_break |= rendered.prefix_break
        output = self.outputs[slot]
        num_prompt = len(self.ids) + len(encoded.ids)
        if num_prompt == 0:
            message = f"node {self.node.id}: the prompt is empty: write at least one token"
            raise PromptError("prompt.empty", message)
        budget = self.model.output_budget(
            num_prompt,
            output.sampling.max_tokens,
            f"node {self.node.id}",
            is_clipped=self._context.state.options.clip_outputs,
        )
        self._sampling = final_sampling(
            output.sampling,
            max_tokens=budget,
            name=self._output_name,
            num_retries=self.node_state.num_retries,
        )
        pace = self._context.services.scheduler.service_time
        pace.observe_prompt(sum(len(piece.text) for piece in rendered.pieces), len(encoded.ids))
        if slot == 0:
            self._kv.set_boundaries(tuple(encoded.tokens_before(end) for end in rendered.ends))
        self._is_slot_counted = False
        if self._recorder is not None:
            self._recorder.begin(rendered)
        self.queue_slot()

    def queue_slot(self) -> None:
        """Queue the current slot, for the first time or again after `engine_lost`."""
        assert self._sampling is not None
        tokens = self.ids + self._prompt
        affinity_engine, num_affinity_tokens = self._kv.find_affinity(tokens)
        performance = self._performance
        is_latency = performance.kind == "latency"
        request = ResourceRequest(
            program=self._program,
            node=self.node.id,
            num_prompt=len(tokens),
            num_output=_num_expected_tokens(self.outputs[self.slot], self._sampling),
            prefixes=hash_prefixes(tokens, self._kv.boundary_positions(), self._plan.salt),
            group=performance.group,
            is_latency_critical=is_latency and performance.group is None,
            is_latency_sensitive=is_latency,
            opens_program=self.slot == 0 and self._priorities.opens_program(),
            num_remaining_steps=self._priorities.num_remaining_steps(self.node.id),
            affinity_engine=affinity_engine,
            num_affinity_tokens=num_affinity_tokens,
        )
        self._phase_start_s = time.monotonic()
        self.node_state.phase = "queued"
        self._set_why(self._rank.why)
        self._request = QueuedCall(request, self._rank.at_s, self._start, self._set_why)
        services, queued = self._context.services, self._request
        if self.node_state.num_deaths:
            deaths = self.node_state.num_deaths
            services.suspects.enter(queued, deaths, lambda: services.scheduler.submit(queued))
        else:
            services.scheduler.submit(queued)

    def _set_why(self, why: str) -> None:
        self.node_state.why = why

    def rerank(self, rank: Rank, performance: PerformanceObjective) -> None:
        """Change the rank of the call, in the queue or on its engine."""
        before, self._performance = self._performance, performance
        is_same_kind = (before.kind, before.group) == (performance.kind, performance.group)
        if rank.at_s == self._rank.at_s and is_same_kind:
            return
        self._rank = rank
        self._kv.set_rank(rank.at_s)
        if self._request is not None and self._request.reservations is None:
            self._withdraw()
            self.queue_slot()

    # --- on the engine --------------------------------------------------------------------

    def _start(self, placement: Placement) -> None:
        """Start on an engine; called by the scheduler. An internal error fails this call only."""
        try:
            self._run_on(placement)
        except Exception:
            logger.exception("node %s could not be sent to an engine", self.node.id)
            self.fail_internally()

    def _run_on(self, placement: Placement) -> None:
        """Send the commands that fill the missing tokens and generate the output, in one frame."""
        assert self._sampling is not None
        state = self.node_state
        now = time.monotonic()
        state.usage.queued_s += now - self._phase_start_s
        self._phase_start_s = self._started_s = now
        engine = self._context.services.engine(placement.engine)
        assert engine is not None, "the scheduler places calls on live engines only"
        state.engine = engine.name
        state.why = placement.why
        state.phase = "running"
        self._output = []
        self._logprobs = []
        self._shown_tokens = ShownTokens()
        output = self.outputs[self.slot]
        self._content = None if output.tools is None else ContentStream(output.tools)
        context = self._kv.fill(engine, self.ids, self._prompt, self._on_report)
        self._num_filling = self._kv.num_sent
        self._num_ahead = 0
        if self._request is not None and self._request.reservations is not None:
            queued = self._request.reservations.num_prefilling_tokens
            self._num_ahead = max(queued - self._request.num_prefilling_tokens, 0)
        engine.send(
            protocol.GenerateCommand(
                context,
                self._sampling,
                rank=self._rank.at_s,
                constraint=output.grammar,
                group=self._performance.group,
            )
        )
        if self._request is not None:
            self._context.services.suspects.started(self._request)
        self._priorities.begun()
        self._on_started()
        self._context.events.begin_text(output.variable, self.node.id, self.node.job, state.attempt)
        self._context.emit(
            "node.started", self.node.id, engine=state.engine, why=state.why, attempt=state.attempt
        )

    def _on_report(self, report: protocol.Report) -> None:
        match report:
            case protocol.Tokens():
                self._add_tokens(report)
            case protocol.Filled():
                self._filled(report)
            case protocol.Finished():
                self._finished(report)
            case protocol.Failed():
                self._num_filling = (
                    0  # the engine reports no progress: most likely it filled nothing
                )
                self._kv.free()
                self._withdraw()
                self._fail(RunError(report.code, report.message))
            case _:
                raise AssertionError(f"not a report on a context: {report}")

    def _add_tokens(self, report: protocol.Tokens) -> None:
        self._output += report.ids
        self._logprobs += report.logprobs
        text = report.text
        if text and self._content is not None:
            text = self._content.feed(text)
        output = self.outputs[self.slot]
        entries: list[Json] = []
        if output.sampling.logprobs is not None:
            entries = logprobs_of(self.model.tokenizer, report.ids, report.logprobs)
            if self._content is None:
                entries = self._shown_tokens.add(entries, text)
        if text or entries:
            self._context.append_text(output.variable, text, entries)

    def _filled(self, report: protocol.Filled) -> None:
        usage = self.node_state.usage
        now = time.monotonic()
        prefill_s = now - self._phase_start_s
        self._phase_start_s = now
        usage.prefill_s += prefill_s
        usage.recomputed += report.recomputed
        self._num_filling = 0
        scheduler = self._context.services.scheduler
        if self._request is not None:
            scheduler.prefill_done(self._request)
        num_prefilled = report.computed + self._num_ahead if report.computed else 0
        scheduler.service_time.observe_prefill(num_prefilled, prefill_s)
        _count_prompt(self, report)

    def _finished(self, report: protocol.Finished) -> None:
        self._add_usage(report)
        output = self.outputs[self.slot]
        kept = self._output[: report.num_kept]
        prompt_ids = self.ids + self._prompt
        self.ids = prompt_ids + kept
        self._num_generated += len(kept)
        self._prompt = []
        self._output = []
        self._leftover = report.leftover
        self._withdraw()
        try:
            value = _make_value(self, report, prompt_ids, kept)
        except ConureError as error:
            self._fail(error)
            return
        engine = self._kv.engine
        assert engine is not None
        if self.slot + 1 == len(self.outputs):
            self.is_over = True
            self._kv.retain_or_free(self.ids, num_prompt=len(prompt_ids))
        streamed = report.text if output.tools is None else value["content"]
        result = OutputResult(
            output.variable,
            value,
            report.text,
            streamed,
            kept,
            engine.epoch,
            is_truncated=report.reason == "length",
        )
        self._complete(result)

    def _add_usage(self, report: protocol.Finished) -> None:
        usage = self.node_state.usage
        now = time.monotonic()
        decode_s = now - self._phase_start_s
        self._context.services.load.observe_call(now - self._started_s)
        usage.decode_s += decode_s
        self._context.services.scheduler.service_time.observe_decode(report.num_decoded, decode_s)
        usage.decoded += report.num_decoded
        usage.forced += report.num_forced
        self.node_state.constraint_relaxed |= report.constraint in ("relaxed", "broken")
        # A token that ends an output (EOS, a stop token) is not discarded work.
        num_ending = 1 if report.reason == "stop" and not isinstance(report.stop, str) else 0
        num_sampled = report.num_decoded + report.num_forced
        usage.discarded += max(0, num_sampled - report.num_kept - num_ending)

    def _complete(self, result: OutputResult) -> None:
        self._context.events.complete(result.variable, result.streamed_text)
        try:
            ready = self._context.publish(result.variable, result.value, self.node.id, result)
        except ConureError as error:
            self._fail(error)
            return
        self._context.complete_slot(self.node.id, self.slot, ready)

    def _fail(self, error: ConureError) -> None:
        self._context.retry_or_fail(self.node.id, error)

    # --- after the engine -----------------------------------------------------------------

    def restore(
        self, outputs: Mapping[str, ValueRecord], values: dict[str, Json], num_done: int
    ) -> None:
        """Rebuild the ids of slots that were committed before a restart of the server.

        Where the ids were made by another tokenizer, encodes the text again.
        """
        tokenizer = self.model.tokenizer
        for slot in range(num_done):
            rendered = self.render(slot, values)
            self.ids += self.encode(slot, rendered).ids
            record = outputs[self.outputs[slot].variable]
            assert record.text is not None
            assert record.token_ids is not None
            self._leftover = ""
            ids = record.token_ids
            if record.tokenizer_hash == self.model.tokenizer_hash:
                # The end of the text that the ids do not contain is the leftover.
                tail = self.ids[-NUM_TAIL:]
                decoded = tokenizer.decode(tail + ids)[len(tokenizer.decode(tail)) :]
                if record.text.startswith(decoded):
                    self._leftover = record.text[len(decoded) :]
            else:
                ids = tokenizer.encode_text(record.text, continues=bool(self.ids))
            if self._recorder is not None:
                self._recorder.restore(rendered, record.text, self._leftover)
            self.ids += ids
            self._num_generated += len(ids)

    def engine_lost(self) -> bool:
        """Handle the death of the context's engine.

        Returns: True if the call was running on the engine. The call is then withdrawn, and
            `queue_slot` queues it again. False if only the context is lost, which the next slot
            fills again.
        """
        self._discard_output()
        self._kv.engine_lost()
        if self._request is None or self._request.reservations is None:
            return False
        self._withdraw()
        return True

    def is_on(self, engine: str) -> bool:
        """Whether the call's context is on this engine."""
        return self._kv.engine is not None and self._kv.engine.name == engine

    def abandon(self) -> None:
        """Withdraw the call from the queue and its engine, without a result; safe to repeat."""
        if self.is_over:
            return
        self.is_over = True
        num_received = len(self._output)
        self._discard_output()
        self._withdraw()
        self._kv.abort(self._context.aborted, num_received)
        self._kv.remove_reader()

    def fail_internally(self) -> None:
        """Fail the call after an internal error; safe when it is over."""
        if not self.is_over:
            message = f"internal server error in node {self.node.id}; see the server's log"
            self._fail(RunError("server.internal", message))

    def _discard_output(self) -> None:
        """Count the work on the current slot as discarded.

        The engine will not report the work. A prompt that was being filled counts in full, because
        its progress is unknown.
        """
        usage = self.node_state.usage
        usage.decoded += len(self._output)
        usage.discarded += len(self._output)
        self._output = []
        usage.prompt_discarded += self._num_filling
        self._num_filling = 0

    def _withdraw(self) -> None:
        if self._request is not None:
            services = self._context.services
            if self._request.reservations is None:  # it is still in the queue
                self.node_state.usage.queued_s += time.monotonic() - self._phase_start_s
            if not services.suspects.leave(self._request):
                services.scheduler.release(self._request)
            self._request = None


def _make_value(
    call: LLMCall, report: protocol.Finished, prompt_ids: list[int], output_ids: list[int]
) -> Json:
    """Return the value of a call's current output, and record the output for the trace.

    Raises:
        ConureError: if the text is not a value of the output.
    """
    output = call.outputs[call.slot]
    logprobs: Json = None
    if output.sampling.logprobs is not None:
        kept = call._logprobs[: report.num_kept]
        logprobs = {"content": logprobs_of(call.model.tokenizer, output_ids, kept)}
    num_cached = _num_cached(call.node_state, call.slot, len(prompt_ids))
    value: Json = None
    failure: ConureError | None = None
    try:
        value = value_of(
            output,
            report,
            num_prompt=len(prompt_ids),
            num_cached=num_cached,
            model=call.model.name,
            name=call._output_name,
            logprobs=logprobs,
        )
    except ConureError as error:
        failure = error
    if call._recorder is not None:
        assert call._sampling is not None
        call._recorder.finish(
            output,
            report,
            call._sampling,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            num_cached=num_cached,
            value=value,
            failure=failure,
        )
    if failure is not None:
        raise failure
    return value


def _num_cached(state: NodeState, slot: int, num_prompt: int) -> int:
    """Return how many prompt tokens of a slot were cached; 0 for slots after the first."""
    usage = state.usage
    return min(usage.logical - usage.computed, num_prompt) if slot == 0 else 0


def _num_expected_tokens(output: OutputSpec, sampling: protocol.SamplingParams) -> int:
    """Return the number of output tokens to reserve on an engine.

    Without `max_tokens` the output may fill the context. Reserving the whole context would leave no
    room for other calls, so an expected length is reserved.
    """
    if output.sampling.max_tokens is not None:
        return sampling.max_tokens
    return min(sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)


def _count_prompt(call: LLMCall, report: protocol.Filled) -> None:
    """Add the prompt tokens of a fill to the usage of a call's node."""
    usage = call.node_state.usage
    if call._is_slot_counted:
        usage.recomputed += report.computed
        return
    call._is_slot_counted = True
    # The prompt of an output is all text before the output, as in a separate request.
    usage.logical += len(call.ids) + len(call._prompt)
    if call.slot == 0:
        usage.constant += call._kv.num_constant
        usage.written += call._kv.num_generated_prefix
    else:
        usage.again += len(call.ids)
        usage.again_constant += min(call._kv.num_constant, len(call.ids))
        usage.again_written += call._num_generated
    # The fill of the next slot computes the KV of the last generated id. That id counts neither
    # as a prompt token nor as recomputed.
    usage.computed += min(report.computed, len(call._prompt))
    again = max(0, report.computed - len(call._prompt))
    usage.recomputed += min(again, call._kv.num_refilled)
    usage.cached += report.cached
    call._kv.num_refilled = 0
