"""One LLM call on its way: from a ready slot to token ids, to an engine, to a value.

A call is the run of one `generate` node: one context that grows slot by slot, with the
literal text before each output filled and the output generated. Knows the prompt's ids,
the context that holds them, and what the engine reports. Refuses to know what happens to
a value afterwards: it tells its host, once per slot, either `slot_done` or `call_failed`.

Kept true: `ids` are the tokens of the context as far as slots are done, so that a context
lost with its engine is filled again elsewhere and an output that stands is never sampled
again; a call has at most one ticket and at most one context; after `abandon` it says
nothing more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

from conure.engine import api

from ..engines.engine import Engine
from ..program.errors import ConureError, PromptError, RunError
from ..program.ir import Generate, Json
from ..program.objective import Performance
from ..program.status import Trace
from ..prompts.model import Model
from ..prompts.prompt import Rendered, render_chat, render_slot
from ..prompts.tokenizer import Encoded, Piece
from ..prompts.tool_calls import ContentStream
from ..scheduling.demand import Demand, prefixes_of
from ..scheduling.policy import Rank
from ..scheduling.scheduler import Placement, Scheduler, Ticket
from ..store.journal import ValueRecord
from .context import CallContext
from .execution import NodeState
from .output import Outcome, final_sampling, logprobs_of, targets, value_of
from .sharing import Sharing

logger = logging.getLogger(__name__)

EARLY_S = 1e6
"""How far behind everybody a prompt stands that is filled before its time."""
NUM_TAIL = 4
"""Tokens before an output that decide how its first one is spelled."""


class Host(Protocol):
    """What a call needs of the program that it belongs to."""

    scheduler: Scheduler

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if it is alive."""
        ...

    def slot_started(self, call: Call, slot: int) -> None:
        """The slot runs on an engine now."""
        ...

    def slot_grew(self, call: Call, slot: int, text: str) -> None:
        """More text of the slot's output."""
        ...

    def slot_done(self, call: Call, slot: int, outcome: Outcome) -> None:
        """The slot's output is whole."""
        ...

    def call_failed(self, call: Call, error: ConureError) -> None:
        """The call ended without its output."""
        ...


class Call:
    """The run of one generate node."""

    def __init__(
        self,
        program: str,
        state: NodeState,
        model: Model,
        sharing: Sharing,
        host: Host,
        *,
        hashes: tuple[bytes, ...],
        reads: tuple[bytes, ...],
        constants: tuple[bool, ...],
        came_s: float,
        rank: Rank,
        performance: Performance,
        salt: str,
        keeps_all: bool,
        traces: bool,
    ) -> None:
        assert isinstance(state.node, Generate)
        self.program = program
        self.state = state
        self.node: Generate = state.node
        self.model = model
        self.targets = targets(self.node, model.tool_format)
        self.slot = 0
        self.ids: list[int] = []
        self.is_over = False
        self.came_s = came_s
        """When it was first ready, on the clock of ranks."""
        self._host = host
        self._constants = constants
        self._rank = rank
        self._performance = performance
        self._salt = salt
        self._keeps_all = keeps_all
        self._traces = traces
        self._ticket: Ticket | None = None
        self._context = CallContext(
            program,
            state,
            sharing,
            host,
            hashes=hashes,
            reads=reads,
            block_size=model.limits.block_size,
            rank=rank.at_s,
            salt=salt,
            keeps_all=keeps_all,
        )
        self._prompt: list[int] = []
        self._sampling: api.Sampling | None = None
        self._output: list[int] = []
        self._chances: list[api.Chance] = []
        self._content: ContentStream | None = None
        self._leftover = ""
        self._num_generated = 0
        self._is_slot_counted = False
        self._num_filling = 0
        """Tokens that the engine was told to fill and has not said what they cost."""
        self._clock = 0.0

    @property
    def engine(self) -> Engine | None:
        """Where its context is."""
        return self._context.engine

    # --- before the engine ----------------------------------------------------------------

    def come(self, came_s: float, rank: Rank) -> None:
        """It was made before its time, and is ready only now."""
        self.came_s = came_s
        self._rank = rank
        self._context.set_rank(rank.at_s)

    def fill_early(self, engine: Engine, ids: list[int], boundary: int) -> None:
        """Let the beginning of its prompt be filled while it still waits for the rest.

        Args:
            engine: where.
            ids: what the prompt will start with, most likely.
            boundary: the first one that they do not go beyond.
        """
        self._context.fill_early(engine, ids, boundary, self._constants, self._rank.at_s + EARLY_S)

    def render(self, slot: int, values: dict[str, Json]) -> Rendered:
        """The text that slot `slot` appends. Pure; may run in a thread.

        Raises:
            PromptError: if the values do not make a prompt.
            ExpressionError: if an input's expression fails on its values.
        """
        if isinstance(self.node.prompt, list):
            rendered = render_slot(self.node, slot, values)
            if not self._leftover:
                return rendered
            shift = len(self._leftover)
            pieces = (Piece(self._leftover, False), *rendered.pieces)
            ends = tuple(end + shift for end in rendered.ends)
            return Rendered(pieces, ends, rendered.prefix_break)
        return render_chat(self.node, values, self.model.template)

    def encode(self, slot: int, rendered: Rendered) -> Encoded:
        """The ids that slot `slot` appends. Pure; may run in a thread."""
        is_prompt_start = slot == 0 and isinstance(self.node.prompt, list)
        return self.model.tokenizer.encode(rendered.pieces, bos=is_prompt_start, continues=slot > 0)

    def enqueue(self, slot: int, rendered: Rendered, encoded: Encoded) -> None:
        """Wait for an engine with these ids.

        Raises:
            PromptError: `prompt.too_long`, `prompt.empty`.
        """
        self.slot = slot
        self._prompt = encoded.ids
        self.state.prefix_break |= rendered.prefix_break
        num_prompt = len(self.ids) + len(encoded.ids)
        if num_prompt == 0:
            output = self.targets[slot].variable
            raise PromptError(
                "prompt.empty", f"node {self.node.id}: nothing stands before output {output}"
            )
        sampling = self.targets[slot].sampling
        budget = self.model.output_budget(num_prompt, sampling.max_tokens, f"node {self.node.id}")
        name = f"{self.program}/{self.node.id}/{slot}"
        if self.state.num_retries:
            name += f"/{self.state.num_retries}"  # what its author wants tried again draws anew
        self._sampling = final_sampling(sampling, max_tokens=budget, name=name)
        if slot == 0:
            cuts = tuple(encoded.tokens_before(end) for end in rendered.ends)
            self._context.set_cuts(cuts, self._constants)
        self._is_slot_counted = False
        self._queue()

    def _queue(self) -> None:
        assert self._sampling is not None
        wanted = self.ids + self._prompt
        home, num_home = self._context.home(wanted)
        performance = self._performance
        is_waited = performance.kind == "latency"
        demand = Demand(
            program=self.program,
            num_prompt=len(wanted),
            num_output=self._sampling.max_tokens,
            prefixes=prefixes_of(wanted, self._context.cuts(self._keeps_all), self._salt),
            group=performance.group,
            is_strict=is_waited and performance.group is None,
            is_waited=is_waited,
            home=home,
            num_home=num_home,
        )
        self._clock = time.monotonic()
        self.state.phase = "queued"
        self._submit(demand)

    def _submit(self, demand: Demand) -> None:
        self._wait(self._rank.why)
        self._ticket = Ticket(demand, self._rank.at_s, self._start, self._wait)
        self._host.scheduler.submit(self._ticket)

    def _wait(self, why: str) -> None:
        self.state.why = why

    def rerank(self, rank: Rank, performance: Performance) -> None:
        """The call is worth more than it was: move it in the queue, or on its engine."""
        before, self._performance = self._performance, performance
        is_alike = (before.kind, before.group) == (performance.kind, performance.group)
        if rank.at_s == self._rank.at_s and is_alike:
            return
        self._rank = rank
        self._context.set_rank(rank.at_s)
        ticket = self._ticket
        if ticket is not None and ticket.load is None:
            self._withdraw()
            self._queue()

    # --- on the engine --------------------------------------------------------------------

    def _start(self, placement: Placement) -> None:
        """The scheduler's turn. A mistake of ours must not keep others from theirs."""
        try:
            self._run_on(placement)
        except Exception:
            logger.exception("node %s could not be sent to an engine", self.node.id)
            self.fail_internally()

    def _run_on(self, placement: Placement) -> None:
        """Fill what is missing and generate, in one frame."""
        assert self._sampling is not None
        now = time.monotonic()
        self.state.usage.queued_s += now - self._clock
        self._clock = now
        engine = self._host.engine(placement.engine)
        assert engine is not None, "the scheduler places calls on engines that are there"
        self.state.engine = engine.name
        self.state.why = placement.why
        self.state.phase = "running"
        self._output = []
        self._chances = []
        tools = self.targets[self.slot].tools
        self._content = None if tools is None else ContentStream(tools)
        context = self._context.fill(engine, self.ids, self._prompt, self._on_report)
        self._num_filling = self._context.num_sent
        engine.send(
            api.Generate(
                context,
                self._sampling,
                rank=self._rank.at_s,
                constraint=self.targets[self.slot].grammar,
                group=self._performance.group,
            )
        )
        self._host.slot_started(self, self.slot)

    def _on_report(self, report: api.Report) -> None:
        match report:
            case api.Tokens():
                self._output += report.ids
                self._chances += report.chances
                text = report.text
                if text and self._content is not None:
                    text = self._content.feed(text)
                if text:
                    self._host.slot_grew(self, self.slot, text)
            case api.Filled():
                self._filled(report)
            case api.Finished():
                self._finished(report)
            case api.Failed():
                self._num_filling = 0  # refused, most likely: nobody says how far it came
                self._context.free()
                self._withdraw()
                self._host.call_failed(self, RunError(report.code, report.message))
            case _:
                raise AssertionError(f"not a report on a context: {report}")

    def _filled(self, report: api.Filled) -> None:
        usage = self.state.usage
        now = time.monotonic()
        began, self._clock = self._clock, now
        usage.prefill_s += now - began
        usage.recomputed += report.recomputed
        self._num_filling = 0
        scheduler = self._host.scheduler
        if self._ticket is not None:
            scheduler.filled(self._ticket)
        scheduler.pace.learn_fill(report.computed, now - began)
        if self._is_slot_counted:
            usage.recomputed += report.computed
            return
        self._is_slot_counted = True
        # The prompt of an output is all before it, as if it were asked for by itself.
        usage.logical += len(self.ids) + len(self._prompt)
        if self.slot == 0:
            usage.constant += self._context.num_constant
            usage.written += self._context.num_written
        else:
            usage.again += len(self.ids)
            usage.again_constant += min(self._context.num_constant, len(self.ids))
            usage.again_written += self._num_generated
        # A growing context's last generated id gets its KV with the next fill: that one is
        # neither a prompt token nor computed again.
        usage.computed += min(report.computed, len(self._prompt))
        again = max(0, report.computed - len(self._prompt))
        usage.recomputed += min(again, self._context.num_refilled)
        usage.cached += report.cached
        self._context.num_refilled = 0

    def _finished(self, report: api.Finished) -> None:
        usage = self.state.usage
        decode_s = time.monotonic() - self._clock
        usage.decode_s += decode_s
        self._host.scheduler.pace.learn_decode(report.num_decoded, decode_s)
        usage.decoded += report.num_decoded
        usage.forced += report.num_forced
        self.state.constraint_relaxed |= report.constraint in ("relaxed", "broken")
        # The token that ends an output (EOS, a stop token) has done its work; others have not.
        num_ending = 1 if report.reason == "stop" and not isinstance(report.stop, str) else 0
        num_made = report.num_decoded + report.num_forced
        usage.discarded += max(0, num_made - report.num_kept - num_ending)
        kept = self._output[: report.num_kept]
        prompt_ids = self.ids + self._prompt
        if self._traces:
            self.state.trace.append(
                Trace(
                    variable=self.targets[self.slot].variable,
                    prompt_ids=prompt_ids,
                    output_ids=kept,
                    reason=report.reason,
                )
            )
        self.ids = prompt_ids + kept
        self._num_generated += len(kept)
        self._prompt = []
        self._output = []
        self._leftover = report.leftover
        self._withdraw()
        target = self.targets[self.slot]
        logprobs: Json = None
        if target.sampling.logprobs is not None:
            logprobs = logprobs_of(self.model.tokenizer, kept, self._chances[: report.num_kept])
        try:
            value = value_of(
                target,
                report,
                num_prompt=len(prompt_ids),
                model=self.model.name,
                name=f"{self.program}/{self.node.id}/{self.slot}",
                logprobs=logprobs,
            )
        except ConureError as error:
            self._host.call_failed(self, error)
            return
        engine = self._context.engine
        assert engine is not None
        if self.slot + 1 == len(self.targets):
            self.is_over = True
            self._context.keep(self.ids, num_prompt=len(prompt_ids))
        told = report.text if target.tools is None else value["content"]
        outcome = Outcome(target.variable, value, report.text, told, kept, engine.epoch)
        self._host.slot_done(self, self.slot, outcome)

    # --- after the engine -----------------------------------------------------------------

    def restore(
        self, outputs: Mapping[str, ValueRecord], values: dict[str, Json], done: int
    ) -> None:
        """Rebuild the ids of slots whose outputs stand already, after a restart of the server.

        Ids of another tokenizer mean something else here: then the text is encoded again.
        """
        tokenizer = self.model.tokenizer
        for slot in range(done):
            self.ids += self.encode(slot, self.render(slot, values)).ids
            record = outputs[self.targets[slot].variable]
            assert record.text is not None
            assert record.token_ids is not None
            self._leftover = ""
            ids = record.token_ids
            if record.tokenizer_hash == self.model.tokenizer_hash:
                tail = self.ids[-NUM_TAIL:]
                read = tokenizer.decode(tail + ids)[len(tokenizer.decode(tail)) :]
                if record.text.startswith(read):
                    self._leftover = record.text[len(read) :]
            else:
                ids = tokenizer.encode_text(record.text, continues=bool(self.ids))
            self.ids += ids
            self._num_generated += len(ids)

    def engine_lost(self) -> bool:
        """The engine that held the context is gone. True: this call was running there and waits
        again now; False: it held nothing that it cannot fill again when its time comes.
        """
        self._discard_output()
        self._context.lose()
        if self._ticket is None or self._ticket.load is None:
            return False
        self._withdraw()
        self._queue()
        return True

    def is_on(self, engine: str) -> bool:
        """Whether its context is on this engine."""
        return self._context.engine is not None and self._context.engine.name == engine

    def abandon(self) -> None:
        """End without a result: leave the queue and the engine; safe to repeat."""
        if self.is_over:
            return
        self.is_over = True
        self._discard_output()
        self._withdraw()
        self._context.free()
        self._context.leave()

    def fail_internally(self) -> None:
        """End after a mistake of ours; safe when it is over."""
        if not self.is_over:
            message = f"the server made a mistake in node {self.node.id}"
            self._host.call_failed(self, RunError("server.internal", message))

    def _discard_output(self) -> None:
        """What was computed for this slot is lost; the engine will not count it for us.

        A prompt that was being filled counts whole: how far it came nobody says.
        """
        usage = self.state.usage
        usage.decoded += len(self._output)
        usage.discarded += len(self._output)
        self._output = []
        usage.prompt_discarded += self._num_filling
        self._num_filling = 0

    def _withdraw(self) -> None:
        if self._ticket is not None:
            self._host.scheduler.withdraw(self._ticket)
            self._ticket = None
