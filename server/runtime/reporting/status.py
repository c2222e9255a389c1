"""The status records of programs, from their live or their stored state.

Pure functions. A value is shown only if it is durable.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TypeVar, cast

import msgspec
from msgspec import UNSET, Struct

from ...program.decoding.typed_json import decode_record
from ...program.errors import ProgramError
from ...program.ir import Append, GenerateNode, Json
from ...program.slot import Slot
from ...program.status import (
    ENDED,
    NodeStatus,
    OutputTokens,
    Phase,
    Problem,
    ProgramStatus,
    PromptTokens,
    Receipt,
    VariableStatus,
)
from ...store.journal import EndRecord, StoredProgram, ValueRecord
from ..clock import format_timestamp
from ..node_state import NodeState
from ..persistence.stored_appends import decode_append
from ..program_state import ProgramState, check_same_append
from .receipt import explain

T = TypeVar("T")


def node_status(state: NodeState) -> NodeStatus:
    """Return the status of a node."""
    node = state.node
    status = NodeStatus(
        status=state.phase,
        op=node.op(),
        engine=state.engine,
        why=state.why,
        attempt=state.attempt,
        prefix_break=state.prefix_break,
        constraint_relaxed=state.constraint_relaxed,
        error=UNSET if state.problem is None else state.problem,
        meta=UNSET if node.meta is None else node.meta,
    )
    return _with_usage(status, state) if isinstance(node, GenerateNode) else status


def _with_usage(status: NodeStatus, state: NodeState) -> NodeStatus:
    usage = state.usage
    prompt = explain(usage)
    return msgspec.structs.replace(
        status,
        queued_s=usage.queued_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
        prompt_tokens=PromptTokens(
            logical=prompt.logical,
            computed=prompt.computed,
            shared=prompt.logical - prompt.computed,
        ),
        output_tokens=OutputTokens(
            decoded=usage.decoded, forced=usage.forced, discarded=usage.discarded
        ),
    )


def variable_status(
    program: ProgramState, durable: Container[str], variable: str, *, is_ended: bool
) -> VariableStatus:
    """Return the status of a variable. A value that is not durable counts as running.

    Args:
        program: the program.
        durable: variables whose value, or the lack of it, is durable.
        variable: name of the variable.
        is_ended: whether the end of the program is durable.
    """
    is_late = variable in program.missed_deadlines
    if variable in durable:
        if variable in program.values:
            return VariableStatus(
                name=variable,
                status="done",
                value=program.values[variable],
                truncated=variable in program.truncated,
                deadline_missed=is_late,
            )
        missing = program.missing_values[variable]
        return VariableStatus(
            name=variable, status=missing.phase, deadline_missed=is_late, error=missing.problem
        )
    if is_ended:
        return _never_set(variable, program.problem, is_late=is_late)
    phase = program.phase_of(variable)
    shown: Phase = "running" if phase in ENDED else phase
    return VariableStatus(name=variable, status=shown, deadline_missed=is_late)


def program_status(
    program: ProgramState,
    durable: Container[str],
    receipt: Receipt | None,
    *,
    names: Iterable[str] | None = None,
    nodes: Iterable[str] | None = None,
) -> ProgramStatus:
    """Return the status of a program that is live or in memory.

    Args:
        program: the program.
        durable: variables whose value, or the lack of it, is durable.
        receipt: None until the end of the program is durable.
        names: the variables to show; None: all.
        nodes: the nodes to show; None: all.
    """
    names = program.variable_names() if names is None else names
    nodes = program.nodes if nodes is None else nodes
    is_ended = receipt is not None
    finished_at = program.finished_at if is_ended else None
    return ProgramStatus(
        id=program.id,
        name=program.name,
        status=program.phase if is_ended else _visible_phase(program),
        created_at=format_timestamp(program.created_at),
        finished_at=None if finished_at is None else format_timestamp(finished_at),
        outputs=list(program.graph.outputs),
        variables={
            name: variable_status(program, durable, name, is_ended=is_ended) for name in names
        },
        nodes={node_id: node_status(program.nodes[node_id]) for node_id in nodes},
        receipt=UNSET if receipt is None else receipt,
        error=UNSET if program.problem is None or not is_ended else program.problem,
    )


def append_status(
    program: ProgramState, durable: Container[str], receipt: Receipt | None, append: Append
) -> ProgramStatus:
    """Return the status of a program, with only the nodes and variables that an append added."""
    nodes = [node.id for node in append.nodes]
    names = _added_variables(append, (program.graph.slots[node_id] for node_id in nodes))
    return program_status(program, durable, receipt, names=names, nodes=nodes)


def _added_variables(append: Append, slots: Iterable[tuple[Slot, ...]]) -> list[str]:
    """Return the variables that an append declares, provides or produces, each once.

    Args:
        append: the append as the client sent it.
        slots: those of each of its nodes.
    """
    written = (variable for some in slots for slot in some for variable in slot.writes)
    return list(dict.fromkeys((*append.variables, *append.inputs, *written)))


class StoredSnapshot(Struct, frozen=True, kw_only=True):
    """The state of an ended program besides its values, stored in `EndRecord.nodes`."""

    nodes: msgspec.Raw
    """The `NodeStatus` of each node, by its id."""
    absences: dict[str, VariableStatus]
    """Variables without a value. The journal has a record for each of the others."""
    outputs: list[str]


class _Absences(Struct, frozen=True):
    """The part of a `StoredSnapshot` that one variable is read from."""

    absences: dict[str, msgspec.Raw]


class _Program(Struct, frozen=True):
    name: str = ""
    outputs: list[str] = []


class _AppendedNode(Struct, frozen=True):
    id: str = ""


class _Body(Struct, frozen=True):
    """The parts of a stored submission or append that a status shows.

    Decoded without the checks of a submission, so that programs of older versions can be shown.
    """

    program: _Program = _Program()
    inputs: dict[str, Json] = {}
    nodes: list[_AppendedNode] = []
    """Of an append."""
    request_id: str | None = None


class _StoredNode(Struct, frozen=True):
    id: str = ""
    op: str = ""
    meta: Json = None


class _StoredNodes(Struct, frozen=True):
    nodes: list[_StoredNode] = []


class _BodyNodes(Struct, frozen=True):
    """The nodes of a stored submission or append."""

    program: _StoredNodes = _StoredNodes()
    nodes: list[_StoredNode] = []


class _NodeEvent(Struct, frozen=True):
    node: str = ""


def _decode_body(body: bytes) -> _Body:
    try:
        return decode_record(body, _Body)
    except msgspec.DecodeError:
        return _Body()


def stored_append_status(stored: StoredProgram, append: Append) -> ProgramStatus | None:
    """Return the status of an ended program, with only the nodes and variables that an append
    added; None if the program has not applied the append.

    Raises:
        ConflictError: `idempotency.conflict` if it applied another one with its request id.
    """
    body = _find_append(stored, append)
    if body is None:
        return None
    status = stored_status(stored)
    try:  # the stored append has the nodes of the procedures that it calls
        slots = [node.make_slots() for node in decode_append(body).nodes]
    except (msgspec.DecodeError, ProgramError):  # of another version of the server
        slots = []
    return msgspec.structs.replace(
        status,
        nodes=_only(status.nodes, (node.id for node in append.nodes)),
        variables=_only(status.variables, _added_variables(append, slots)),
    )


def _find_append(stored: StoredProgram, append: Append) -> bytes | None:
    """Return the stored form of an append, by its request id."""
    if append.request_id is None:
        return None
    for body in stored.appends:
        found = _decode_body(body)
        if found.request_id == append.request_id:
            check_same_append(stored.id, [node.id for node in found.nodes], append)
            return body
    return None


def _only(records: dict[str, T], names: Iterable[str]) -> dict[str, T]:
    return {name: records[name] for name in names if name in records}


def unrecoverable_end(stored: StoredProgram, problem: Problem, *, at: float) -> EndRecord:
    """Return the end of a program that cannot be recovered from its stored state."""
    outputs = _decode_body(stored.body).program.outputs
    known = {record.variable for record in stored.values} | _given_inputs(stored).keys()
    last = StoredSnapshot(
        nodes=msgspec.Raw(msgspec.json.encode(_unrecoverable_nodes(stored, problem))),
        absences={
            name: VariableStatus(name=name, status="failed", error=problem)
            for name in outputs
            if name not in known
        },
        outputs=outputs,
    )
    return EndRecord(
        program=stored.id,
        status="failed",
        finished_at=at,
        receipt=msgspec.json.encode(Receipt()),
        error=msgspec.json.encode(problem),
        nodes=msgspec.json.encode(last),
    )


def _unrecoverable_nodes(stored: StoredProgram, problem: Problem) -> dict[str, NodeStatus]:
    """Return the nodes that a client sent: those that have not finished failed with the program."""
    ends = (record.data for record in stored.events if record.type == "node.finished")
    try:
        finished = {decode_record(data, _NodeEvent).node for data in ends}
        bodies = [decode_record(body, _BodyNodes) for body in (stored.body, *stored.appends)]
    except msgspec.DecodeError:
        return {}
    nodes = [node for body in bodies for node in (*body.program.nodes, *body.nodes)]
    return {
        node.id: NodeStatus(
            status="done" if node.id in finished else "failed",
            op=node.op,
            error=UNSET if node.id in finished else problem,
            meta=UNSET if node.meta is None else node.meta,
        )
        for node in nodes
    }


def stored_status(stored: StoredProgram, nodes: Iterable[str] | None = None) -> ProgramStatus:
    """Return the status of an ended program from the journal.

    Args:
        stored: the program.
        nodes: ids of the nodes to show, without variables; None: all nodes and variables.
    """
    snapshot = stored_snapshot(stored)
    head = stored_head(stored, snapshot)
    if nodes is not None:
        found = decode_record(snapshot.nodes, dict[str, msgspec.Raw])
        shown = {each: decode_record(found[each], NodeStatus) for each in nodes if each in found}
        return msgspec.structs.replace(head, nodes=shown)
    return msgspec.structs.replace(
        head,
        variables=dict(stored_variables(stored)) | snapshot.absences,
        nodes=decode_record(snapshot.nodes, dict[str, NodeStatus]),
    )


def stored_snapshot(stored: StoredProgram) -> StoredSnapshot:
    """Return the state of an ended program besides its values."""
    assert stored.end is not None
    return decode_record(stored.end.nodes, StoredSnapshot)


def stored_head(stored: StoredProgram, snapshot: StoredSnapshot) -> ProgramStatus:
    """Return the status of an ended program without its variables and nodes."""
    end = stored.end
    assert end is not None
    problem = None if end.error is None else decode_record(end.error, Problem)
    return ProgramStatus(
        id=stored.id,
        name=_decode_body(stored.body).program.name,
        status=cast(Phase, end.status),  # written from a Phase
        created_at=format_timestamp(stored.created_at),
        finished_at=format_timestamp(end.finished_at),
        outputs=snapshot.outputs,
        receipt=decode_record(end.receipt, Receipt),
        error=UNSET if problem is None else problem,
    )


def stored_variables(
    stored: StoredProgram, *, only: str | None = None
) -> Iterator[tuple[str, VariableStatus]]:
    """Iterate over the variables of an ended program that have a value, in order.

    Args:
        stored: the program.
        only: the variable to return, if it has a value; None: all.
    """
    assert stored.end is not None
    receipt = decode_record(stored.end.receipt, Receipt)
    truncated, late = frozenset(receipt.truncated), frozenset(receipt.deadlines_missed)
    given = _given_inputs(stored)
    records = {record.variable: record.value for record in stored.values}
    for name in (given | records) if only is None else {only} & (given.keys() | records.keys()):
        value = msgspec.json.decode(records[name]) if name in records else given[name]
        yield (name, _done(name, value, truncated, late))


def _done(
    name: str, value: Json, truncated: Container[str], late: Container[str]
) -> VariableStatus:
    return VariableStatus(
        name=name,
        status="done",
        value=value,
        truncated=name in truncated,
        deadline_missed=name in late,
    )


def _given_inputs(stored: StoredProgram) -> dict[str, Json]:
    """Return the inputs that a submission and its appends contain."""
    given: dict[str, Json] = {}
    for body in (stored.body, *stored.appends):
        given |= _decode_body(body).inputs
    return given


def stored_variable(stored: StoredProgram, name: str) -> VariableStatus | None:
    """Return a variable of an ended program from the journal; None if there is none."""
    found = dict(stored_variables(stored, only=name))
    return found.get(name) or stored_snapshot(stored).absences.get(name)


def committed_variable(
    end: EndRecord, record: ValueRecord | None, name: str
) -> VariableStatus | None:
    """Return a variable of an ended program by its value, or by the lack of it that the end states.

    None for an input of the submission or of an append, and if there is no such variable.
    """
    if record is not None:
        receipt = decode_record(end.receipt, Receipt)
        value = msgspec.json.decode(record.value)
        return _done(name, value, receipt.truncated, receipt.deadlines_missed)
    absence = decode_record(end.nodes, _Absences).absences.get(name)
    return None if absence is None else decode_record(absence, VariableStatus)


def _never_set(variable: str, problem: Problem | None, *, is_late: bool) -> VariableStatus:
    message = f"the program ended before {variable} had a value"
    return VariableStatus(
        name=variable,
        status="cancelled",
        deadline_missed=is_late,
        error=problem or Problem(code="variable.never_set", message=message),
    )


def _visible_phase(program: ProgramState) -> Phase:
    """Return the phase to show until the end of the program is durable."""
    return "running" if program.finished_at is not None else program.phase
