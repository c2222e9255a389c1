"""What a program cost: sums over its nodes, its critical path, and the same calls sent singly;
and what many programs cost together.

Pure: from an execution that has ended to a Receipt, from sums on disk to a UsageReport.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from ..program.ir import Generate
from ..program.status import (
    OutputTokens,
    Receipt,
    ReceiptPromptTokens,
    Receipts,
    SharedTokens,
    SingleRequests,
    UsageReport,
)
from ..store.records import UsageRecord
from .execution import Execution, NodeState, Usage


def receipt(execution: Execution, *, blocks_held: int) -> Receipt:
    """Sum up a program that has ended.

    Args:
        execution: the program; its `finished_at` is set.
        blocks_held: contexts that it has not given up, each of a block at least; 0 unless
            something leaked.
    """
    assert execution.finished_at is not None
    # Also of calls that never started: their prompts may have been begun.
    states = [state for state in execution.nodes.values() if isinstance(state.node, Generate)]
    usages = [state.usage for state in states]
    num_calls = sum(state.started_at is not None for state in states)
    prompts = [explain(usage) for usage in usages]
    path = critical_path(execution)
    logical = sum(prompt.logical for prompt in prompts)
    return Receipt(
        calls=num_calls,
        prompt_tokens=ReceiptPromptTokens(
            logical=logical,
            computed=sum(prompt.computed for prompt in prompts),
            shared=SharedTokens(
                static=sum(prompt.static for prompt in prompts),
                dynamic=sum(prompt.dynamic for prompt in prompts),
                generated=sum(prompt.generated for prompt in prompts),
                cache=sum(prompt.cached for prompt in prompts),
            ),
            recomputed=sum(prompt.recomputed for prompt in prompts),
            discarded=sum(usage.prompt_discarded for usage in usages),
        ),
        output_tokens=OutputTokens(
            decoded=sum(usage.decoded for usage in usages),
            forced=sum(usage.forced for usage in usages),
            discarded=sum(usage.discarded for usage in usages),
        ),
        retokenized=sum(usage.retokenized for usage in usages),
        round_trips_saved=max(0, num_calls - 1),
        wall_s=execution.finished_at - execution.created_at,
        critical_path=[state.node.id for state in path],
        critical_path_s=_covered_s(path),
        as_single_requests=SingleRequests(
            prompt_tokens=logical, estimated_s=_single_requests_s(execution)
        ),
        kv_block_seconds=sum(usage.block_seconds for usage in usages),
        blocks_held=blocks_held,
    )


def usage_report(
    records: Iterable[UsageRecord], *, since: str | None, until: str | None
) -> UsageReport:
    """Put sums of receipts back into the shape of a receipt, over programs of every status."""
    programs: dict[str, int] = {}
    sums: dict[str, Any] = {}
    for record in records:
        if record.name == "programs":
            programs[record.status] = int(record.amount)
            continue
        *above, name = record.name.split(".")
        part = sums
        for each in above:
            part = part.setdefault(each, {})
        part[name] = part.get(name, 0) + record.amount
    receipts = msgspec.convert(sums, Receipts)
    return UsageReport(since=since, until=until, programs=programs, receipts=receipts)


class Prompt(NamedTuple):
    """Where the tokens of a node's prompts came from: `logical` is the sum up to `cached`."""

    logical: int
    computed: int
    static: int
    dynamic: int
    generated: int
    cached: int
    recomputed: int


def explain(usage: Usage) -> Prompt:
    """Explain every shared token by the first cause that fits: cache, program text, what a
    model wrote, and else a value that several calls start with.

    A prefix that a call filled for others and then again for itself is computed once. What an
    output finds in its own context (`again`) is apart, for its causes are known.
    """
    computed = min(usage.computed, usage.logical)
    shared = usage.logical - computed
    cached = min(usage.cached, shared)
    again = min(usage.again, shared - cached)
    first = shared - cached - again
    static = min(first, max(0, usage.constant - cached))
    generated = min(first - static, usage.written)
    again_static = min(again, usage.again_constant)
    static += again_static
    generated += min(again - again_static, usage.again_written)
    return Prompt(
        logical=usage.logical,
        computed=computed,
        static=static,
        dynamic=shared - cached - static - generated,
        generated=generated,
        cached=cached,
        recomputed=usage.recomputed + usage.computed - computed,
    )


def critical_path(execution: Execution) -> list[NodeState]:
    """The chain of nodes that decided when the program ended, first node first.

    Walks back from the node that finished last; its predecessor is the one, among those it
    waited for, that finished last.
    """
    ended = [state for state in execution.nodes.values() if _took_part(state)]
    path: list[NodeState] = []
    seen: set[str] = set()  # a prompt may wait for a step that waits for one of its outputs
    state = max(ended, key=_finish, default=None)
    while state is not None and state.node.id not in seen:
        path.append(state)
        seen.add(state.node.id)
        state = max(filter(_took_part, _waited_for(execution, state)), key=_finish, default=None)
    return path[::-1]


def _waited_for(execution: Execution, state: NodeState) -> list[NodeState]:
    """What a node read or came after; what is in its bodies; and for what is in a body, what the
    nodes around it were entered with.
    """
    graph = execution.graph
    node_id = state.node.id
    around: list[str] = []
    place = graph.place(node_id)
    while place is not None:
        around.append(place.control)
        place = graph.place(place.control)
    names = set(state.node.after)
    names.update(child for part in graph.parts(node_id).values() for child in part)
    slots = [*graph.slots[node_id], *(graph.slots[control][0] for control in around)]
    for variable in {name for slot in slots for name in slot.reads}:
        producer = graph.get_producer(variable)
        if producer is not None:
            names.add(producer.node)
    return [execution.nodes[name] for name in names - {node_id, *around}]


def _took_part(state: NodeState) -> bool:
    return state.started_at is not None and state.finished_at is not None


def _finish(state: NodeState) -> float:
    return state.finished_at or 0.0


def _covered_s(path: list[NodeState]) -> float:
    """Seconds in which something on the path ran; what overlaps counts once."""
    total, end = 0.0, 0.0
    for state in sorted(path, key=lambda state: state.started_at or 0.0):
        total += max(0.0, _finish(state) - max(state.started_at or 0.0, end))
        end = max(end, _finish(state))
    return total


def _single_requests_s(execution: Execution) -> float:
    """The same calls one after another on a server that shares nothing.

    Every prompt token is priced at the fastest rate at which any of the calls was filled, which
    is the rate of a long prompt: what a few leftover tokens took is mostly the fixed cost of a
    step. Decoding is taken as measured, although a batch slows each of its members down.
    """
    usages = [state.usage for state in execution.nodes.values()]
    rates = [
        usage.prefill_s / computed for usage in usages if (computed := explain(usage).computed)
    ]
    per_token_s = min(rates, default=0.0)
    return sum(usage.logical * per_token_s + usage.decode_s for usage in usages)
