"""All LLM calls of one program: what they share, how urgent they are, and where they are.

Reads off the graph, before anything runs, which prefixes several calls start with and what
each call is worth to the outputs that somebody waits for; makes a call when its first slot
is ready, and encodes its prompts. Refuses to know what follows from a call's end: that is
the program's business, which is also the calls' host.

Kept true: a call exists from its first ready slot to the end of its node; whatever prefix
the calls hold is given up with the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ..program.critical_path import get_latest_starts, get_remaining, has_deadline
from ..program.graph import Graph, Slot
from ..program.ir import Generate, Map
from ..program.objective import Performance, get_perf_objective
from ..program.rope import prefix_constant, prefix_hash
from ..program.symbols import Definitions
from ..prompts.model import DEFAULT_MAX_TOKENS
from ..prompts.prompt import Rendered
from ..prompts.tokenizer import Encoded
from ..scheduling.demand import Standing
from ..scheduling.policy import Rank
from ..store.journal import ValueRecord
from .call import Call, Host
from .context import release
from .encoder import Work
from .execution import Execution
from .output import targets
from .sharing import Sharing
from .world import World

NUM_WEIGHED_AT_ONCE = 128
"""Nodes that have not ended, up to which every append weighs all of them again."""


CHARS_PER_TOKEN = 4
"""Of text that is not encoded yet, roughly."""


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
        self._hashes: dict[str, tuple[bytes, ...]] = {}
        self._performance: dict[str, Performance] = {}
        self._latest: dict[str, float] = {}
        self._total_s: float | None = None
        self._live: dict[str, None] = {}
        self._unweighed: dict[str, None] = {}
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
        if len(calls) == 1 and not self._execution.is_open and not self._hashes:
            return  # nobody to share with
        for node_id, node in calls:
            hashes = prefix_hash(node, _definitions(node, graph))
            self._hashes[node_id] = hashes
            self._sharing.expect(node_id, hashes[: _num_shareable(node, hashes)])

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
        call = self._calls.get(node_id)
        if call is None:
            call = self._calls[node_id] = self._make(node_id)
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

    def _make(self, node_id: str) -> Call:
        execution = self._execution
        state = execution.nodes[node_id]
        node = state.node
        assert isinstance(node, Generate)
        self._weigh_new()
        performance = self._worth(node_id)
        came_s = time.monotonic()
        call = Call(
            execution.id,
            state,
            self._world.model,
            self._sharing,
            self._host,
            hashes=self._hashes.get(node_id, ()),
            constants=prefix_constant(node, _definitions(node, execution.graph)),
            came_s=came_s,
            rank=self._rank(node, performance, came_s),
            performance=performance,
            salt=execution.tenant,
            keeps_all=execution.is_open or not self._hashes,
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
        usage = self._execution.nodes[node_id].usage
        if node_id in self._live:
            self._service.add(usage.prefill_s + usage.decode_s, time.monotonic())
        self.drop(node_id)
        self._live.pop(node_id, None)
        self._unweighed.pop(node_id, None)
        for held in self._sharing.arrive(node_id):
            state = self._execution.nodes[node_id]
            release(held, self._world, state, self._world.model.limits.block_size)

    def drop(self, node_id: str) -> None:
        """Abandon the node's call; a new one may be made for another attempt."""
        if (call := self._calls.pop(node_id, None)) is not None:
            call.abandon()

    def abandon(self) -> None:
        """Abandon all calls and give up every prefix."""
        for node_id in list(self._calls):
            self.drop(node_id)
        if not self._sharing.engines:
            return
        states = self._execution.nodes.values()
        payer = next(s for s in states if isinstance(s.node, Generate) and s.started_at is not None)
        payer.usage.prompt_discarded += self._sharing.num_filling
        for held in self._sharing.release_all():
            held.is_filled = True  # nobody waits for what it costs any more: free it at once
            release(held, self._world, payer, self._world.model.limits.block_size)


def _definitions(node: Generate, graph: Graph) -> Definitions | None:
    """What `expr` nodes compute, for hashes; a splice stays closed, so that the boundaries of a
    hash are those of the rendered prompt.
    """
    has_splice = isinstance(node.messages, list) and any(m.splice for m in node.messages)
    return None if has_splice else graph.definitions


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
