"""Tests of status records."""

from __future__ import annotations

import msgspec
import pytest

from conure.server.program.status import Problem, ProgramStatus, Receipt
from conure.server.runtime.program_state import ProgramState
from conure.server.runtime.reporting.status import (
    program_status,
    stored_status,
    stored_variable,
    variable_status,
)
from conure.server.runtime.reporting.status_parts import (
    PART_BYTES,
    end_snapshot,
    live_status_parts,
    stored_status_parts,
)
from conure.server.store.journal import EndRecord, StoredProgram, ValueRecord

from ...inprocess import client, expr, generate, insert, var
from ..test_program_state import execute, finish

NODES = [
    generate("call", insert("given"), writes="text", meta={"tag": 1}),
    expr("sum", [var("text"), var("x")]),
    client("ask", "x"),
    expr("off", {"lit": 1}, when={"lit": False}),
]
STOPPED = Problem(code="program.cancelled", message="the program was cancelled")
OFF = Problem(code="node.when", message="`when` was false")


def running() -> ProgramState:
    execution = execute(NODES, inputs={"given": "i"}, variables=("free",), outputs=("sum",))
    execution.start()
    execution.phase = "running"
    return execution


def test_variable_status_shows_durable_state() -> None:
    execution = running()
    finish(execution, "call")
    execution.end("off", "skipped", OFF, at=1.0)
    execution.nodes["ask"].phase = "running"

    def shown(settled: set[str], variable: str, *, is_ended: bool = False) -> tuple[str, object]:
        status = variable_status(execution, settled, variable, is_ended=is_ended)
        assert status.name == variable
        return status.status, status.value or status.error or None

    for variable in ("text", "off"):
        assert shown(set(), variable) == ("running", None), "in memory only"
    assert shown({"text"}, "text") == ("done", "value of text")
    assert shown({"off"}, "off") == ("skipped", OFF)
    assert shown(set(), "x") == ("running", None)
    for variable in ("sum", "free"):
        assert shown(set(), variable) == ("waiting", None)
    status, error = shown(set(), "free", is_ended=True)
    assert status == "cancelled"
    assert isinstance(error, Problem)
    assert error.code == "variable.never_set"
    execution.problem = STOPPED
    assert shown(set(), "free", is_ended=True) == ("cancelled", STOPPED)


def test_status_is_running_until_the_end_is_durable() -> None:
    execution = running()
    status = program_status(execution, {"given"}, None)
    assert (status.status, status.finished_at, status.outputs) == ("running", None, ["sum"])
    assert {n: v.status for n, v in status.variables.items()} == {
        "given": "done",
        "free": "waiting",
        "text": "waiting",
        "sum": "waiting",
        "x": "waiting",
        "off": "waiting",
    }
    execution.phase, execution.finished_at, execution.problem = "failed", 2.0, STOPPED
    unseen = program_status(execution, {"given"}, None)
    assert (unseen.status, unseen.finished_at, unseen.receipt or None) == ("running", None, None)
    assert not unseen.error
    seen = program_status(execution, {"given"}, Receipt())
    assert (seen.status, seen.finished_at) == ("failed", "1970-01-01T00:00:02.000000Z")
    assert (seen.receipt, seen.error) == (Receipt(), STOPPED)


def test_node_status_reports_phase_and_usage() -> None:
    execution = running()
    state = execution.nodes["call"]
    state.phase, state.engine, state.why, state.attempt = "running", "engine-0", "most room", 2
    usage = state.usage
    usage.logical, usage.computed, usage.decoded, usage.discarded = 10, 4, 7, 1
    usage.queued_s, usage.prefill_s, usage.decode_s = 0.1, 0.2, 0.3
    nodes = program_status(execution, set(), None).nodes
    call = nodes["call"]
    assert (call.op, call.status, call.engine, call.why, call.attempt, call.meta) == (
        "generate",
        "running",
        "engine-0",
        "most room",
        2,
        {"tag": 1},
    )
    assert (call.queued_s, call.prefill_s, call.decode_s) == (0.1, 0.2, 0.3)
    tokens, output = call.prompt_tokens, call.output_tokens
    assert tokens
    assert (tokens.logical, tokens.computed, tokens.shared) == (10, 4, 6)
    assert output
    assert (output.decoded, output.discarded) == (7, 1)
    assert {name: node.op for name, node in nodes.items()} == {
        "call": "generate",
        "sum": "expr",
        "ask": "client",
        "off": "expr",
    }
    assert not nodes["sum"].prompt_tokens


def stored(execution: ProgramState, receipt: Receipt) -> StoredProgram:
    """Return the stored form of a program that has ended."""
    program = {
        "variables": {"given": {}, "free": {}},
        "nodes": NODES,
        "outputs": ["sum"],
        "name": execution.name,
    }
    body = {"program": program, "inputs": {"given": "i"}}
    values = [
        ValueRecord(
            program=execution.id,
            variable=variable,
            value=msgspec.json.encode(value),
            text=None,
            token_ids=None,
            tokenizer_hash=None,
            epoch=0,
            attempt=1,
        )
        for variable, value in execution.values.items()
        if variable != "given"
    ]
    problem = execution.problem
    assert execution.finished_at is not None
    return StoredProgram(
        id=execution.id,
        tenant="t",
        idempotency_key=None,
        body_hash=b"",
        body=msgspec.json.encode(body),
        created_at=execution.created_at,
        appends=[],
        values=values,
        events=[],
        end=EndRecord(
            program=execution.id,
            status=execution.phase,
            finished_at=execution.finished_at,
            receipt=msgspec.json.encode(receipt),
            error=None if problem is None else msgspec.json.encode(problem),
            nodes=end_snapshot(execution),
        ),
    )


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_ended_program_status_matches_the_journal(
    is_cancelled: bool,
) -> None:
    execution = running()
    finish(execution, "call")
    execution.end("off", "skipped", OFF, at=1.0)
    if is_cancelled:
        for node in ("ask", "sum"):
            execution.end(node, "cancelled", STOPPED, at=2.0)
        execution.phase, execution.problem = "cancelled", STOPPED
    else:
        finish(execution, "ask")
        finish(execution, "sum")
        execution.phase = "done"
    execution.finished_at = 2.0
    receipt = Receipt(calls=1)
    settled = execution.values.keys() | execution.missing_values.keys()
    live: ProgramStatus = program_status(execution, settled, receipt)
    assert msgspec.to_builtins(stored_status(stored(execution, receipt))) == msgspec.to_builtins(
        live
    )
    for parts in (
        live_status_parts(execution, settled, receipt, {}),
        stored_status_parts(stored(execution, receipt)),
    ):
        assert msgspec.json.decode(b"".join(parts), type=ProgramStatus) == live
    for name, variable in live.variables.items():
        assert stored_variable(stored(execution, receipt), name) == variable
    assert stored_variable(stored(execution, receipt), "other") is None
    expected = "cancelled" if is_cancelled else "done"
    assert (live.status, live.variables["sum"].status) == (expected, expected)
    assert live.variables["free"].status == "cancelled"


@pytest.mark.parametrize("size", [1, PART_BYTES // 2, PART_BYTES, 3 * PART_BYTES])
def test_parts_of_a_status_have_one_size_whatever_the_size_of_a_value(size: int) -> None:
    given = "i" * size
    execution = execute(NODES, inputs={"given": given}, variables=("free",), outputs=("sum",))
    execution.start()
    *parts, last = live_status_parts(execution, {"given"}, None, {})
    assert {len(part) for part in parts} <= {PART_BYTES}
    assert len(last) <= PART_BYTES
    status = msgspec.json.decode(b"".join([*parts, last]), type=ProgramStatus)
    assert status.variables["given"].value == given
