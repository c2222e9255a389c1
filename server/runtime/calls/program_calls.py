"""The LLM calls of one program: their prompts, shared prefixes and engines.

Responsibility: creates a call when its first slot is ready, and encodes its prompts. Registers,
before anything runs, which prefixes several calls share. Tells engines under memory pressure when
retained prefixes are read next.

Out of scope: the consequences of a call's end (`NodeContext`).

Invariants: a call exists from its first ready slot to the end of its node. Every retained prefix
is released with its last reader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from conure.engine import protocol

from ...program.content import Json, encoded_size
from ...program.errors import ConureError
from ...program.expressions.budget import WorkBudget
from ...program.graph.critical_path import get_earliest_starts
from ...program.graph.graph import Slot
from ...program.graph.instances import BodyInstance
from ...program.graph.slot_graph import SlotGraph
from ...program.ir import ClientNode, GenerateNode
from ...program.prompt_prefix import PromptPrefixes, prefixes
from ...prompts.prompt import RenderedPrompt
from ...prompts.tokenizer import EncodedText
from ...store.journal import ValueRecord
from ..node_context import NodeContext, NodeExecutor
from ..node_state import NodeState
from ..persistence.journaled_events import RecoveredState
from .call_priorities import CallPriorities
from .call_recorder import CallRecorder
from .kv_context import PromptPlan, release
from .llm_call import LLMCall
from .prefix_registry import PrefixRegistry, RetainedContext
from .prompt_encoder import EncodedPrompt, EncodeJob

MIN_CHARS_PER_JSON_VALUE = 256
"""Minimum cost of a value that is not a string, in characters."""
MAX_READS = 64
"""Prefixes inside the spliced messages of one prompt that may be retained: the longest ones."""
CLIENT_STEP_S = 10.0
"""Assumed duration of a client step when the next use of a prefix is estimated."""
NEXT_USE_DELAY_S, NEXT_USE_DELAY_PER_NODE_S = 0.005, 1e-4
"""Minimum time between two updates of next uses, and its growth per live node."""

MAX_NODES_WITH_NEXT_USE = 10_000
"""Maximum number of live nodes for which next uses are estimated, in one turn, 6 us per node. Above
it, engines evict the least recently used prefix."""


class ProgramCalls(NodeExecutor[GenerateNode]):
    """The LLM calls of one program; executes its generate nodes."""

    kind = GenerateNode

    starts_running = False  # a call is queued first

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._services = context.services
        self.priorities = CallPriorities(self.state, self._services)
        self._registry = PrefixRegistry()
        self._calls: dict[str, LLMCall] = {}
        self._prefixes: dict[str, PromptPrefixes] = {}
        self._reads: dict[str, tuple[bytes, ...]] = {}
        """By call: the hashes of the prefixes that may be retained when it starts."""
        self._announced: dict[str, tuple[str, ...]] = {}
        """By control node: calls that are not in the graph yet but count as pending readers."""
        self._next_use_timer: asyncio.TimerHandle | None = None
        self._restored_outputs: Mapping[str, ValueRecord] = {}
        """Outputs committed before a restart; a half-done call continues after them."""

    @property
    def num_contexts(self) -> int:
        """Contexts of the program that engines still report on; 0 after its end."""
        engines = map(self._services.engine, self._registry.engines)
        program = self.state.id
        return sum(
            engine.num_contexts_by_owner.get(program, 0) for engine in engines if engine is not None
        )

    @property
    def _salt(self) -> str:
        """The salt of the program's cached KV: of its tenant, and its own if it has one."""
        tenant, salt = self.state.tenant, self.state.options.cache_salt
        return tenant if salt is None else f"{tenant}\n{salt}"

    def running_on(self, engine: str) -> list[str]:
        """Return the nodes whose calls an engine runs."""
        return [node_id for node_id, call in self._calls.items() if call.is_on(engine)]

    def retained_on(self, engine: str) -> list[tuple[RetainedContext, list[str]]]:
        """Return the prefixes that an engine retains for the program, each with the calls that
        will read it.
        """
        return [
            (retained, list(readers))
            for retained, readers in self._registry.uses()
            if retained.engine == engine
        ]

    def restore(self, recovered: RecoveredState) -> None:
        """Restore the committed outputs of half-done calls."""
        self._restored_outputs = recovered.outputs

    def nodes_added(self, nodes: Sequence[str]) -> None:
        """Register the prefixes that new calls read."""
        graph, states = self.state.graph, self.state.nodes
        nodes = [node_id for node_id in nodes if not states[node_id].has_ended]
        self.priorities.add_nodes(nodes)
        calls = [
            node for node_id in nodes if isinstance(node := graph.nodes[node_id], GenerateNode)
        ]
        is_alone = self.state.num_open_calls == 1
        is_single_call = len(calls) == 1 and is_alone and graph.body_of(calls[0].id) is None
        if is_single_call and not self.state.is_open and not self._prefixes:
            return  # there is no other call to share a prefix with
        for node in calls:
            if not self._registry.is_pending(node.id):
                self._add_reader(node)

    def nodes_announced(self, control: str, instances: Sequence[BodyInstance]) -> None:
        """Register calls that are added later, so that the prefixes they read are retained."""
        nodes = [instance.node for instance in instances]
        for node in nodes:
            self.state.graph.add_definitions(node)
        calls = [node for node in nodes if isinstance(node, GenerateNode)]
        for call in calls:
            self._add_reader(call)
        self._announced[control] = tuple(call.id for call in calls)

    def _add_reader(self, node: GenerateNode) -> None:
        known = prefixes(node, self.state.graph.definitions, closed=True)
        self._prefixes[node.id] = known._replace(inner=())  # a call may have 10,000
        reads = self._reads[node.id] = _readable_prefixes(node, known)
        self._registry.add_reader(node.id, reads)

    def objective_tightened(self, variable: str) -> None:
        """Update the priorities of calls, also queued and running ones, that a variable needs."""
        self._rerank(self.priorities.tighten(variable))

    def _rerank(self, nodes: Sequence[str]) -> None:
        for node_id in nodes:
            call = self._calls.get(node_id)
            if call is not None:
                rank = self.priorities.rank(call.node, call.ready_at_s)
                call.rerank(rank, self.priorities.performance(node_id))

    # --- one call -------------------------------------------------------------------------

    def run(self, node: GenerateNode, slot: int) -> None:
        """Render and encode the prompt of a ready slot, then queue it for an engine."""
        call = self._calls.get(node.id)
        if call is None:
            call = self._calls[node.id] = self._create(node)
            self.priorities.service.call_started()
        reads = self.state.graph.slots[node.id][slot].reads
        values = {name: self.state.values[name] for name in reads if name in self.state.values}
        num_chars = call.num_chars(slot) + sum(map(_num_chars, values.values()))

        def encode(budget: WorkBudget) -> EncodedPrompt:
            rendered = call.render(slot, values, budget)
            return rendered, call.encode(slot, rendered)

        def on_encoded(rendered: RenderedPrompt, encoded: EncodedText) -> None:
            if not call.is_over:
                self._enqueue(call, slot, rendered, encoded)

        def on_error(error: Exception) -> None:
            if not call.is_over:
                self.context.fail_slot(node.id, slot, error, is_rendering=True)

        self._services.encoder.submit(
            EncodeJob(
                node.id,
                encode,
                num_chars,
                self.context.work,
                on_encoded,
                on_error,
                call.fail_internally,
            )
        )

    def _enqueue(
        self, call: LLMCall, slot: int, rendered: RenderedPrompt, encoded: EncodedText
    ) -> None:
        try:
            call.enqueue(slot, rendered, encoded)
        except ConureError as error:
            self.context.fail(call.node.id, error)
            return
        if slot == 0:
            attempt = call.node_state.attempt
            self.context.emit("node.queued", call.node.id, attempt=attempt)

    def _create(self, node: GenerateNode) -> LLMCall:
        node_state = self.state.nodes[node.id]
        if self.priorities.update():
            self._rerank(list(self._calls))
        ready_at_s = time.monotonic()
        known = self._prefixes.get(node.id)
        hashes = () if known is None else known.hashes
        if known is None:  # a single call shares no prefix, but its program text is cached
            known = prefixes(node, self.state.graph.definitions, closed=True)
        plan = PromptPlan(
            hashes=hashes,
            reads=self._reads.get(node.id, ()),
            constants=known.constants,
            salt=self._salt,
            expects_readers=self.state.is_open or not self._prefixes,
        )
        call = LLMCall(
            node_state,
            self.context,
            self._registry,
            plan,
            ready_at_s=ready_at_s,
            rank=self.priorities.rank(node, ready_at_s),
            performance=self.priorities.performance(node.id),
            priorities=self.priorities,
            on_started=self._schedule_next_use_update,
            recorder=CallRecorder(node_state, self.context) if self.state.options.trace else None,
        )
        if node_state.slots_done:
            call.restore(self._restored_outputs, self.state.values, node_state.slots_done)
        return call

    def engine_lost(self, engine: str) -> list[str]:
        """Withdraw the calls that ran on an engine that died; return their nodes."""
        self._registry.engine_lost(engine)
        return [
            node_id
            for node_id, call in list(self._calls.items())
            if call.is_on(engine) and call.engine_lost()
        ]

    def requeue(self, node_id: str) -> None:
        """Queue a withdrawn call again."""
        self._calls[node_id].queue_slot()

    # --- ends -----------------------------------------------------------------------------

    def abandon(self, node_id: str) -> None:
        """Abandon the call of a node. Another attempt creates a new call."""
        if (call := self._calls.pop(node_id, None)) is not None:
            self.priorities.service.call_ended(time.monotonic())
            call.abandon()

    def node_ended(self, node_id: str) -> None:
        """Abandon the call of a node, and release the prefixes that only this call waited for."""
        node_state = self.state.nodes[node_id]
        if node_id in self.priorities.live_nodes and node_state.has_usage:
            usage = node_state.usage
            self.priorities.service.attained_s += usage.prefill_s + usage.decode_s
        self.abandon(node_id)
        self.priorities.remove_node(node_id)
        announced = [n for n in self._announced.pop(node_id, ()) if n not in self.state.nodes]
        payer = self._payer_of_unread_prefixes() if announced else None
        for each in announced:
            self._remove_reader(each, payer)
        self._remove_reader(node_id, node_state)
        self._schedule_next_use_update()

    def _remove_reader(self, reader: str, payer: NodeState | None) -> None:
        for retained in self._registry.remove_reader(reader):
            assert payer is not None, "a call that has started filled the prefix"
            release(retained, self._services, payer)

    def release(self) -> None:
        """Abandon all calls and release all prefixes."""
        if self._next_use_timer is not None:
            self._next_use_timer.cancel()
        for node_id in list(self._calls):
            self.abandon(node_id)
        if not self._registry.engines:
            return
        payer = self._payer_of_unread_prefixes()
        assert payer is not None, "only a call that has started uses an engine"
        payer.usage.prompt_discarded += self._registry.num_filling
        for retained in self._registry.release_all():
            release(retained, self._services, payer)

    def _payer_of_unread_prefixes(self) -> NodeState | None:
        """Return the first started call, whose usage contains prefixes that no call reads.

        None if no call has started.
        """
        states = self.state.nodes.values()
        calls = (each for each in states if isinstance(each.node, GenerateNode))
        return next((each for each in calls if each.started_at is not None), None)

    # --- next uses ------------------------------------------------------------------------

    def _schedule_next_use_update(self) -> None:
        """Schedule an update of the times at which retained prefixes are read next."""
        num_live = len(self.priorities.live_nodes)
        if num_live > MAX_NODES_WITH_NEXT_USE:
            return
        if self._next_use_timer is None and self._registry.num_retained:
            delay_s = NEXT_USE_DELAY_S + num_live * NEXT_USE_DELAY_PER_NODE_S
            loop = asyncio.get_running_loop()
            self._next_use_timer = loop.call_later(delay_s, self._send_next_uses)

    def _send_next_uses(self) -> None:
        """Tell engines under memory pressure when retained prefixes are read next.

        They evict the prefix with the latest next use. Among calls that could all start now, the
        better rank goes first.
        """
        self._next_use_timer = None
        starts: dict[str, float] | None = None
        now = time.monotonic()
        for retained, readers in self._registry.uses():
            engine = self._services.engine(retained.engine)
            if engine is None or not engine.is_memory_constrained:
                continue
            if starts is None:
                live = SlotGraph.of(self.state.graph, self.priorities.live_nodes)
                starts = get_earliest_starts(self._remaining_s, live)
            last_s = max(starts.values(), default=0.0)
            next_s = min((starts.get(reader, last_s) for reader in readers), default=0.0)
            retained.next_use = now + next_s
            engine.send(protocol.Update(retained.context, retained.rank, retained.next_use))

    def _remaining_s(self, slot: Slot) -> float:
        """Estimate how long a slot still runs."""
        node_state = self.state.nodes[slot.node]
        is_client_step = isinstance(node_state.node, ClientNode)
        total_s = CLIENT_STEP_S if is_client_step else self.priorities.estimate_s(slot)
        if node_state.phase != "running" or node_state.started_at is None:
            return total_s
        return max(total_s - (self._services.clock.now() - node_state.started_at), 0.0)


def _readable_prefixes(node: GenerateNode, known: PromptPrefixes) -> tuple[bytes, ...]:
    """Return the hashes of the prefixes that may be retained when a call starts."""
    hashes = known.hashes
    if isinstance(node.messages, list) and any(m.splice for m in node.messages):
        return tuple(dict.fromkeys([*known.inner[:-1][-MAX_READS:], *hashes[:-1]]))
    return hashes[: _num_shareable(node, hashes)]


def _num_shareable(node: GenerateNode, hashes: tuple[bytes, ...]) -> int:
    """Return the number of boundaries before the first output: those in the first fill."""
    if isinstance(node.prompt, list):
        outputs = (i for i, segment in enumerate(node.prompt) if isinstance(segment.output, str))
        return next(outputs, len(hashes))
    return len(hashes) - 1


def _num_chars(value: Json) -> int:
    """Return the estimated cost of a value in a prompt, in characters of text."""
    size = encoded_size(value)
    return size if isinstance(value, str) else max(MIN_CHARS_PER_JSON_VALUE, size)
