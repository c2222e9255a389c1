"""What a client writes into a running program: values of inputs, answers of client steps.

Decides whether a PUT may stand; the run then commits it like any other value.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from ..program.errors import ConflictError, ProgramError, RunError
from ..program.ir import Client
from ..program.status import Problem, PutValue, VariableStatus
from ..program.value import has_type
from .report import variable_status
from .run import Run


def put_value(run: Run, variable: str, body: PutValue) -> None:
    """Commit a value or an error that a client sends; the same value again is fine.

    Raises:
        ProgramError: `variable.body` unless exactly one of value and error is there;
            `variable.unsupported_from` for a pointer to another variable; `variable.type`.
        ConflictError: if the variable has another value, is written by an engine, or the
            answer is to a question that was not asked or is not open any more.
    """
    if body.source is not UNSET:
        raise ProgramError(
            "variable.unsupported_from", "`from` is not supported yet: PUT the value itself"
        )
    if (body.value is UNSET) == (body.error is UNSET):
        raise ProgramError("variable.body", "give exactly one of `value` and `error`")
    execution = run.execution
    declared = execution.graph.variables[variable].type
    if body.value is not UNSET and declared and not has_type(body.value, declared):
        raise ProgramError("variable.type", f"variable {variable} is declared as {declared}")
    if execution.is_resolved(variable):
        if stands_already(variable_status(execution, {variable}, variable, is_ended=False), body):
            return
        what = "has a value" if variable in execution.values else "will have no value"
        raise ConflictError("variable.committed", f"variable {variable} {what} already")
    if run.is_over:
        raise ConflictError("program.ended", f"program {execution.id} has ended")
    producer = execution.graph.get_producer(variable)
    if producer is not None and not isinstance(execution.graph.nodes[producer.node], Client):
        raise ConflictError(
            "variable.not_writable", f"variable {variable} is written by node {producer.node}"
        )
    _check_request(run, variable, body.request_id, producer.node if producer else None)
    _give(run, variable, body)


def stands_already(status: VariableStatus, body: PutValue) -> bool:
    """Whether what a client sends is what stands: then sending it again changes nothing.

    Compared as JSON: 1 is not true, and the order of keys is nothing.
    """
    if body.value is UNSET or status.value is UNSET:
        return body.error is not UNSET and body.error == status.error
    stands, sent = (msgspec.json.encode(v, order="sorted") for v in (status.value, body.value))
    return stands == sent


def _check_request(run: Run, variable: str, request: str | None, node: str | None) -> None:
    if node is None:
        return
    step = run.client_step(node)
    if step is None:
        raise ConflictError(
            "client.not_requested", f"node {node} has not asked for {variable}; wait for its event"
        )
    if request is not None and request != step.request_id:
        raise ConflictError(
            "client.stale_request",
            f"request {request} is not open; node {node} waits for {step.request_id}",
        )


def _give(run: Run, variable: str, body: PutValue) -> None:
    """Hand a checked value or error to whoever waits for it."""
    producer = run.execution.graph.get_producer(variable)
    step = None if producer is None else run.client_step(producer.node)
    if isinstance(body.error, Problem):
        if step is not None:
            step.refuse(RunError(body.error.code, body.error.message))
        else:
            run.lose(variable, body.error)
    elif step is not None:
        step.answer(body.value)
    else:
        run.commit(variable, body.value)
