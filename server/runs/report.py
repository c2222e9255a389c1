"""How a program looks from outside: the wire records of its live or stored state.

Pure: from an execution, or from what the journal kept of one, to the records of
`program.status`. A value is shown only if the journal has it.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec
from msgspec import UNSET, Struct

from ..program.ir import Append, Generate, Json
from ..program.status import (
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
from ..store.journal import EndRecord, StoredProgram
from .execution import Execution, NodeState
from .outbox import iso
from .receipt import explain


def node_status(state: NodeState) -> NodeStatus:
    """One node."""
    node, usage = state.node, state.usage
    prompt = explain(usage)
    is_call = isinstance(node, Generate)
    return NodeStatus(
        status=state.phase,
        op=str(node.__struct_config__.tag),
        engine=state.engine,
        why=state.why,
        attempt=state.attempt,
        queued_s=usage.queued_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
        prompt_tokens=PromptTokens(
            logical=prompt.logical,
            computed=prompt.computed,
            shared=prompt.logical - prompt.computed,
        )
        if is_call
        else UNSET,
        output_tokens=OutputTokens(
            decoded=usage.decoded, forced=usage.forced, discarded=usage.discarded
        )
        if is_call
        else UNSET,
        prefix_break=state.prefix_break,
        constraint_relaxed=state.constraint_relaxed,
        error=UNSET if state.problem is None else state.problem,
        trace=list(state.trace) if state.trace else UNSET,
        meta=UNSET if node.meta is None else node.meta,
    )


def variable_status(
    execution: Execution, settled: Container[str], variable: str, *, is_ended: bool
) -> VariableStatus:
    """One variable of a program; what is not on disk yet still counts as running.

    Args:
        execution: the program.
        settled: variables whose value or absence is on disk.
        variable: one of the program's.
        is_ended: whether the end of the program is on disk.
    """
    if variable in settled:
        if variable in execution.values:
            return VariableStatus(name=variable, status="done", value=execution.values[variable])
        absence = execution.absences[variable]
        return VariableStatus(name=variable, status=absence.phase, error=absence.problem)
    if is_ended:
        return _never_came(variable, execution.problem)
    phase = execution.phase_of(variable)
    return VariableStatus(name=variable, status="running" if phase in ENDED else phase)


def program_status(
    execution: Execution,
    settled: Container[str],
    receipt: Receipt | None,
    *,
    only: Append | None = None,
) -> ProgramStatus:
    """A live program, or one that ended a moment ago.

    Args:
        execution: the program.
        settled: variables whose value or absence is on disk.
        receipt: None until the end of the program is on disk.
        only: tell no other nodes and variables than those that this added.
    """
    names, nodes = execution.variable_names(), list(execution.nodes)
    if only is not None:
        nodes = [node.id for node in only.nodes]
        names = _added_variables(execution, only)
    is_ended = receipt is not None
    finished_at = execution.finished_at if is_ended else None
    return ProgramStatus(
        id=execution.id,
        name=execution.name,
        status=execution.phase if is_ended else _while_ending(execution),
        created_at=iso(execution.created_at),
        finished_at=None if finished_at is None else iso(finished_at),
        outputs=list(execution.graph.outputs),
        variables={
            name: variable_status(execution, settled, name, is_ended=is_ended) for name in names
        },
        nodes={node_id: node_status(execution.nodes[node_id]) for node_id in nodes},
        receipt=UNSET if receipt is None else receipt,
        error=UNSET if execution.problem is None or not is_ended else execution.problem,
    )


def _added_variables(execution: Execution, append: Append) -> list[str]:
    """Variables that an append declared, gave or produces, each once."""
    written = (
        variable
        for node in append.nodes
        for slot in execution.graph.slots[node.id]
        for variable in slot.writes
    )
    return list(dict.fromkeys((*append.variables, *append.inputs, *written)))


class Ending(Struct, frozen=True, kw_only=True):
    """What the journal keeps of an ended program besides values: `EndRecord.nodes`."""

    nodes: dict[str, NodeStatus]
    absences: dict[str, VariableStatus]
    """Variables without a value; the others are in the journal one by one."""
    outputs: list[str]


def ending(execution: Execution) -> Ending:
    """Sum up a program that has just ended."""
    names = execution.variable_names()
    return Ending(
        nodes={node_id: node_status(state) for node_id, state in execution.nodes.items()},
        absences={
            name: variable_status(execution, execution.absences, name, is_ended=True)
            for name in names
            if name not in execution.values
        },
        outputs=list(execution.graph.outputs),
    )


class _Program(Struct, frozen=True):
    name: str = ""
    outputs: list[str] = []


class _Body(Struct, frozen=True):
    """What a submission or an append says about how its program looks.

    Read without bounds: what was written once is told, even if nothing can run it any more.
    """

    program: _Program = _Program()
    inputs: dict[str, Json] = {}


def _body(body: bytes) -> _Body:
    try:
        return msgspec.json.decode(body, type=_Body)
    except msgspec.DecodeError:
        return _Body()


def unreadable(stored: StoredProgram, problem: Problem, *, at: float) -> EndRecord:
    """The end of a program that cannot go on, because what is stored of it cannot be read."""
    outputs = _body(stored.body).program.outputs
    known = {record.variable for record in stored.values}
    last = Ending(
        nodes={},
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


def stored_status(stored: StoredProgram) -> ProgramStatus:
    """A program that ended, from the journal."""
    end = stored.end
    assert end is not None
    submission = _body(stored.body)
    problem = None if end.error is None else msgspec.json.decode(end.error, type=Problem)
    last = msgspec.json.decode(end.nodes, type=Ending)
    given = dict(submission.inputs)
    for body in stored.appends:
        given |= _body(body).inputs
    given |= {record.variable: msgspec.json.decode(record.value) for record in stored.values}
    values = {
        name: VariableStatus(name=name, status="done", value=value) for name, value in given.items()
    }
    return ProgramStatus(
        id=stored.id,
        name=submission.program.name,
        status=end.status,  # type: ignore[arg-type]  # written from a Phase
        created_at=iso(stored.created_at),
        finished_at=iso(end.finished_at),
        outputs=last.outputs,
        variables=values | last.absences,
        nodes=last.nodes,
        receipt=msgspec.json.decode(end.receipt, type=Receipt),
        error=UNSET if problem is None else problem,
    )


def _never_came(variable: str, problem: Problem | None) -> VariableStatus:
    message = f"the program ended before {variable} had a value"
    return VariableStatus(
        name=variable,
        status="cancelled",
        error=problem or Problem(code="variable.never_set", message=message),
    )


def _while_ending(execution: Execution) -> Phase:
    """Until the disk has the end, the program is still running for everybody outside."""
    return "running" if execution.finished_at is not None else execution.phase
