"""Answers to client steps."""

from __future__ import annotations

from typing import Any

import pytest

from conure.adapters.client.client_steps import (
    MAX_CLOSED,
    MAX_VALUE_BYTES,
    ClientStepDeduplicator,
    ClientStepSession,
    StepRequest,
    answer_of,
)
from conure.server.program.decoding.bodies import MAX_BODY_BYTES
from conure.server.program.errors import ProgramError, RunError
from conure.server.program.status import Event, EventType, Problem, ProgramStatus

STEP = StepRequest("request", "node", "name", "output", {}, lambda: None)


def test_an_oversized_value_raises() -> None:
    assert MAX_VALUE_BYTES < MAX_BODY_BYTES
    fitting = "x" * (MAX_VALUE_BYTES - 2)
    assert answer_of(STEP, fitting).request_id == "request"
    with pytest.raises(ProgramError, match=f"{MAX_VALUE_BYTES + 1:,} bytes as JSON") as caught:
        answer_of(STEP, fitting + "x")
    assert caught.value.code == "client.value_too_large"


def session_after(*events: tuple[EventType, dict[str, Any]]) -> ClientStepSession:
    session = ClientStepDeduplicator().open("p", ["x"])
    for seq, (kind, data) in enumerate(events, 1):
        session.on_event(Event(seq=seq, type=kind, data=data), {})
    return session


def end_programs(deduplicator: ClientStepDeduplicator, number: int) -> None:
    for i in range(number):
        deduplicator.open(f"p_{i}", [])
        deduplicator.close(f"p_{i}")


def test_requests_are_kept_while_a_session_serves_the_program() -> None:
    deduplicator = ClientStepDeduplicator()
    for _ in range(2):
        deduplicator.open("p", [])
    assert deduplicator.claim("p", "r")
    deduplicator.close("p")
    end_programs(deduplicator, MAX_CLOSED)
    assert not deduplicator.claim("p", "r")
    deduplicator.close("p")
    end_programs(deduplicator, MAX_CLOSED - 1)
    assert not deduplicator.claim("p", "r")
    end_programs(deduplicator, MAX_CLOSED)
    assert deduplicator.claim("p", "r")


def test_a_session_that_cannot_begin_keeps_no_requests() -> None:
    deduplicator = ClientStepDeduplicator()
    with pytest.raises(KeyError, match="id"):
        deduplicator.open("p", [], program={"op": "try"})
    deduplicator.open("p", [])
    assert deduplicator.claim("p", "r")
    deduplicator.close("p")
    end_programs(deduplicator, MAX_CLOSED)
    assert deduplicator.claim("p", "r")


HANDLED: tuple[EventType, dict[str, Any]] = (
    "node.failed",
    {"node": "a", "code": "output.invalid", "message": "a fallback took over"},
)
LATE = {"code": "program.deadline_exceeded", "message": "5 s are over"}


def test_a_stopped_program_raises_why_it_stopped_and_no_handled_failure() -> None:
    finished = {"status": "deadline_exceeded", **LATE}
    session = session_after(HANDLED, ("program.finished", finished))
    with pytest.raises(RunError, match="5 s are over") as caught:
        session.result(None)
    assert caught.value.code == "program.deadline_exceeded"
    status = ProgramStatus(
        id="p", status="deadline_exceeded", created_at="now", error=Problem(**LATE)
    )
    with pytest.raises(RunError, match="5 s are over"):
        session_after(HANDLED).result(status)


def test_a_failed_program_raises_the_failure_that_ended_it() -> None:
    failure = {"code": "client.failed", "message": "search: offline"}
    session = session_after(
        ("node.failed", {"node": "s", **failure}),
        HANDLED,
        ("program.finished", {"status": "failed", **failure}),
    )
    with pytest.raises(RunError, match="search: offline"):
        session.result(None)
