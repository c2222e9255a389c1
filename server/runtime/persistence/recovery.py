"""Recovery of programs from the journal after the server was stopped or killed.

Appends, committed values and ends of nodes are replayed onto a new `ProgramState`. A node whose
values are committed never runs again; every other node runs as if its inputs had just arrived.
"""

from __future__ import annotations

import msgspec

from ...program.decoding.typed_json import decode_record
from ...program.graph.graph import graph_of
from ...program.ir import Submission
from ...program.nodes.control.base import NodeWithBodies
from ...program.status import Phase, Problem
from ...store.journal import StoredProgram
from ..node_registry import node_executors
from ..node_state import MissingValue, NodeState
from ..program_state import ProgramState
from ..program_watch import QUARANTINED
from ..timers import start_jobs, start_timed_node
from .journaled_events import (
    ExpansionHistory,
    JournaledEvent,
    ProgramStop,
    RecoveredState,
    decode_event,
)
from .stored_appends import decode_append

_END_PHASES: dict[str, Phase] = {
    "node.failed": "failed",
    "node.skipped": "skipped",
    "node.killed": "killed",
}

_STOP_PHASES: dict[str, Phase] = {
    "program.cancelled": "cancelled",
    "program.deadline_exceeded": "deadline_exceeded",
    "program.idle": "cancelled",
    "program.lease_lost": "cancelled",
    QUARANTINED: "failed",
}
"""Codes with which a program stops, and kills its nodes."""


def restore(stored: StoredProgram, *, shift_s: float = 0.0) -> tuple[ProgramState, RecoveredState]:
    """Rebuild a program that had not ended. The returned state is not started yet.

    Args:
        stored: the program.
        shift_s: how far the clock was set forward since its times were written.
    """
    created_at = stored.created_at + shift_s
    submission = decode_record(stored.body, Submission)
    graph = graph_of(submission)
    state = ProgramState(
        stored.id,
        stored.tenant,
        graph,
        submission.inputs,
        submission.options,
        name=submission.program.name,
        is_open=submission.open,
        created_at=created_at,
    )
    for body in stored.appends:
        state.append(decode_append(body))
    recovered = RecoveredState()
    for record in stored.values:
        state.commit(record.variable, msgspec.json.decode(record.value))
        if record.token_ids is not None:
            recovered.outputs[record.variable] = record
    replay_expansions(state, ExpansionHistory.of(stored.events))
    for record in stored.values:
        if graph.get_producer(record.variable) is None:
            graph.mark_provided(record.variable)
    ended = _replay_events(stored, state, recovered, shift_s)
    _restore_absent_outputs(state)
    recovered.stop = _find_stop(state, ended)
    for node_id, node_state in state.nodes.items():
        _complete_committed_slots(state, node_id, node_state, at=created_at)
    _end_bodies(state, at=created_at)
    recovered.started = {n for n in recovered.started if not state.nodes[n].has_ended}
    return state, recovered


def replay_expansions(state: ProgramState, history: ExpansionHistory) -> None:
    """Expand bodies as before the restart, according to the committed decisions."""
    new = list(state.nodes)
    while new:
        num_known = len(state.nodes)
        for node_id in new:
            node = state.graph.nodes[node_id]
            node_executors()[type(node)].replay(state, node, history)
        new = list(state.nodes)[num_known:]


def _replay_events(
    stored: StoredProgram, state: ProgramState, recovered: RecoveredState, shift_s: float
) -> list[str]:
    """Replay events in their order; return the nodes that ended."""
    ended: list[str] = []
    begun: set[str] = set()
    for record in stored.events:
        event = decode_event(record)
        if record.type == "client.requested":
            recovered.requested.add(event.request_id)
        elif record.type == "variable.committed" and event.truncated:
            state.truncated.add(event.variable)
        elif record.type == "objective.missed":
            state.missed_deadlines.add(event.variable)
        elif record.type == "variable.failed":
            problem = Problem(code=event.code, message=event.message, cause=event.cause)
            state.graph.mark_provided(event.variable)
            state.mark_missing(event.variable, MissingValue("failed", problem))
        node_id = event.node
        if node_id is None or node_id not in state.nodes:
            continue
        node_state = state.nodes[node_id]
        node_state.attempt = max(node_state.attempt, event.attempt)
        node_state.num_retries += event.retry
        is_end = record.type == "node.finished" or record.type in _END_PHASES
        began_at = event.started_at if is_end else record.at
        if began_at is not None:
            begun.add(node_id)
            start_jobs(state, node_state.node, began_at + shift_s)
            start_timed_node(state, node_state.node, began_at + shift_s)
        if record.type == "node.started":
            # A node without a queue continues to wait; it is not started again.
            if not node_executors()[type(node_state.node)].starts_running:
                recovered.started.add(node_id)
            node_state.why = event.why
        elif is_end and not node_state.has_ended:
            _restore_usage(node_state, event, shift_s)
            _replay_end(state, node_id, record.type, event, at=record.at + shift_s)
            ended.append(node_id)
    if state.readiness.demanded_nodes is not None:
        state.readiness.demand_nodes(begun)
    return ended


def _replay_end(
    state: ProgramState, node_id: str, event_type: str, event: JournaledEvent, *, at: float
) -> None:
    if event_type in _END_PHASES:
        problem = Problem(code=event.code, message=event.message, cause=event.cause)
        state.end(node_id, _END_PHASES[event_type], problem, at=at)
        return
    for slot in state.graph.slots[node_id]:
        state.finish_slot(node_id, slot.index, at=at)


def _restore_absent_outputs(state: ProgramState) -> None:
    """Mark the outputs of bodies as missing that no body gave. No event reports them."""
    graph = state.graph
    pending = dict.fromkeys(graph.nodes)
    # In rounds, so that a node is asked once for all that its body lacks since the last round.
    while pending:
        affected: dict[str, None] = {}
        for node in map(graph.nodes.__getitem__, pending):
            if not isinstance(node, NodeWithBodies):
                continue
            absent = node_executors()[type(node)].absent_outputs(state, node)
            for name, missing in absent.items():
                if state.is_resolved(name):
                    continue
                state.mark_missing(name, missing)
                readers = (*graph.get_consumers(name), *graph.get_potential_readers(name))
                affected |= dict.fromkeys(slot.node for slot in readers)
                if (body := graph.body_of(node.id)) is not None:
                    affected[body.control] = None
        pending = affected


def _find_stop(state: ProgramState, ended: list[str]) -> ProgramStop | None:
    """Return why the program was ending; None if it was not.

    The first nodes of a program that stops are durable before its end: it must not go on without
    them, or end as if nothing had happened.
    """
    outer = [state.nodes[node_id] for node_id in ended if state.graph.body_of(node_id) is None]
    stops = (_stop_of(state, node_state) for node_state in outer)
    return next((stop for stop in stops if stop is not None), None) or _stop_by_failure(outer)


def _stop_of(state: ProgramState, node_state: NodeState) -> ProgramStop | None:
    """Return the stop of the program that ended a node, or that its failure caused."""
    problem = node_state.problem
    if problem is None:
        return None
    if node_state.phase == "failed":
        is_isolated = state.isolates(node_state.node.id) or _has_read_failure(state, node_state)
        return None if is_isolated else ProgramStop("failed", problem)
    stop_phase = _STOP_PHASES.get(problem.code) if node_state.phase == "killed" else None
    return None if stop_phase is None else ProgramStop(stop_phase, problem)


def _stop_by_failure(nodes: list[NodeState]) -> ProgramStop | None:
    """Return the failure for which the program killed its other nodes; None if it killed none.

    `_stop_of` takes a node that fails with a failure it has read for a reader. Nodes that were
    killed for this failure show that it stopped the program.
    """
    failures = [each.problem for each in nodes if each.phase == "failed"]
    killed = (each.problem for each in nodes if each.phase == "killed")
    problem = next((each for each in killed if each is not None and each in failures), None)
    return None if problem is None else ProgramStop("failed", problem)


def _has_read_failure(state: ProgramState, node_state: NodeState) -> bool:
    """Whether a node only passed on the failure of a value that it reads."""
    node = node_state.node
    slots = state.graph.slots[node.id]
    if isinstance(node, NodeWithBodies):
        slots = slots[:1]  # a failure that a body gave to its node is the node's own
    failures = (state.missing_values.get(name) for slot in slots for name in slot.reads)
    problem = node_state.problem
    return problem is not None and any(
        each is not None
        and each.phase == "failed"
        and (each.problem.code, each.problem.message) == (problem.code, problem.message)
        for each in failures
    )


def _complete_committed_slots(
    state: ProgramState, node_id: str, node_state: NodeState, *, at: float
) -> None:
    """Complete the slots of a node whose variables are all committed."""
    executor = node_executors()[type(node_state.node)]
    for slot in state.graph.slots[node_id]:
        is_committed = bool(slot.writes) and all(name in state.values for name in slot.writes)
        if not is_committed or node_state.has_ended or node_state.slots_done != slot.index:
            return
        if not executor.is_slot_complete(state, node_state.node, slot.index):
            return
        state.finish_slot(node_id, slot.index, at=at)


def _end_bodies(state: ProgramState, *, at: float) -> None:
    """End the nodes in the bodies of ended nodes, including instances that had not been added."""
    problem = Problem(code="node.killed", message="the node around it has ended")
    for node_id, node_state in list(state.nodes.items()):
        if node_state.has_ended:
            for inner in list(state.graph.descendants(node_id)):
                state.end(inner, "killed", problem, at=at)


def _restore_usage(node_state: NodeState, event: JournaledEvent, shift_s: float) -> None:
    """Restore the cost and the flags of a node in an earlier server process."""
    if event.started_at is not None:
        node_state.started_at = event.started_at + shift_s
    node_state.engine = event.engine
    node_state.prefix_break = event.prefix_break
    node_state.constraint_relaxed = event.constraint_relaxed
    if event.usage is not None:
        node_state.usage = event.usage
