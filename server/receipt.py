"""What a program cost: sums over its nodes, its critical path, and the same calls sent singly.

Pure: from an execution that has ended to a Receipt.
"""

from __future__ import annotations

from .execution import Execution, NodeState
from .program.ir import Generate
from .program.status import (
    OutputTokens,
    Receipt,
    ReceiptPromptTokens,
    SharedTokens,
    SingleRequests,
)


def receipt(execution: Execution, *, blocks_held: int) -> Receipt:
    """Sum up a program that has ended.

    Args:
        execution: the program; its `finished_at` is set.
        blocks_held: KV blocks that its contexts still refer to, 0 unless something leaked.
    """
    assert execution.finished_at is not None
    calls = [
        state
        for state in execution.nodes.values()
        if isinstance(state.node, Generate) and state.started_at is not None
    ]
    usages = [state.usage for state in calls]
    path = critical_path(execution)
    logical = sum(usage.logical for usage in usages)
    return Receipt(
        calls=len(calls),
        prompt_tokens=ReceiptPromptTokens(
            logical=logical,
            computed=sum(usage.computed for usage in usages),
            shared=SharedTokens(
                static=sum(usage.static for usage in usages),
                dynamic=sum(usage.dynamic for usage in usages),
                generated=sum(usage.generated for usage in usages),
                cache=sum(usage.cached for usage in usages),
            ),
            recomputed=sum(usage.recomputed for usage in usages),
        ),
        output_tokens=OutputTokens(
            decoded=sum(usage.decoded for usage in usages),
            discarded=sum(usage.discarded for usage in usages),
        ),
        retokenized=sum(usage.retokenized for usage in usages),
        round_trips_saved=max(0, len(calls) - 1),
        wall_s=execution.finished_at - execution.created_at,
        critical_path=[state.node.id for state in path],
        critical_path_s=sum(map(_duration, path)),
        as_single_requests=SingleRequests(
            prompt_tokens=logical, estimated_s=_single_requests_s(execution)
        ),
        kv_block_seconds=sum(usage.block_seconds for usage in usages),
        blocks_held=blocks_held,
    )


def critical_path(execution: Execution) -> list[NodeState]:
    """The chain of nodes that decided when the program ended, first node first.

    Walks back from the node that finished last; its predecessor is the one, among those it
    waited for, that finished last.
    """
    ended = [state for state in execution.nodes.values() if _took_part(state)]
    path: list[NodeState] = []
    state = max(ended, key=_finish, default=None)
    while state is not None and state not in path:
        path.append(state)
        state = max(filter(_took_part, _waited_for(execution, state)), key=_finish, default=None)
    return path[::-1]


def _waited_for(execution: Execution, state: NodeState) -> list[NodeState]:
    graph = execution.graph
    names = set(state.node.after)
    for slot in graph.slots[state.node.id]:
        for variable in slot.reads:
            producer = graph.get_producer(variable)
            if producer is not None and producer.node != state.node.id:
                names.add(producer.node)
    return [execution.nodes[name] for name in names]


def _took_part(state: NodeState) -> bool:
    return state.started_at is not None and state.finished_at is not None


def _finish(state: NodeState) -> float:
    return state.finished_at or 0.0


def _duration(state: NodeState) -> float:
    return (state.finished_at or 0.0) - (state.started_at or 0.0)


def _single_requests_s(execution: Execution) -> float:
    """The same calls one after another on a server that shares nothing.

    Prefill is scaled from what was computed to what would have been; decoding is taken as
    measured, although a batch slows each of its members down, so this errs on the slow side.
    """
    total = 0.0
    for state in execution.nodes.values():
        usage = state.usage
        scale = usage.logical / usage.computed if usage.computed else 1.0
        total += usage.prefill_s * scale + usage.decode_s
    return total
