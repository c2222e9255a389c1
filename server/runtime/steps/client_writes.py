"""Client writes to a running program: values of inputs and answers to client steps.

Checks whether a PUT is allowed. The program run then commits its value like any other.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from ...program.errors import ConflictError, ProgramError, RunError
from ...program.expressions.value_schema import find_mismatch, mismatch_code
from ...program.ir import ClientNode
from ...program.status import Problem, PutValue, VariableStatus
from ..program_run import ProgramRun
from ..reporting.status import variable_status


async def wait_writable(run: ProgramRun, variable: str) -> None:
    """Wait until a client step whose request was sent before a restart can be answered.

    The client may answer as soon as the server is back, before the step is dispatched again.
    """
    producer = run.state.graph.get_producer(variable)
    if producer is not None:
        await run.client_steps.wait_resumed(producer.node)


def put_value(run: ProgramRun, variable: str, body: PutValue) -> None:
    """Commit a value or an error that a client sent. Repeating the same PUT has no effect.

    Raises:
        ProgramError: `variable.body` unless the body has exactly one of value and error;
            `variable.unsupported_from` for a reference to another variable; `variable.type`
            or `variable.schema` if the value is not as declared.
        ConflictError: if the variable has another value or is not written by the client, or if
            the request that the body answers was not sent or is closed.
    """
    if body.source is not UNSET:
        raise ProgramError(
            "variable.unsupported_from", "`from` is not supported yet: PUT the value itself"
        )
    if (body.value is UNSET) == (body.error is UNSET):
        raise ProgramError("variable.body", "give exactly one of `value` and `error`")
    state = run.state
    if body.value is not UNSET:
        declared = state.graph.variables[variable]
        mismatch = find_mismatch(body.value, declared)
        if mismatch is not None:
            code = mismatch_code(body.value, declared)
            raise ProgramError(code, f"variable {variable} {mismatch}")
    if state.is_resolved(variable):
        if is_same_value(variable_status(state, {variable}, variable, is_ended=False), body):
            return
        problem = "already has a value" if variable in state.values else "will not get a value"
        raise ConflictError("variable.committed", f"variable {variable} {problem}")
    if run.is_over:
        raise ConflictError("program.ended", f"program {state.id} has ended")
    producer = state.graph.get_producer(variable)
    if producer is not None and not isinstance(state.graph.nodes[producer.node], ClientNode):
        raise ConflictError(
            "variable.not_writable", f"variable {variable} is written by node {producer.node}"
        )
    _check_request(run, variable, body.request_id, producer.node if producer else None)
    _write(run, variable, body)


def is_same_value(status: VariableStatus, body: PutValue) -> bool:
    """Whether a client sends the value or error that the variable already has.

    Values are compared as JSON: 1 differs from true, and the order of keys does not matter.
    """
    if body.value is UNSET or status.value is UNSET:
        return body.error is not UNSET and body.error == status.error
    committed, sent = (msgspec.json.encode(v, order="sorted") for v in (status.value, body.value))
    return committed == sent


def _check_request(run: ProgramRun, variable: str, request: str | None, node: str | None) -> None:
    if node is None:
        return
    step = run.client_steps.steps.get(node)
    if step is None:
        raise ConflictError(
            "client.not_requested",
            f"node {node} has not requested {variable}; wait for its `client.requested` event",
        )
    if request is not None and request != step.request_id:
        raise ConflictError(
            "client.stale_request",
            f"request {request} is closed; node {node} waits for {step.request_id}",
        )


def _write(run: ProgramRun, variable: str, body: PutValue) -> None:
    producer = run.state.graph.get_producer(variable)
    step = None if producer is None else run.client_steps.steps.get(producer.node)
    if isinstance(body.error, Problem):
        if step is not None:
            step.fail(RunError(body.error.code, body.error.message))
        else:
            run.fail_input(variable, body.error)
    elif step is not None:
        step.answer(body.value)
    else:
        run.commit_input(variable, body.value)
