"""The counterfactual of a receipt: the same calls as single requests of a parallel client.

The client sends each call when its inputs are ready, to the engine that ran it, without network and
without shared prefixes. An engine prefills one prompt after another and decodes all outputs at
once. Nodes without a model take as long as they took.

Estimates: every prompt token costs the fastest rate at which any call was filled, which is the rate
of a long prompt, because the time of a short fill is mostly the fixed cost of a step. Decoding
counts as measured, although prefills of others interrupt it and batching slows down each member.
"""

from __future__ import annotations

import heapq
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
    """Time after that, in parallel with all other nodes."""


def estimate_s(
    states: Sequence[NodeState],
    waited_for: Callable[[NodeState], Iterable[NodeState]],
    computed: Mapping[str, int],
) -> float:
    """Return the seconds from the start of the program to the end of its last node.

    Args:
        states: the nodes that have started and finished.
        waited_for: the nodes that a node waited for; others than `states` are ignored.
        computed: prompt tokens that were computed for each node.
    """
    known = {state.node.id for state in states}
    before = {
        state.node.id: [each for each in waited_for(state) if each.node.id in known]
        for state in states
    }
    rates = [
        state.usage.prefill_s / num_tokens
        for state in states
        if (num_tokens := computed[state.node.id])
    ]
    token_s = min(rates, default=0.0)
    work = {state.node.id: _work(state, before[state.node.id], token_s) for state in states}
    return _run(work, {name: {each.node.id for each in some} for name, some in before.items()})


def _work(state: NodeState, before: Iterable[NodeState], token_s: float) -> _Work:
    usage = state.usage
    if isinstance(state.node, GenerateNode):
        return _Work(state.engine, usage.logical * token_s, usage.decode_s)
    began = max((each.finished_at or 0.0 for each in before), default=0.0)
    began = max(began, state.started_at or 0.0)
    return _Work(None, 0.0, max((state.finished_at or 0.0) - began, 0.0))


def _run(work: Mapping[str, _Work], before: Mapping[str, set[str]]) -> float:
    """Return the end of the last node if every node starts as soon as it is ready.

    A prompt may wait for a node that reads one of its outputs. Of such a cycle, the node that is
    first in `work` starts without waiting for the others.
    """
    num_open = {name: len(names) for name, names in before.items()}
    after: dict[str, list[str]] = {name: [] for name in work}
    for name, names in before.items():
        for each in names:
            after[each].append(name)
    ready_s = dict.fromkeys(work, 0.0)
    ready = [(0.0, name) for name in work if not num_open[name]]
    heapq.heapify(ready)
    free_s: dict[str | None, float] = {}
    ended: set[str] = set()
    waiting = iter(work)
    end_s = 0.0
    while len(ended) < len(work):
        if not ready:
            stuck = next(name for name in waiting if name not in ended)
            ready.append((ready_s[stuck], stuck))
        at_s, name = heapq.heappop(ready)
        if name in ended:
            continue
        ended.add(name)
        node = work[name]
        if node.fill_s:
            at_s = max(at_s, free_s.get(node.engine, 0.0)) + node.fill_s
            free_s[node.engine] = at_s
        at_s += node.own_s
        end_s = max(end_s, at_s)
        for later in after[name]:
            num_open[later] -= 1
            ready_s[later] = max(ready_s[later], at_s)
            if not num_open[later]:
                heapq.heappush(ready, (ready_s[later], later))
    return end_s
