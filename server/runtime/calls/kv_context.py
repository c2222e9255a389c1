"""The KV cache of one LLM call: a context on one engine, forked from a shared prefix.

Responsibility: where a call's tokens are, which prefixes of its prompt are retained for other
calls, and what retaining them costs.

Out of scope: what the tokens mean, and what happens to the output.

Invariants: a call has at most one context, on at most one engine. Every context that is created
is either freed or handed to the `PrefixRegistry` for the calls that fork from it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from conure.engine import protocol

from ...engines.protocol import Engine, Listener
from ..node_state import NodeState
from ..services import RuntimeServices
from .aborted_outputs import AbortedOutputs
from .prefix_registry import PrefixRegistry, RetainedContext, common_prefix_len

MIN_SHARED_TOKENS = 16
"""Fewer new tokens than this, about a block, are cheaper to fill again than to retain."""


class PromptPlan(NamedTuple):
    """What is known about the prefixes of a call's prompt before the prompt is rendered."""

    hashes: tuple[bytes, ...]
    """Symbolic hashes: one per boundary of the rendered prompt, then one per output boundary."""
    reads: tuple[bytes, ...]
    """Hashes of all prefixes that may be retained, including prefixes inside spliced messages."""
    constants: tuple[bool, ...]
    """For each boundary, whether everything before it is text of the program."""
    salt: str
    expects_readers: bool
    """Whether later programs are expected to read all of the prompt, not only the text of the
    program."""


class CallKVContext:
    """The context of one call. The first `fill` on an engine creates it."""

    def __init__(
        self,
        program: str,
        node_state: NodeState,
        plan: PromptPlan,
        registry: PrefixRegistry,
        services: RuntimeServices,
        *,
        rank: float,
    ) -> None:
        self.engine: Engine | None = None
        self.id: int | None = None
        self.num_constant = 0
        """Leading tokens that are text of the program."""
        self.num_generated_prefix = 0
        """Tokens inherited from another context in which a model generated them."""
        self.num_sent = 0
        """Tokens of the last fill, without the inherited ones."""
        self.num_refilled = 0
        """Tokens of earlier slots that the last fork sent again; 0 once the usage contains them."""
        self._program = program
        self._node_state = node_state
        self._plan = plan
        self._registry = registry
        self._services = services
        self._block_size = services.model.limits.block_size
        self._rank = rank
        self._boundaries: tuple[int, ...] = ()
        self._len = 0
        self._num_inherited = 0
        self._allocated_at_s = 0.0

    def find_affinity(self, ids: list[int]) -> tuple[str | None, int]:
        """Return the engine with the longest prefix of a prompt, and the length of the prefix."""
        if self.id is not None and self.engine is not None:
            return self.engine.name, self._len
        return self._registry.find_longest(self._plan.reads, ids)

    def boundary_positions(self) -> list[tuple[int, bool]]:
        """Return the boundaries of the first slot: the number of tokens before each, and whether
        later programs are expected to read these tokens.
        """
        all_expected = self._plan.expects_readers
        return [(cut, all_expected or cut <= self.num_constant) for cut in self._boundaries]

    def set_rank(self, rank: float) -> None:
        """Change the rank of the call, also on its engine."""
        self._rank = rank
        if self.engine is not None and self.id is not None:
            self.engine.send(protocol.Update(self.id, rank))

    def set_boundaries(self, positions: tuple[int, ...]) -> None:
        """Set the boundaries of the first slot, as the number of tokens wholly before each."""
        self._boundaries = positions
        pairs = zip(positions, self._plan.constants, strict=False)
        self.num_constant = max((cut for cut, is_constant in pairs if is_constant), default=0)

    # --- filling --------------------------------------------------------------------------

    def fill(self, engine: Engine, ids: list[int], prompt: list[int], listener: Listener) -> int:
        """Fill `ids` and `prompt` on the engine, and return the context's id.

        Args:
            engine: target; if it differs from the current engine, everything is filled again.
            ids: tokens of the completed slots.
            prompt: tokens that the next slot appends.
            listener: receives the engine's reports on the context.
        """
        if self.engine is not engine:
            self.free()
            self.engine = engine
        if self.id is None:
            self.id = self._fork(engine, ids, prompt, listener)
        else:
            engine.send(protocol.Fill(self.id, prompt, rank=self._rank))
            self.num_sent = len(prompt)
        self._len = len(ids) + len(prompt)
        return self.id

    def _fork(self, engine: Engine, ids: list[int], prompt: list[int], listener: Listener) -> int:
        """Create the context, forked from the longest retained prefix.

        Prefixes that are worth retaining for pending calls are first filled into other contexts.
        """
        tokens = ids + prompt
        self._registry.engines.add(engine.name)
        parent, parent_len = None, 0
        # This call is the last reader of the released prefixes: fork first, free them afterwards.
        released = self._registry.remove_reader(self._node_state.node.id)
        for retained in [*released, *self._registry.find(engine.name, self._plan.reads)]:
            shared = common_prefix_len(retained.ids, tokens)
            if retained.engine == engine.name and shared > parent_len:
                parent, parent_len = retained.context, shared
                self.num_generated_prefix = max(0, shared - retained.num_prompt)
                self._node_state.usage.retokenized = len(retained.ids) - max(
                    shared, retained.num_prompt
                )
        if not ids and self._plan.hashes:
            for boundary, end in enumerate(self._boundaries):
                # Whole blocks only: each reader would compute a partial block again.
                cut = end - end % self._block_size
                if cut - parent_len >= MIN_SHARED_TOKENS and self._is_worth_retaining(boundary):
                    parent = self._retain_prefix(engine, tokens[:cut], boundary, parent, parent_len)
                    parent_len = cut
        context = engine.new_context(listener, self._program)
        self._allocated_at_s = time.monotonic()
        self._num_inherited = parent_len
        self.num_sent = len(tokens) - parent_len
        self.num_refilled = max(0, len(ids) - parent_len)
        self._send_fill(engine, context, tokens, parent, parent_len)
        for retained in released:
            release(retained, self._services, self._node_state)
        return context

    def _send_fill(
        self,
        engine: Engine,
        context: int,
        tokens: list[int],
        parent: int | None,
        parent_len: int,
    ) -> None:
        new_tokens = tokens[parent_len:]
        engine.send(
            protocol.Fill(context, new_tokens, parent, parent_len, self._plan.salt, self._rank)
        )

    def _is_worth_retaining(self, boundary: int) -> bool:
        """Whether a boundary has pending readers, and more of them than the next boundary."""
        num_readers = self._registry.num_pending_readers(self._plan.hashes[boundary])
        if not num_readers:
            return False
        deeper = boundary + 1
        return (
            deeper >= len(self._boundaries)
            or self._registry.num_pending_readers(self._plan.hashes[deeper]) < num_readers
        )

    def _retain_prefix(
        self,
        engine: Engine,
        ids: list[int],
        boundary: int,
        parent: int | None,
        parent_len: int,
    ) -> int:
        """Fill a prefix into a new context, retain it, and return the context's id."""
        retained = RetainedContext(
            engine=engine.name,
            context=0,
            ids=ids,
            num_expected=min(len(ids), self.num_constant),
            num_prompt=len(ids),
            since=time.monotonic(),
            num_own=len(ids) - parent_len,
            is_filled=False,
            rank=self._rank,
        )
        usage = self._node_state.usage

        def on_report(report: protocol.Report) -> None:
            if isinstance(report, protocol.Filled):
                usage.computed += report.computed
                usage.cached += report.cached
                usage.recomputed += report.recomputed
                self._registry.mark_filled(retained)
                if retained.is_released:
                    engine.free(retained.context, len(ids), retained.num_expected)
            elif isinstance(report, protocol.Failed):
                # No later call may fork from it. Calls that have forked from it also fail.
                self._registry.discard(retained)
                engine.free(retained.context)

        retained.context = engine.new_context(on_report, self._program)
        self._registry.begin_fill(retained)
        self._send_fill(engine, retained.context, ids, parent, parent_len)
        if self._registry.retain(self._plan.hashes[boundary], retained):
            _set_next_use_now(engine, retained)
        else:
            retained.is_released = True  # retained on another engine; only this call uses this copy
        return retained.context

    # --- releasing ------------------------------------------------------------------------

    def retain_or_free(self, ids: list[int], *, num_prompt: int) -> None:
        """Retain the context for its pending readers, or free it if there are none.

        Args:
            ids: all tokens of the context.
            num_prompt: tokens before the last output.
        """
        assert self.engine is not None
        assert self.id is not None
        self._len = len(ids)
        self._add_block_seconds()
        retained = RetainedContext(
            engine=self.engine.name,
            context=self.id,
            ids=ids,
            # Text of the program, and whole turns of chats and sessions.
            num_expected=len(ids) if self._plan.expects_readers else self.num_constant,
            num_prompt=num_prompt,
            since=time.monotonic(),
            num_own=len(ids) - self._num_inherited,
            rank=self._rank,
        )
        self.id = None
        hashes = self._plan.hashes
        for boundary in range(len(hashes) - 1, len(self._boundaries) - 1, -1):
            if self._registry.retain(hashes[boundary], retained):
                _set_next_use_now(self.engine, retained)
                return
        self.engine.free(retained.context, len(ids), retained.num_expected)

    def free(self) -> None:
        """Free the context, on which nothing runs; safe to repeat."""
        if self.engine is not None and self.id is not None:
            self._add_block_seconds()
            self.engine.free(self.id)
        self.id = None

    def abort(self, aborted: AbortedOutputs, num_received: int) -> None:
        """Abort what runs on the context and free it; safe to repeat.

        Args:
            aborted: the aborted outputs of the program.
            num_received: tokens of the running output that the node's usage contains.
        """
        if self.engine is not None and self.id is not None:
            self._add_block_seconds()
            aborted.abort(self.engine, self.id, self._node_state.usage, num_received)
        self.id = None

    def engine_lost(self) -> None:
        """Forget the context: its engine died."""
        self.engine = None
        self.id = None

    def remove_reader(self) -> None:
        """Release the prefixes of which this call was the last pending reader."""
        for retained in self._registry.remove_reader(self._node_state.node.id):
            release(retained, self._services, self._node_state)

    def _add_block_seconds(self) -> None:
        blocks = -(-max(self._len - self._num_inherited, 0) // self._block_size)
        duration_s = time.monotonic() - self._allocated_at_s
        self._node_state.usage.block_seconds += blocks * duration_s


def _set_next_use_now(engine: Engine, retained: RetainedContext) -> None:
    """Protect a new retained prefix from eviction until the program sends its real next use."""
    if engine.is_memory_constrained:
        engine.send(protocol.Update(retained.context, retained.rank, time.monotonic()))


def release(retained: RetainedContext, services: RuntimeServices, payer: NodeState) -> None:
    """Release a retained context and add its block-seconds to the usage of a node."""
    blocks = -(-retained.num_own // services.model.limits.block_size)
    now = time.monotonic()
    payer.usage.block_seconds += blocks * (now - retained.since)
    retained.since = now
    retained.is_released = True
    engine = services.engine(retained.engine)
    if retained.is_filled and engine is not None:
        engine.free(retained.context, len(retained.ids), retained.num_expected)
