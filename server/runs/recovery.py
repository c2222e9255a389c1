"""From the journal back to a running program, after the server was stopped or killed.

The past is replayed onto a fresh state machine in silence: appends, committed values, ends
of nodes. What has a committed value is done and never runs again; everything else runs as
if its inputs had just come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ..program.graph import Graph
from ..program.ir import Append, Json, Submission
from ..program.status import Phase, Problem
from ..store.journal import StoredProgram, ValueRecord
from .bodies import is_slot_over, regrow
from .execution import Absence, Execution, NodeState, Usage

_ENDS: dict[str, Phase] = {
    "node.failed": "failed",
    "node.skipped": "skipped",
    "node.killed": "killed",
}


@dataclass(slots=True)
class Past:
    """What a program brings along from before the restart."""

    outputs: dict[str, ValueRecord] = field(default_factory=dict)
    """Committed outputs of calls, with their ids: a growing prompt continues behind them."""
    asked: set[str] = field(default_factory=set)
    """Request ids that clients have seen."""
    started: set[str] = field(default_factory=set)
    """Nodes that ran and did not end."""


def restore(stored: StoredProgram) -> tuple[Execution, Past]:
    """Rebuild a program that had not ended. Its `start` was not called yet."""
    submission = msgspec.json.decode(stored.body, type=Submission)
    graph = Graph.build(
        submission.program,
        submission.inputs,
        open=submission.open,
        objectives=submission.objectives,
    )
    execution = Execution(
        stored.id,
        stored.tenant,
        graph,
        submission.inputs,
        submission.options,
        name=submission.program.name,
        is_open=submission.open,
        created_at=stored.created_at,
    )
    for body in stored.appends:
        execution.append(msgspec.json.decode(body, type=Append))
    past = Past()
    for record in stored.values:
        execution.commit(record.variable, msgspec.json.decode(record.value))
        if record.token_ids is not None:
            past.outputs[record.variable] = record
    regrow(execution, stored.events)
    for record in stored.values:
        if graph.get_producer(record.variable) is None:
            graph.give(record.variable)
    _replay(stored, execution, past)
    for node_id, state in execution.nodes.items():
        for slot in graph.slots[node_id]:
            written = bool(slot.writes) and all(v in execution.values for v in slot.writes)
            if not written or state.has_ended or state.slots_done != slot.index:
                break
            if not is_slot_over(execution, node_id, slot.index):
                break
            execution.finish_slot(node_id, slot.index, at=stored.created_at)
    _end_bodies(execution, at=stored.created_at)
    past.started = {n for n in past.started if not execution.nodes[n].has_ended}
    return execution, past


def _replay(stored: StoredProgram, execution: Execution, past: Past) -> None:
    for event in stored.events:
        data: dict[str, Json] = msgspec.json.decode(event.data)
        if event.type == "client.requested":
            past.asked.add(data["request_id"])
        elif event.type == "variable.failed":
            problem = Problem(code=data["code"], message=data["message"])
            execution.graph.give(data["variable"])
            execution.lose(data["variable"], Absence("failed", problem))
        node_id = data.get("node")
        if node_id not in execution.nodes:
            continue
        state = execution.nodes[node_id]
        if execution.wanted is not None:
            execution.wanted.add(node_id)
        if "attempt" in data:
            state.attempt = max(state.attempt, data["attempt"])
        state.num_retries += "retry" in data
        if event.type == "node.started":
            past.started.add(node_id)
        elif event.type == "node.finished" and not state.has_ended:
            _restore_account(state, data)
            for slot in execution.graph.slots[node_id]:
                execution.finish_slot(node_id, slot.index, at=event.at)
        elif event.type in _ENDS:
            _restore_account(state, data)
            problem = Problem(code=data["code"], message=data["message"])
            execution.end(node_id, _ENDS[event.type], problem, at=event.at)


def _end_bodies(execution: Execution, *, at: float) -> None:
    """What stands in a body has ended with its node; an item may not even have come."""
    problem = Problem(code="node.killed", message="the node around it has ended")
    for node_id, state in list(execution.nodes.items()):
        if state.has_ended:
            for inner in list(execution.graph.inside(node_id)):
                execution.end(inner, "killed", problem, at=at)


def _restore_account(state: NodeState, data: dict[str, Json]) -> None:
    """What a node cost in an earlier life, for the receipt."""
    state.started_at = data.get("started_at")
    state.engine = data.get("engine")
    if "usage" in data:
        state.usage = msgspec.convert(data["usage"], Usage)
