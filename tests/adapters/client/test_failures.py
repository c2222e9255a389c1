"""A failed program reports the root failure, and no failure that was handled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conure.adapters.client.failures import Failures
from conure.server.program.ir import Program
from conure.server.program.status import Problem


def step(name: str) -> dict[str, Any]:
    return {"id": name, "op": "client", "name": name, "output": f"{name}_made"}


def trying(name: str, body: list[Any], *handlers: list[Any], **more: Any) -> dict[str, Any]:
    handled = [{"body": handler} for handler in handlers]
    return {"id": name, "op": "try", "body": body, "handlers": handled, **more}


INNER = trying("inner", [step("c")], [step("d")])
EACH = {"id": "each", "op": "map", "items": {"range": [11]}, "as": "i", "body": [INNER]}
NODES = [
    trying("first", [step("a")], [step("b")]),
    trying("second", [EACH], [step("e")]),
    trying("again", [step("f")], retries=1),
    step("last"),
]
PROGRAM = {"nodes": NODES, "outputs": []}


@pytest.fixture(params=["as JSON", "as a record"])
def program(request: pytest.FixtureRequest) -> Any:
    return PROGRAM if request.param == "as JSON" else msgspec.convert(PROGRAM, Program)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("", None),
        ("last", "last"),
        ("a last", "last"),
        ("a b first<b", "a"),
        ("a c.0 c.1 d.1 inner.1<d.1 each<inner.1 e second<e", "c.1"),
        ("a f f.r1 again<f.r1", "f.r1"),
        ("a f last", "last"),
        ("a c.1 d.1 inner.1<d.1 each<inner.1 last", "last"),
        ("c.1 c.10 d.1 inner.1<d.1 each<inner.1 e second<e", "c.1"),
        ("lost<lost", "lost"),
    ],
)
def test_root_failure_is_that_of_the_ending_node(
    program: Any, events: str, expected: str | None
) -> None:
    failures = Failures(program)
    for event in events.split():
        node, _, inner = event.partition("<")
        failures.add(node, Problem(code="x", message="broken", cause=inner))
    assert failures.root_failure() == expected


def test_root_failure_without_a_program_is_innermost() -> None:
    failures = Failures()
    failures.add("a", Problem(code="x", message="oh"))
    failures.add("b", Problem(code="x", message="no"))
    failures.add("first", Problem(code="x", message="b: no", cause="b"))
    assert failures.root_failure() == "b"
    assert failures["b"].message == "no"
