"""Tests of the ledger: it detects every violation and accepts valid histories."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from .ledger import Heard, Ledger, ViolationError
from .programs import RandomProgram, evaluate, random_program

ID = "p_1"


def small_program() -> RandomProgram:
    """Return a program: write (an output each for a and b) -> glue -> ask."""
    return RandomProgram(
        submission={"inputs": {"topic": "cats"}, "program": {"outputs": ["d"]}},
        variables={"write": ("a", "b"), "glue": ("c",), "ask": ("d",)},
        client_args={"ask": {"text": {"var": "c"}}},
        exprs={"c": {"concat": [{"var": "a"}, {"var": "b"}]}},
    )


def events() -> list[Heard]:
    """Return the events of a crash between the outputs, and of one during the client step."""
    happened: list[tuple[str, dict[str, Any]]] = [
        ("program.accepted", {"outputs": ["d"]}),
        ("node.queued", {"node": "write"}),
        ("node.started", {"node": "write", "attempt": 1}),
        ("variable.committed", {"node": "write", "variable": "a", "value": "A"}),
        ("node.started", {"node": "write", "attempt": 2}),
        ("variable.committed", {"node": "write", "variable": "b", "value": "B"}),
        ("variable.committed", {"node": "glue", "variable": "c", "value": "AB"}),
        ("client.requested", {"node": "ask", "request_id": "r1", "args": {"text": "AB"}}),
        ("client.requested", {"node": "ask", "request_id": "r1", "args": {"text": "AB"}}),
        ("variable.committed", {"node": "ask", "variable": "d", "value": "D"}),
        ("program.finished", {"status": "done"}),
    ]
    return [
        Heard(10 * i, type_, {"program": ID, "seq": 10 * i, **data})
        for i, (type_, data) in enumerate(happened, start=1)
    ]


def status() -> dict[str, Any]:
    values = {"topic": "cats", "a": "A", "b": "B", "c": "AB", "d": "D"}
    return {
        "status": "done",
        "variables": {name: {"status": "done", "value": v} for name, v in values.items()},
        "receipt": {"blocks_held": 0},
    }


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.accepted(ID, small_program())
    return ledger


def test_valid_history_passes_when_read_twice(ledger: Ledger) -> None:
    for event in events()[:7]:
        ledger.heard_event(ID, event)
    ledger.check_history(ID, events(), status())
    ledger.check_history(ID, events(), status())


def swap(index: int, **data: Any) -> Callable[[list[Heard]], None]:
    def change(history: list[Heard]) -> None:
        event = history[index]
        history[index] = event._replace(data={**event.data, **data})

    return change


def insert(index: int, type_: str, **data: Any) -> Callable[[list[Heard]], None]:
    def change(history: list[Heard]) -> None:
        seq = 10 * index + 5
        history.insert(index, Heard(seq, type_, {"program": ID, "seq": seq, **data}))

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (swap(3, value="other"), "c is 'AB', not 'otherB'"),
        (swap(6, value="AX"), "c is 'AX'"),
        (swap(7, args={"text": "AX"}), "args other than"),
        (swap(8, request_id="r2"), "asked as r1 and as r2"),
        (swap(10, status="failed"), "ended as"),
        (swap(4, seq=7), "another program or number"),
        (insert(6, "node.started", node="write"), "everything it makes is committed"),
        (insert(7, "node.queued", node="glue"), "everything it makes is committed"),
        (insert(4, "variable.committed", node="write", variable="a", value="A"), "twice"),
        (insert(4, "variable.committed", node="write", variable="a", value="X"), "is now 'X'"),
        (insert(11, "node.finished", node="ask"), "does not end with its end"),
        (lambda history: history.reverse(), "out of order"),
        (lambda history: history.pop(0), "does not begin"),
        (lambda history: history.pop(5), "without committing"),
    ],
)
def test_broken_invariant_is_detected(
    ledger: Ledger, change: Callable[[list[Heard]], None], complaint: str
) -> None:
    history = events()
    change(history)
    final = status()
    committed = {e.data["variable"]: e.data["value"] for e in history if "variable" in e.data}
    for name, value in committed.items():
        final["variables"][name]["value"] = value
    with pytest.raises(ViolationError, match=complaint):
        ledger.check_history(ID, history, final)


def test_published_values_never_change(ledger: Ledger) -> None:
    event = events()[3]
    ledger.heard_event(ID, event)
    with pytest.raises(ViolationError, match="is now"):
        ledger.heard_event(ID, event._replace(type="node.finished"))
    with pytest.raises(ViolationError, match="a was 'A' and is now 'X'"):
        ledger.heard_value(ID, "a", "X")
    with pytest.raises(ViolationError, match="had a value"):
        ledger.heard_status(ID, {"variables": {"a": {"status": "running"}}}, known=ledger.known(ID))
    with pytest.raises(ViolationError, match="told and are gone"):
        ledger.check_history(ID, [e for e in events() if e.seq != event.seq], status())


def test_ids_and_numbers_are_unique(ledger: Ledger) -> None:
    ledger.heard_event(ID, events()[0])
    with pytest.raises(ViolationError, match="the id p_1"):
        ledger.accepted(ID, small_program())
    ledger.accepted("p_2", small_program())
    with pytest.raises(ViolationError, match="belongs to p_1 and to p_2"):
        ledger.heard_event("p_2", Heard(10, "program.accepted", {}))


def test_leaked_blocks_are_detected(ledger: Ledger) -> None:
    with pytest.raises(ViolationError, match="holds blocks"):
        ledger.check_history(ID, events(), {**status(), "receipt": {"blocks_held": 1}})


@pytest.mark.parametrize("seed", range(50))
def test_random_programs_are_well_formed(seed: int) -> None:
    program = random_program(random.Random(seed))
    nodes = program.submission["program"]["nodes"]
    assert {node["id"] for node in nodes} == program.variables.keys()
    assert program.submission["program"]["outputs"]
    values: dict[str, Any] = {"topic": "t" * 40}
    values |= {name: "x" * 40 for names in program.variables.values() for name in names}
    for expr in program.exprs.values():
        assert len(str(evaluate(expr, values))) <= 200
