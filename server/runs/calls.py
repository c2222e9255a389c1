"""All LLM calls of one program: what they share, how urgent they are, and where they are.

Reads off the graph, before anything runs, which prefixes several calls start with and what
each call is worth to the outputs that somebody waits for; makes a call when its first slot
is ready, or its prompt can begin to be filled, and encodes its prompts. Tells engines that
run out of room when what they hold will be read next. Refuses to know what follows from a
call's end: that is the program's business, which is also the calls' host.

Kept true: a call exists from its first ready slot to the end of its node; whatever prefix
the calls hold is given up with the last of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from conure.engine import api

from ..program.critical_path import (
    get_earliest_starts,
    get_latest_starts,
    get_remaining,
    has_deadline,
)
from ..program.graph import Slot
from ..program.instances import Instance
from ..program.ir import Client, Generate, Map
from ..program.objective import Performance, get_perf_objective
from ..program.rope import Prefixes, prefix_hash, prefixes
from ..prompts.model import DEFAULT_MAX_TOKENS
from ..prompts.prompt import Rendered
from ..prompts.tokenizer import Encoded
from ..scheduling.demand import Standing
from ..scheduling.policy import Rank
from ..store.journal import ValueRecord
from .call import Call, Host
from .context import release
from .early import EarlyFills
from .encoder import Work
from .execution import Execution, NodeState
from .output import targets
from .sharing import Sharing
from .world import World

NUM_WEIGHED_AT_ONCE = 128
"""Nodes that have not ended, up to which every append weighs all of them again."""


CHARS_PER_TOKEN = 4
"""Of text that is not encoded yet, roughly."""
MAX_READS = 64
"""Prefixes that one call may find held: those that reach furthest, of a long history."""
CLIENT_S = 10.0
"""How long a step of the client is taken to last, when it is told what will be read next."""
TELL_S, TELL_NODE_S = 0.005, 1e-4
"""How seldom a program tells that: after so long, and longer by so much for each of its nodes."""


class CallHost(Host, Protocol):
    """What the calls of a program need of it, besides what one call needs."""

    def prompt_ready(self, call: Call, slot: int, rendered: Rendered, encoded: Encoded) -> None:
        """The slot's prompt is encoded."""

    def prompt_broken(self, call: Call, slot: int, error: Exception) -> None:
        """The slot's prompt cannot be encoded."""


class Calls:
    """The calls of one program."""

    def __init__(self, execution: Execution, world: World, host: CallHost) -> None:
        self._execution = execution
        self._world = world
        self._host = host
        self._began_s = time.monotonic() - (time.time() - execution.created_at)
        self._service = world.scheduler.sessions.join(
            execution.tenant, execution.options.session, self._began_s
        )
        self._sharing = Sharing()
        self._calls: dict[str, Call] = {}
        self._prefixes: dict[str, Prefixes] = {}
        self._performance: dict[str, Performance] = {}
        self._latest: dict[str, float] = {}
        self._total_s: float | None = None
        self._live: dict[str, None] = {}
        self._unweighed: dict[str, None] = {}
        self._foreseen: dict[str, tuple[str, ...]] = {}
        """By node: calls that are not in the graph yet and are waited for as if they were."""
        self._telling: asyncio.TimerHandle | None = None
        self._early = EarlyFills(execution, world, self._sharing, self._prefixes, self._call)
        self.past: Mapping[str, ValueRecord] = {}
        """Outputs that were committed before a restart: a half-done call goes on behind them."""

    @property
    def num_held(self) -> int:
        """Contexts of the program that engines still report on; 0 after the end."""
        engines = map(self._world.engine, self._sharing.engines)
        program = self._execution.id
        return sum(engine.num_contexts(program) for engine in engines if engine is not None)

    def expect(self, nodes: Iterable[str]) -> None:
        """New nodes are in the graph: count who will read which prefix."""
        graph = self._execution.graph
        states = self._execution.nodes
        nodes = [node_id for node_id in nodes if not states[node_id].has_ended]
        self._unweighed.update(dict.fromkeys(nodes))
        self._live.update(dict.fromkeys(nodes))
        calls = [
            (node_id, node)
            for node_id in nodes
            if isinstance(node := graph.nodes[node_id], Generate)
        ]
        is_alone = len(calls) == 1 and graph.place(calls[0][0]) is None
        if is_alone and not self._execution.is_open and not self._prefixes:
            return  # nobody to share with
        for node_id, node in calls:
            if not self._sharing.is_expected(node_id):
                self._announce(node_id, node)

    def foresee(self, control: str, instances: Iterable[Instance]) -> None:
        """These come unless the node that they belong to ends before: what they will read of what
        runs now must outlive its end.
        """
        graph = self._execution.graph
        nodes = [instance.node for instance in instances]
        for node in nodes:
            graph.define(node)
        calls = [node for node in nodes if isinstance(node, Generate)]
        for call in calls:
            self._announce(call.id, call)
        self._foreseen[control] = tuple(call.id for call in calls)

    def _announce(self, node_id: str, node: Generate) -> None:
        definitions = self._execution.graph.definitions
        found = self._prefixes[node_id] = prefixes(node, definitions, closed=True)
        self._sharing.expect(node_id, self._reads(node, found.hashes))

    def _reads(self, node: Generate, hashes: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The prefixes that a call may find held when it comes."""
        if isinstance(node.messages, list) and any(m.splice for m in node.messages):
            inner = prefix_hash(node, self._execution.graph.definitions)
            return tuple(dict.fromkeys([*inner[:-1][-MAX_READS:], *hashes[:-1]]))
        return hashes[: _num_shareable(node, hashes)]

    def weigh(self) -> None:
        """Deduce anew what each call is worth, also those that wait or run already."""
        self._performance = get_perf_objective(self._execution.graph, self._live)
        self._latest = self._latest_starts(self._live)
        self._unweighed.clear()
        for node_id, call in self._calls.items():
            performance = self._worth(node_id)
            call.rerank(self._rank(call.node, performance, call.came_s), performance)

    def _worth(self, node_id: str) -> Performance:
        """What a call is worth: in a map all calls are one group, however many are to come."""
        performance = self._performance[node_id]
        place = self._execution.graph.place(node_id)
        while place is not None:
            if isinstance(self._execution.graph.nodes[place.control], Map):
                return performance._replace(group=place.control)
            place = self._execution.graph.place(place.control)
        return performance

    def _latest_starts(self, nodes: Iterable[str]) -> dict[str, float]:
        graph, deadline_s = self._execution.graph, self._execution.options.deadline_s
        if deadline_s is None and not has_deadline(graph):
            return {}
        return get_latest_starts(graph, self._estimate_s, deadline_s=deadline_s, nodes=nodes)

    def _length_s(self, nodes: Iterable[str]) -> float:
        """How long the program takes alone; what was said once is kept to, unless it is open."""
        if self._total_s is None or self._execution.is_open:
            remaining = get_remaining(self._execution.graph, self._estimate_s, nodes=nodes)
            self._total_s = max(remaining.values(), default=0.0)
        return self._total_s

    def _estimate_s(self, slot: Slot) -> float:
        """How long a slot may take; what is no call is taken to take no time."""
        node = self._execution.graph.nodes[slot.node]
        if not isinstance(node, Generate):
            return 0.0
        num_output = targets(node)[slot.index].sampling.max_tokens or DEFAULT_MAX_TOKENS
        num_prompt = _num_static_chars(node) // CHARS_PER_TOKEN
        return self._world.scheduler.pace.estimate_s(num_prompt, num_output)

    def _weigh_new(self) -> None:
        """Weigh nodes that were appended. In a large graph by themselves, until there are many:
        what they do to those before them can wait, and the loop cannot.
        """
        is_large = len(self._live) > NUM_WEIGHED_AT_ONCE
        if is_large and len(self._unweighed) * 10 < len(self._live):
            fresh = [name for name in self._unweighed if name not in self._performance]
            if fresh:
                self._performance |= get_perf_objective(self._execution.graph, fresh)
                self._latest |= self._latest_starts(fresh)
        elif self._unweighed:
            self.weigh()

    def _rank(self, node: Generate, performance: Performance, came_s: float) -> Rank:
        latest = self._latest.get(node.id)
        standing = Standing(
            came_s=came_s,
            # An open program is as old, and as long, as what is asked of it now.
            began_s=came_s if self._execution.is_open else self._service.began_s,
            total_s=self._length_s([node.id] if self._execution.is_open else self._live),
            kind=performance.kind,
            depth=performance.depth,
            priority=node.priority,
            latest_s=None if latest is None else self._began_s + latest,
            attained_s=self._service.attained_s,
        )
        return self._world.scheduler.policy.rank(standing)

    def prepare(self, node_id: str, slot: int) -> None:
        """A slot is ready: render and encode its prompt, then tell the host."""
        is_early = node_id in self._calls
        call = self._call(node_id)
        if is_early and slot == 0 and not call.ids:
            came_s = time.monotonic()
            call.come(came_s, self._rank(call.node, self._worth(node_id), came_s))
        known = self._execution.values
        reads = self._execution.graph.slots[node_id][slot].reads
        values = {name: known[name] for name in reads if name in known}
        num_chars = _num_static_chars(call.node)
        num_chars += sum(len(v) if isinstance(v, str) else 256 for v in values.values())

        def done(rendered: Rendered, encoded: Encoded) -> None:
            if not call.is_over:
                self._host.prompt_ready(call, slot, rendered, encoded)

        def broken(error: Exception) -> None:
            if not call.is_over:
                self._host.prompt_broken(call, slot, error)

        self._world.encoder.submit(Work(call, slot, values, num_chars, done, broken))

    def _call(self, node_id: str) -> Call:
        call = self._calls.get(node_id)
        if call is None:
            call = self._calls[node_id] = self._make(node_id)
            self._service.begin()
        return call

    def _make(self, node_id: str) -> Call:
        execution = self._execution
        state = execution.nodes[node_id]
        node = state.node
        assert isinstance(node, Generate)
        self._weigh_new()
        performance = self._worth(node_id)
        came_s = time.monotonic()
        known = self._prefixes.get(node_id)
        hashes = () if known is None else known.hashes
        if known is None:  # alone: it shares nothing, and what it leaves is cached all the same
            known = prefixes(node, execution.graph.definitions, closed=True)
        call = Call(
            execution.id,
            state,
            self._world.model,
            self._sharing,
            self._host,
            hashes=hashes,
            reads=self._reads(node, hashes) if hashes else (),
            constants=known.constants,
            came_s=came_s,
            rank=self._rank(node, performance, came_s),
            performance=performance,
            salt=execution.tenant,
            keeps_all=execution.is_open or not self._prefixes,
            traces=execution.options.trace,
        )
        if state.slots_done:
            call.restore(self.past, execution.values, state.slots_done)
        return call

    def engine_lost(self, engine: str) -> list[str]:
        """An engine is gone; returns the nodes whose calls ran there and wait again now."""
        self._sharing.lose_engine(engine)
        return [
            node_id
            for node_id, call in list(self._calls.items())
            if call.is_on(engine) and call.engine_lost()
        ]

    def end(self, node_id: str) -> None:
        """The node is over: its call is abandoned and waits for no prefix; safe to repeat."""
        state = self._execution.nodes[node_id]
        usage = state.usage
        if state.started_at is None:
            # Its prompt was begun, and never came to be.
            usage.prompt_discarded += usage.computed
            usage.computed = 0
        if node_id in self._live:
            self._service.attained_s += usage.prefill_s + usage.decode_s
        self.drop(node_id)
        self._live.pop(node_id, None)
        self._unweighed.pop(node_id, None)
        for foreseen in self._foreseen.pop(node_id, ()):
            if foreseen not in self._execution.nodes:
                self._give_up(foreseen, self._payer())
        self._give_up(node_id, state)
        self._tell_soon()

    def _give_up(self, reader: str, payer: NodeState | None) -> None:
        """A call will not come any more, or has come: what only it waited for goes."""
        for held in self._sharing.arrive(reader):
            assert payer is not None, "what is held was filled by a call that had started"
            release(held, self._world, payer, self._world.model.limits.block_size)

    def drop(self, node_id: str) -> None:
        """Abandon the node's call; a new one may be made for another attempt."""
        if (call := self._calls.pop(node_id, None)) is not None:
            self._service.end(time.monotonic())
            call.abandon()

    def abandon(self) -> None:
        """Abandon all calls and give up every prefix."""
        self._early.stop()
        if self._telling is not None:
            self._telling.cancel()
        for node_id in list(self._calls):
            self.drop(node_id)
        if not self._sharing.engines:
            return
        payer = self._payer()
        assert payer is not None, "only a call that has started uses an engine"
        payer.usage.prompt_discarded += self._sharing.num_filling
        for held in self._sharing.release_all():
            held.is_filled = True  # nobody waits for what it costs any more: free it at once
            release(held, self._world, payer, self._world.model.limits.block_size)

    def _payer(self) -> NodeState | None:
        """Who answers for what nobody has come for."""
        states = self._execution.nodes.values()
        calls = (state for state in states if isinstance(state.node, Generate))
        return next((state for state in calls if state.started_at is not None), None)

    # --- texts that grow ------------------------------------------------------------------

    def writes(self, call: Call, slot: int) -> None:
        """A call begins to write: what is known of its readers' prompts may be filled."""
        self._tell_soon()
        if (engine := call.engine) is not None:
            self._early.writes(call.targets[slot].variable, engine)

    def grew(self, call: Call, slot: int, text: str) -> None:
        """More of what a call writes."""
        target = call.targets[slot]
        if target.form == "text" and target.tools is None and (engine := call.engine) is not None:
            self._early.grew(target.variable, text, engine)

    def wrote(self, call: Call, slot: int) -> None:
        """What a call wrote is the value of its variable now."""
        if (engine := call.engine) is not None:
            self._early.committed(call.targets[slot].variable, engine)

    # --- what is read next ----------------------------------------------------------------

    def _tell_soon(self) -> None:
        """What is held will be read at other times than was thought."""
        if self._telling is None and self._sharing.num_held:
            delay_s = TELL_S + len(self._live) * TELL_NODE_S
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(delay_s, self._tell_uses)

    def _tell_uses(self) -> None:
        """Tell crowded engines when what they hold will be read next, so that they can evict what
        is needed last. Of calls that could all start now, those of better rank come first.
        """
        self._telling = None
        starts: dict[str, float] | None = None
        now = time.monotonic()
        for held, readers in self._sharing.uses():
            engine = self._world.engine(held.engine)
            if engine is None or not engine.is_crowded:
                continue
            if starts is None:
                starts = get_earliest_starts(self._execution.graph, self._left_s, nodes=self._live)
            last_s = max(starts.values(), default=0.0)
            held.next_use = now + min((starts.get(each, last_s) for each in readers), default=0.0)
            engine.send(api.Update(held.context, held.rank, held.next_use))

    def _left_s(self, slot: Slot) -> float:
        """How long a slot still takes, roughly."""
        state = self._execution.nodes[slot.node]
        whole_s = CLIENT_S if isinstance(state.node, Client) else self._estimate_s(slot)
        if state.phase != "running" or state.started_at is None:
            return whole_s
        return max(whole_s - (time.time() - state.started_at), 0.0)


def _num_shareable(node: Generate, hashes: tuple[bytes, ...]) -> int:
    """Boundaries before the first output: what the call's first fill consists of."""
    if isinstance(node.prompt, list):
        outputs = (i for i, segment in enumerate(node.prompt) if isinstance(segment.output, str))
        return next(outputs, len(hashes))
    return len(hashes) - 1


def _num_static_chars(node: Generate) -> int:
    segments: list[Any] = list(node.prompt) if isinstance(node.prompt, list) else []
    total = 0
    for message in node.messages or []:
        if isinstance(message.content, str):
            total += len(message.content)
        elif isinstance(message.content, list):
            segments += message.content
    return total + sum(len(s.text) for s in segments if isinstance(s.text, str))
