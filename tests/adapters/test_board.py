"""A call finds the planned one by what it asks, and nothing else; what is sent is sent once."""

from __future__ import annotations

from typing import Any

import pytest

from conure.adapters.langchain.board import Board, NotPlannedError
from conure.adapters.langchain.plan import Awaited, Plan, PlannedCall
from conure.adapters.langchain.values import Local, Source
from conure.server.program.errors import ConureError, ProgramError
from conure.server.program.ir import Json
from conure.server.program.status import Event, NodeStatus, ProgramStatus


def node(variable: str, *segments: Json, **more: Json) -> dict[str, Json]:
    content = segments[0] if isinstance(segments[0], str) else list(segments)
    return {
        "id": f"{variable}_call",
        "op": "generate",
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "output": {"variable": variable, "as": "message", **more},
    }


def call(variable: str, reads: set[str], *segments: Json) -> PlannedCall:
    return PlannedCall(f"at {variable}", variable, node(variable, *segments), frozenset(reads))


def content(variable: str) -> Json:
    return {"input": {"get": [{"var": variable}, "content"]}}


def event(kind: Any, **data: Json) -> Event:
    return Event(1, kind, {"program": "p", **data})


def committed(variable: str, text: str) -> Event:
    return event("variable.committed", variable=variable, value={"content": text})


class Case:
    """x -> a -> (the chain makes s of it) -> b, c."""

    def __init__(self) -> None:
        self.root, self.made = Source("x"), Source("s")
        taken: list[str] = []

        def fresh(hint: str) -> str:
            taken.append(hint)
            return hint

        x = self.root.view(Local(self.root, lambda v: v), "text", fresh).variable
        s = self.made.view(Local(self.made, lambda v: v), "text", fresh).variable
        self.awaited = Awaited("at s", "RunnableLambda", "code", self.made)
        calls = (
            call("a", {x}, {"text": "say "}, {"input": x}),
            call("b", {s}, {"input": s}),
            call("c", {s, "a"}, {"input": s}, {"text": "/"}, content("a")),
        )
        self.plan = Plan(calls, {"at s": self.awaited}, self.root, has_parts=False)
        self.board = Board()

    def begin(self) -> dict[str, Any]:
        self.board.add([(self.plan, self.plan.inputs("tea"))])
        body = self.board.take()
        assert body is not None
        self.board.sent(body, "p")
        return body


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_plan_is_sent_whole_and_once(case: Case) -> None:
    body = case.begin()
    assert [each["id"] for each in body["nodes"]] == ["a_call", "b_call", "c_call"]
    assert (body["inputs"], set(body["variables"])) == ({"x": "tea"}, {"x", "s"})
    assert not body["whole"]
    assert set(body["outputs"]) == {"b", "c"}
    assert case.board.take() is None


def test_nothing_is_sent_that_could_not_run(case: Case) -> None:
    case.board.add([(case.plan, {})])
    assert case.board.take() is None
    case.board.observe(case.awaited, "S")
    body = case.board.take()
    assert body is not None
    assert len(body["nodes"]) == 3
    assert body["inputs"] == {"s": "S"}


def test_a_call_is_found_by_its_whole_prompt_and_settings(case: Case) -> None:
    case.begin()
    assert case.board.claim(node("z", "say tea", temperature=1)).variable == "miss1"
    assert case.board.claim(node("z", "say tee")).variable == "miss2"
    assert case.board.claim({**node("z", "say tea"), "meta": {"run_id": "r"}}).variable == "a"
    assert case.board.claim(node("z", "say tea")).variable == "miss3"
    assert case.board.tally.num_served == 1
    body = case.board.take()
    assert body is not None
    assert [each["id"] for each in body["nodes"]] == ["miss1_call", "miss2_call", "miss3_call"]


def test_prompts_of_values_are_known_when_the_values_are(case: Case) -> None:
    case.begin()
    assert case.board.claim(node("z", "S")).variable.startswith("miss")
    why = case.board.tally.misses[0].why
    case.board.observe(case.awaited, "S")
    body = case.board.take()
    assert body is not None
    assert body["inputs"] == {"s": "S"}
    assert case.board.claim(node("z", "S")).variable == "b"
    case.board.hear(committed("a", "A"))
    assert case.board.claim(node("z", "S/A")).variable == "c"
    assert why == "at s (RunnableLambda): its value has not come"


def test_who_listens_hears_what_was_and_what_comes(case: Case) -> None:
    case.begin()
    answer = case.board.claim(node("z", "say tea"))
    heard: list[Event | ConureError] = []
    delta = event("node.delta", variable="a", text="A", offset=0)
    case.board.hear(delta)
    case.board.listen(answer, heard.append)
    case.board.hear(committed("a", "AA"))
    assert [each.type for each in heard if isinstance(each, Event)] == [
        "node.delta",
        "variable.committed",
    ]
    late: list[Event | ConureError] = []
    case.board.listen(answer, late.append)
    assert len(late) == 1


def test_failures_reach_those_who_wait(case: Case) -> None:
    case.begin()
    answer = case.board.claim(node("z", "say tea"))
    heard: list[Event | ConureError] = []
    case.board.listen(answer, heard.append)
    case.board.hear(event("node.failed", node="a_call", code="x", message="no"))
    assert [each.type for each in heard if isinstance(each, Event)] == ["node.failed"]
    case.board.observe(case.awaited, "S")
    other = case.board.claim(node("z", "S"))
    case.board.listen(other, heard.append)
    lost = ProgramError("client.stream", "gone")
    case.board.fail(lost)
    assert heard[-1] is lost
    after: list[Event | ConureError] = []
    case.board.listen(other, after.append)
    assert after == [lost]


def test_what_is_refused_was_never_planned(case: Case) -> None:
    case.board.add([(case.plan, case.plan.inputs("tea"))])
    body = case.board.take()
    assert body is not None
    case.board.drop(body, ProgramError("constraint.invalid", "no such language"))
    assert case.board.claim(node("z", "say tea")).variable.startswith("miss")
    assert case.board.tally.refusals == ["no such language"]


def test_who_asked_for_what_is_refused_asks_again(case: Case) -> None:
    case.board.add([(case.plan, case.plan.inputs("tea"))])
    body = case.board.take()
    assert body is not None
    heard: list[Event | ConureError] = []
    planned = case.board.claim(node("z", "say tea"))
    case.board.listen(planned, heard.append)
    missed = case.board.claim(node("z", "other"))
    case.board.listen(missed, heard.append)
    assert not case.board.tally.misses[1:]
    more = case.board.take()
    assert more is not None
    case.board.drop(body, ProgramError("constraint.invalid", "no such language"))
    assert [type(each) for each in heard] == [NotPlannedError]
    late: list[Event | ConureError] = []
    case.board.listen(planned, late.append)
    assert [type(each) for each in late] == [NotPlannedError]
    again, alone = case.board.claim_alone(planned, node("z", "say tea"))
    assert [each["id"] for each in alone["nodes"]] == [again.node]
    assert (case.board.tally.num_served, len(case.board.tally.misses)) == (0, 2)
    reason = ProgramError("store.unavailable", "full")
    case.board.drop(more, reason)
    assert heard[1:] == [reason]


def test_what_is_refused_along_with_others_is_sent_alone(case: Case) -> None:
    heard: list[Event | ConureError] = []
    answers = [case.board.claim(node("z", text)) for text in ("one", "two")]
    for answer in answers:
        case.board.listen(answer, heard.append)
    body = case.board.take()
    assert body is not None
    case.board.drop(body, ProgramError("model.unknown", "no such model"))
    assert [type(each) for each in heard] == [NotPlannedError, NotPlannedError]
    _, alone = case.board.claim_alone(answers[0], node("z", "one"))
    assert len(alone["nodes"]) == 1
    assert len(case.board.tally.misses) == 2


def test_a_value_that_a_refused_plan_waited_for_goes_nowhere(case: Case) -> None:
    case.board.add([(case.plan, case.plan.inputs("tea"))])
    body = case.board.take()
    assert body is not None
    reason = ProgramError("constraint.invalid", "no such language")
    case.board.observe(case.awaited, "before")
    case.board.drop(body, reason)
    case.board.observe(case.awaited, "behind")
    case.board.claim(node("z", "other"))
    more = case.board.take()
    assert more is not None
    assert (more["inputs"], more["variables"]) == ({}, {})


def test_a_value_that_is_refused_with_something_else_is_waited_for_by_nobody(case: Case) -> None:
    case.begin()
    case.board.hear(committed("a", "A"))
    case.board.observe(case.awaited, "S")
    heard: dict[str, list[Event | ConureError]] = {"b": [], "c": [], "z": []}
    claimed = case.board.claim(node("z", "S"))
    assert claimed.variable == "b"
    case.board.listen(claimed, heard["b"].append)
    missed = case.board.claim(node("z", "other"))
    case.board.listen(missed, heard["z"].append)
    body = case.board.take()
    assert body is not None
    assert body["inputs"]
    case.board.drop(body, ProgramError("value.too_large", "no"))
    assert {name: [type(each) for each in told] for name, told in heard.items()} == {
        "b": [NotPlannedError],
        "c": [],
        "z": [NotPlannedError],
    }
    assert (case.board.tally.num_served, len(case.board.tally.misses)) == (0, 1)
    for asked in ("S", "other", "S/A"):
        assert case.board.claim(node("z", asked)).variable.startswith("miss")
    assert not case.board.is_settled(), "what waits on the server has to be stopped"


def test_the_end_says_what_was_run_for_nothing(case: Case) -> None:
    case.begin()
    assert not case.board.is_settled()
    case.board.hear(committed("a", "A"))
    tally = case.board.end()
    assert tally.wasted == ["at a"]
    ran, waited = NodeStatus(status="cancelled", engine="e"), NodeStatus(status="cancelled")
    nodes = {"a_call": ran, "b_call": ran, "c_call": waited, "somebody_elses": ran}
    status = ProgramStatus(id="p", status="cancelled", created_at="now", nodes=nodes)
    case.board.stopped(status)
    assert tally.wasted == ["at a", "at b"]
    for name in ("b", "c"):
        case.board.hear(event("node.skipped", node=f"{name}_call", code="x"))
    assert case.board.is_settled()
