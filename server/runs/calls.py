"""All LLM calls of one program: what they share, how urgent they are, and where they are.

Reads off the graph, before anything runs, which prefixes several calls start with and what
each call is worth to the outputs that somebody waits for; makes a call when its first slot
is ready, and encodes its prompts. Refuses to know what follows from a call's end: that is
the program's business, which is also the calls' host.

Kept true: a call exists from its first ready slot to the end of its node; whatever prefix
the calls hold is given up with the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ..program.graph import Graph
from ..program.ir import Generate
from ..program.objective import Performance, get_perf_objective
from ..program.rope import prefix_constant, prefix_hash
from ..program.symbols import Definitions
from ..prompts.prompt import Rendered
from ..prompts.tokenizer import Encoded
from ..store.journal import ValueRecord
from .call import Call, Host
from .context import release
from .encoder import Work
from .execution import Execution
from .sharing import Sharing
from .world import World


class CallHost(Host, Protocol):
    """What the calls of a program need of it, besides what one call needs."""

    def prompt_ready(self, call: Call, slot: int, rendered: Rendered, encoded: Encoded) -> None:
        """The slot's prompt is encoded."""

    def prompt_broken(self, call: Call, slot: int, error: Exception) -> None:
        """The slot's prompt cannot be encoded."""


class Calls:
    """The calls of one program."""

    def __init__(self, execution: Execution, world: World, host: CallHost, *, number: int) -> None:
        self._execution = execution
        self._world = world
        self._host = host
        self._number = number
        self._sharing = Sharing()
        self._calls: dict[str, Call] = {}
        self._hashes: dict[str, tuple[bytes, ...]] = {}
        self._performance: dict[str, Performance] = {}
        self.past: Mapping[str, ValueRecord] = {}
        """Outputs that were committed before a restart: a half-done call goes on behind them."""

    @property
    def num_held(self) -> int:
        """What the calls still hold: blocks of contexts, and prefixes; 0 after the end."""
        return sum(call.num_blocks for call in self._calls.values()) + self._sharing.num_held

    def expect(self, nodes: Iterable[str]) -> None:
        """New nodes are in the graph: count who will read which prefix."""
        graph = self._execution.graph
        self.weigh()
        calls = [
            (node_id, node)
            for node_id in nodes
            if isinstance(node := graph.nodes[node_id], Generate)
            and not self._execution.nodes[node_id].has_ended
        ]
        if len(calls) == 1 and not self._execution.is_open and not self._hashes:
            return  # nobody to share with
        for node_id, node in calls:
            hashes = prefix_hash(node, _definitions(node, graph))
            self._hashes[node_id] = hashes
            self._sharing.expect(node_id, hashes[: _num_shareable(node, hashes)])

    def weigh(self) -> None:
        """Deduce anew what each call is worth; calls that wait already keep their rank."""
        self._performance = get_perf_objective(self._execution.graph)

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
        performance = self._performance.get(node_id)
        is_latency = performance is None or performance.kind == "latency"
        call = Call(
            execution.id,
            state,
            self._world.model,
            self._sharing,
            self._host,
            hashes=self._hashes.get(node_id, ()),
            constants=prefix_constant(node, _definitions(node, execution.graph)),
            rank=_rank(node.priority, is_latency, self._number),
            group=None if performance is None else performance.group,
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
        self.drop(node_id)
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
        states = list(self._execution.nodes.values())
        for held in self._sharing.release_all():
            held.is_filled = True  # nobody waits for what it costs any more: free it at once
            release(held, self._world, states[0], self._world.model.limits.block_size)


def _rank(priority: int, is_latency: bool, number: int) -> float:
    """Lower runs first: by priority, then latency before throughput, then program by program.

    Older programs first: work on what has been started ends sooner than a little of everything.
    """
    return -priority * 2.0**44 + (0.0 if is_latency else 2.0**42) + float(number)


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
