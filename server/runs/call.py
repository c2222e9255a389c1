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

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from conure.engine import api

from ..engines.engine import Engine
from ..engines.scheduler import Placement, Scheduler, Ticket
from ..program.errors import ConureError, RunError
from ..program.ir import Generate, Json, Output, OutputForm, Sampling
from ..program.rope import output_form
from ..program.status import Trace
from ..prompts.model import Model
from ..prompts.prompt import Rendered, render_chat, render_slot
from ..prompts.tokenizer import Encoded, Piece
from ..store.journal import ValueRecord
from .execution import NodeState
from .sharing import Held, Sharing, common_prefix_len

MIN_SHARED_TOKENS = 16
"""A prefix shorter than a block is filled again more cheaply than it is kept."""
NUM_TAIL = 4
"""Tokens before an output that decide how its first one is spelled."""


@dataclass(frozen=True, slots=True)
class Target:
    """One output of a call: which variable, sampled how, in which form."""

    variable: str
    sampling: Sampling
    form: OutputForm


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a slot produced."""

    variable: str
    value: Json
    text: str
    token_ids: list[int]
    epoch: int


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


def targets(node: Generate) -> tuple[Target, ...]:
    """The outputs of a call, one per slot."""
    if isinstance(node.prompt, list):
        return tuple(
            Target(segment.output, segment, output_form(segment))
            for segment in node.prompt
            if isinstance(segment.output, str)
        )
    output = node.output
    assert isinstance(output, Output), "checked when the graph was built"
    return (Target(output.variable, output, output_form(output)),)


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
        constants: tuple[bool, ...],
        rank: float,
        group: str | None,
        salt: str,
        keeps_all: bool,
        traces: bool,
    ) -> None:
        assert isinstance(state.node, Generate)
        self.program = program
        self.state = state
        self.node: Generate = state.node
        self.model = model
        self.targets = targets(self.node)
        self.slot = 0
        self.ids: list[int] = []
        self.is_over = False
        self._sharing = sharing
        self._host = host
        self._hashes = hashes
        self._constants = constants
        self._rank = rank
        self._group = group
        self._salt = salt
        self._keeps_all = keeps_all
        self._traces = traces
        self._ticket: Ticket | None = None
        self._engine: Engine | None = None
        self._context: int | None = None
        self._context_since = 0.0
        self._num_inherited = 0
        self._num_refilled = 0
        self._prompt: list[int] = []
        self._cuts: tuple[int, ...] = ()
        self._sampling: api.Sampling | None = None
        self._output: list[int] = []
        self._leftover = ""
        self._num_constant = 0
        self._num_generated = 0
        self._num_generated_shared = 0
        self._is_slot_counted = False
        self._clock = 0.0

    # --- before the engine ----------------------------------------------------------------

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
        return self.model.tokenizer.encode(rendered.pieces, bos=is_prompt_start)

    def enqueue(self, slot: int, rendered: Rendered, encoded: Encoded) -> None:
        """Wait for an engine with these ids.

        Raises:
            PromptError: `prompt.too_long`.
        """
        self.slot = slot
        self._prompt = encoded.ids
        self.state.prefix_break |= rendered.prefix_break
        num_prompt = len(self.ids) + len(encoded.ids)
        sampling = self.targets[slot].sampling
        budget = self.model.output_budget(num_prompt, sampling.max_tokens, f"node {self.node.id}")
        self._sampling = self._final_sampling(sampling, budget)
        if slot == 0:
            self._cuts = tuple(encoded.tokens_before(end) for end in rendered.ends)
            constant = [
                cut
                for cut, is_constant in zip(self._cuts, self._constants, strict=False)
                if is_constant
            ]
            self._num_constant = max(constant, default=0)
        self._is_slot_counted = False
        self._queue()

    def _final_sampling(self, sampling: Sampling, budget: int) -> api.Sampling:
        seed = sampling.seed
        if seed is None:
            # Drawn with the program's id and so journaled with it: a restart draws the same,
            # and what its author wants tried again draws anew.
            name = f"{self.program}/{self.node.id}/{self.slot}"
            if self.state.num_retries:
                name += f"/{self.state.num_retries}"
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
        return api.Sampling(
            max_tokens=budget,
            min_tokens=min(sampling.min_tokens, budget),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=seed,
            stop=tuple(sampling.stop),
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
        )

    def _queue(self) -> None:
        assert self._sampling is not None
        need = len(self.ids) + len(self._prompt) + self._sampling.max_tokens
        self._clock = time.monotonic()
        self.state.phase = "queued"
        self._ticket = Ticket(self.program, self._rank, need, self._start)
        self._host.scheduler.submit(self._ticket)

    # --- on the engine --------------------------------------------------------------------

    def _start(self, placement: Placement) -> None:
        """The scheduler's turn: fill what is missing and generate, in one frame."""
        assert self._sampling is not None
        now = time.monotonic()
        self.state.usage.queued_s += now - self._clock
        self._clock = now
        engine = self._host.engine(placement.engine)
        assert engine is not None, "the scheduler places calls on engines that are there"
        if self._engine is not engine:
            self._move_to(engine)
        self.state.engine = engine.name
        self.state.why = placement.why
        self.state.phase = "running"
        self._output = []
        if self._context is None:
            self._fork(engine)
        else:
            engine.send(api.Fill(self._context, self._prompt, rank=self._rank))
        assert self._context is not None
        engine.send(api.Generate(self._context, self._sampling, rank=self._rank, group=self._group))
        self._host.slot_started(self, self.slot)

    def _move_to(self, engine: Engine) -> None:
        if self._engine is not None and self._context is not None:
            self._account_context()
            self._engine.free(self._context)
        self._context = None
        self._engine = engine

    def _fork(self, engine: Engine) -> None:
        """Make the call's context: forked from the deepest prefix that is held, and leaving
        held behind it every prefix that calls still to come will read.
        """
        ids = self.ids + self._prompt
        parent, parent_len = None, 0
        # A prefix whose last reader is this call comes back released: fork first, free after.
        released = self._sharing.arrive(self.node.id)
        for held in [*released, *self._sharing.find(engine.name, self._hashes[: len(self._cuts)])]:
            shared = common_prefix_len(held.ids, ids)
            if held.engine == engine.name and shared > parent_len:
                parent, parent_len = held.context, shared
                self._num_generated_shared = max(0, shared - held.num_prompt)
                self.state.usage.retokenized = len(held.ids) - max(shared, held.num_prompt)
        if not self.ids and self._hashes:
            block_size = self.model.limits.block_size
            for boundary, end in enumerate(self._cuts):
                # Whole blocks only: a partial one would be computed by every reader once more.
                cut = end - end % block_size
                if cut - parent_len >= MIN_SHARED_TOKENS and self._worth_holding(boundary):
                    parent = self._hold_prefix(engine, ids[:cut], boundary, parent, parent_len)
                    parent_len = cut
        self._context = engine.new_context(self._on_report)
        self._context_since = time.monotonic()
        self._num_inherited = parent_len
        self._num_refilled = max(0, len(self.ids) - parent_len)
        engine.send(
            api.Fill(self._context, ids[parent_len:], parent, parent_len, self._salt, self._rank)
        )
        for held in released:
            release(held, self._host, self.state, self.model.limits.block_size)

    def _worth_holding(self, boundary: int) -> bool:
        if boundary >= len(self._hashes):
            return False  # the only call of its program: nobody else will come
        coming = self._sharing.is_coming(self._hashes[boundary])
        if not coming:
            return False
        deeper = boundary + 1
        return deeper >= len(self._cuts) or self._sharing.is_coming(self._hashes[deeper]) < coming

    def _hold_prefix(
        self, engine: Engine, ids: list[int], boundary: int, parent: int | None, parent_len: int
    ) -> int:
        held = Held(
            engine=engine.name,
            context=0,
            ids=ids,
            num_keep=min(len(ids), self._num_constant),
            num_prompt=len(ids),
            since=time.monotonic(),
            num_own=len(ids) - parent_len,
            is_filled=False,
        )

        def on_report(report: api.Report) -> None:
            if isinstance(report, api.Filled):
                self.state.usage.computed += report.computed
                self.state.usage.cached += report.cached
                self.state.usage.recomputed += report.recomputed
                self._sharing.filled(held)
                if held.is_released:
                    engine.free(held.context, held.num_keep)
            elif isinstance(report, api.Failed):
                # Nobody may fork from it any more; who has done so already fails with it.
                self._sharing.discard(held)
                engine.free(held.context)

        held.context = engine.new_context(on_report)
        self._sharing.fill(held)
        engine.send(
            api.Fill(held.context, ids[parent_len:], parent, parent_len, self._salt, self._rank)
        )
        if not self._sharing.hold(self._hashes[boundary], held):
            held.is_released = True  # another engine keeps it: here it lives for this call only
        return held.context

    def _on_report(self, report: api.Report) -> None:
        match report:
            case api.Filled():
                self._filled(report)
            case api.Tokens():
                self._output += report.ids
                if report.text:
                    self._host.slot_grew(self, self.slot, report.text)
            case api.Finished():
                self._finished(report)
            case api.Failed():
                assert self._engine is not None
                self._engine.free(report.context)
                self._context = None
                self._withdraw()
                self._host.call_failed(self, RunError(report.code, report.message))
            case _:
                raise AssertionError(f"not a report on a context: {report}")

    def _filled(self, report: api.Filled) -> None:
        usage = self.state.usage
        now = time.monotonic()
        usage.prefill_s += now - self._clock
        self._clock = now
        usage.recomputed += report.recomputed
        if self._is_slot_counted:
            usage.recomputed += report.computed
            return
        self._is_slot_counted = True
        # The prompt of an output is all before it, as if it were asked for by itself.
        usage.logical += len(self.ids) + len(self._prompt)
        if self.slot == 0:
            usage.constant += self._num_constant
            usage.written += self._num_generated_shared
        else:
            usage.again += len(self.ids)
            usage.again_constant += min(self._num_constant, len(self.ids))
            usage.again_written += self._num_generated
        # A growing context's last generated id gets its KV with the next fill: that one is
        # neither a prompt token nor computed again.
        usage.computed += min(report.computed, len(self._prompt))
        usage.recomputed += min(max(0, report.computed - len(self._prompt)), self._num_refilled)
        usage.cached += report.cached
        self._num_refilled = 0

    def _finished(self, report: api.Finished) -> None:
        usage = self.state.usage
        usage.decode_s += time.monotonic() - self._clock
        usage.decoded += report.num_decoded
        # The token that ends an output (EOS, a stop token) has done its work; others have not.
        num_ending = 1 if report.reason == "stop" and not isinstance(report.stop, str) else 0
        usage.discarded += max(0, report.num_decoded - report.num_kept - num_ending)
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
        try:
            value = _value(target, report, len(prompt_ids), self.model.name)
        except ConureError as error:
            self._host.call_failed(self, error)
            return
        assert self._engine is not None
        if self.slot + 1 == len(self.targets):
            self._close(num_prompt=len(prompt_ids))
        outcome = Outcome(target.variable, value, report.text, kept, self._engine.epoch)
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
                ids = tokenizer.encode_text(record.text)
            self.ids += ids
            self._num_generated += len(ids)

    def engine_lost(self) -> bool:
        """The engine that held the context is gone. True: this call was running there and waits
        again now; False: it held nothing that it cannot fill again when its time comes.
        """
        self._engine = None
        self._context = None
        self._discard_output()
        if self._ticket is None or self._ticket.load is None:
            return False
        self._withdraw()
        self._queue()
        return True

    def is_on(self, engine: str) -> bool:
        """Whether its context is on this engine."""
        return self._engine is not None and self._engine.name == engine

    @property
    def num_blocks(self) -> int:
        """KV blocks that its context refers to, about."""
        return 0 if self._context is None else -(-len(self.ids) // self.model.limits.block_size)

    def abandon(self) -> None:
        """End without a result: leave the queue and the engine; safe to repeat."""
        if self.is_over:
            return
        self.is_over = True
        self._withdraw()
        self._discard_output()
        if self._engine is not None and self._context is not None:
            self._account_context()
            self._engine.send(api.Abort(self._context))
            self._engine.free(self._context)
            self._context = None
        for held in self._sharing.arrive(self.node.id):
            release(held, self._host, self.state, self.model.limits.block_size)

    def _discard_output(self) -> None:
        """What was decoded so far is lost; the engine will not count it for us."""
        self.state.usage.decoded += len(self._output)
        self.state.usage.discarded += len(self._output)
        self._output = []

    def _close(self, *, num_prompt: int) -> None:
        """The last output stands: keep the context for the readers that the graph knows of."""
        self.is_over = True
        assert self._engine is not None
        assert self._context is not None
        self._account_context()
        held = Held(
            engine=self._engine.name,
            context=self._context,
            ids=self.ids,
            num_keep=self._num_keep(),
            num_prompt=num_prompt,
            since=time.monotonic(),
            num_own=len(self.ids) - self._num_inherited,
        )
        for boundary in range(len(self._hashes) - 1, len(self._cuts) - 1, -1):
            if self._sharing.hold(self._hashes[boundary], held):
                return
        self._engine.free(self._context, held.num_keep)

    def _num_keep(self) -> int:
        """Tokens worth keeping as cache: program text, and whole turns of chats and sessions."""
        return len(self.ids) if self._keeps_all else self._num_constant

    def _withdraw(self) -> None:
        if self._ticket is not None:
            self._host.scheduler.withdraw(self._ticket)
            self._ticket = None

    def _account_context(self) -> None:
        num_own = len(self.ids) + len(self._prompt) - self._num_inherited
        blocks = -(-max(num_own, 0) // self.model.limits.block_size)
        self.state.usage.block_seconds += blocks * (time.monotonic() - self._context_since)


def release(held: Held, host: Host, state: NodeState, block_size: int) -> None:
    """Give up a context that kept a prefix, and book what it held."""
    blocks = -(-held.num_own // block_size)
    now = time.monotonic()
    state.usage.block_seconds += blocks * (now - held.since)
    held.since = now
    held.is_released = True
    if held.is_filled and (engine := host.engine(held.engine)) is not None:
        engine.free(held.context, held.num_keep)


def _value(target: Target, report: api.Finished, num_prompt: int, model: str) -> Json:
    if target.form == "text":
        return report.text
    if target.form == "value":
        return parse_output(target.variable, report.text)
    finish: Literal["stop", "length"] = report.reason
    message: dict[str, Json] = {
        "role": "assistant",
        "content": report.text,
        "finish_reason": finish,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": report.num_decoded,
            "total_tokens": num_prompt + report.num_decoded,
        },
        "model": model,
    }
    if report.stop is not None:
        message["stop"] = report.stop
    return message


def parse_output(variable: str, text: str) -> Json:
    """The JSON value of an output under `as: value`.

    Raises:
        ConureError: `output.not_json`.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RunError(
            "output.not_json", f"output {variable} is not JSON ({error}): {text[:80]!r}"
        ) from error
