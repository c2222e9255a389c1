"""The counterfactual of a receipt: the same calls as single requests of a parallel client.

The client sends each call when its inputs are ready, to the engine that ran it, without network and
without shared prefixes. An engine fills one prompt after another while it has a row for the output;
the running outputs wait meanwhile, and otherwise all decode at once. Nodes without a model take as
long as they took. The times of prompts and outputs are those of `calls.engine_clock`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...program.ir import GenerateNode
from ..node_state import NodeState


class _Work(NamedTuple):
    """What a node costs in the counterfactual."""

    engine: str | None
    fill_s: float
    """Exclusive time of the engine."""
    own_s: float
    """Time after that, in parallel with all other nodes; on an engine, only while it fills no
    prompt."""


def estimate_s(
    states: Sequence[NodeState],
    waited_for: Callable[[NodeState], Iterable[NodeState]],
    max_sequences: Mapping[str, int],
) -> float:
    """Return the seconds from the start of the program to the end of its last node.

    Args:
        states: the nodes that have started and finished.
        waited_for: the nodes that a node waited for; others than `states` are ignored.
        max_sequences: outputs that each engine decodes at once, by its name; an engine that is
            missing has no limit.
    """
    known = {state.node.id for state in states}
    work: dict[str, _Work] = {}
    before: dict[str, tuple[str, ...]] = {}
    for state in states:
        waited = [each for each in waited_for(state) if each.node.id in known]
        work[state.node.id] = _work(state, waited)
        before[state.node.id] = tuple({each.node.id: None for each in waited})
    return _Counterfactual(work, before, max_sequences).run()


def _work(state: NodeState, before: Iterable[NodeState]) -> _Work:
    if isinstance(state.node, GenerateNode):
        usage = state.usage
        return _Work(state.engine or "", usage.unshared_fill_s, usage.unpaused_decode_s)
    began = max((each.finished_at or 0.0 for each in before), default=0.0)
    began = max(began, state.started_at or 0.0)
    return _Work(None, 0.0, max((state.finished_at or 0.0) - began, 0.0))


class _Engine:
    """An engine that fills one prompt at a time and otherwise decodes all outputs."""

    def __init__(self, max_outputs: float) -> None:
        self.max_outputs = max_outputs
        self.prompts: deque[str] = deque()
        self.filling: str | None = None
        self.fill_ends_s = 0.0
        self.decoded_s = 0.0
        """Time in which outputs were decoded, until `now_s`."""
        self.outputs: list[tuple[float, str]] = []
        """Each ends when `decoded_s` reaches the first number."""
        self.now_s = 0.0

    def advance(self, now_s: float) -> None:
        """Decode until a time at which nothing ends before."""
        if self.filling is None:
            self.decoded_s += now_s - self.now_s
        self.now_s = now_s

    @property
    def can_fill(self) -> bool:
        """Whether a prompt waits that can be filled now."""
        has_row = len(self.outputs) < self.max_outputs
        return self.filling is None and bool(self.prompts) and has_row

    def next_s(self) -> float | None:
        """Return when the next prompt or output ends; None if there is none."""
        if self.filling is not None:
            return self.fill_ends_s
        if self.outputs:
            return self.now_s + max(self.outputs[0][0] - self.decoded_s, 0.0)
        return None


class _Counterfactual:
    """Events of the counterfactual, in order of time."""

    def __init__(
        self,
        work: Mapping[str, _Work],
        before: Mapping[str, tuple[str, ...]],
        max_sequences: Mapping[str, int],
    ) -> None:
        self._work = work
        self._num_open = {name: len(names) for name, names in before.items()}
        self._after: dict[str, list[str]] = {}
        for name, names in before.items():
            for each in names:
                self._after.setdefault(each, []).append(name)
        self._started: set[str] = set()
        self._ended: list[tuple[float, str]] = []
        """Nodes without an engine, by their end."""
        self._engines = {
            each.engine: _Engine(max_sequences.get(each.engine, math.inf))
            for each in work.values()
            if each.engine is not None
        }
        self._next: list[tuple[float, str]] = []
        """Times at which an engine may have something that ends; old entries are ignored."""
        self._end_s = 0.0

    def run(self) -> float:
        """Return the end of the last node if every node starts as soon as it is ready.

        A prompt may wait for a node that reads one of its outputs. Of such a cycle, the node that
        is first in `work` starts without waiting for the others.
        """
        for name in self._work:
            if not self._num_open[name]:
                self._start(name, 0.0)
        waiting = iter(self._work)
        while True:
            if self._ended and (not self._next or self._ended[0] <= self._next[0]):
                at_s, name = heapq.heappop(self._ended)
                self._finish(name, at_s)
            elif self._next:
                at_s, engine = heapq.heappop(self._next)
                self._run_engine(engine, at_s)
            elif len(self._started) < len(self._work):
                stuck = next(name for name in waiting if name not in self._started)
                self._start(stuck, self._end_s)
            else:
                return self._end_s

    def _start(self, name: str, now_s: float) -> None:
        if name in self._started:
            return
        self._started.add(name)
        node = self._work[name]
        if node.engine is None:
            heapq.heappush(self._ended, (now_s + node.own_s, name))
            return
        engine = self._engines[node.engine]
        engine.advance(now_s)
        engine.prompts.append(name)
        self._schedule(node.engine)

    def _run_engine(self, key: str, now_s: float) -> None:
        engine = self._engines[key]
        if engine.next_s() != now_s:
            return
        engine.advance(now_s)
        if engine.filling is not None:
            name, engine.filling = engine.filling, None
            end_s = engine.decoded_s + self._work[name].own_s
            heapq.heappush(engine.outputs, (end_s, name))
        else:
            self._finish(heapq.heappop(engine.outputs)[1], now_s)
        self._schedule(key)

    def _schedule(self, key: str) -> None:
        """Start the next prompt of an engine that fills none, and note when something ends."""
        engine = self._engines[key]
        if engine.can_fill:
            engine.filling = engine.prompts.popleft()
            engine.fill_ends_s = engine.now_s + self._work[engine.filling].fill_s
        at_s = engine.next_s()
        if at_s is not None:
            heapq.heappush(self._next, (at_s, key))

    def _finish(self, name: str, now_s: float) -> None:
        self._end_s = max(self._end_s, now_s)
        for later in self._after.get(name, ()):
            self._num_open[later] -= 1
            if not self._num_open[later]:
                self._start(later, now_s)
