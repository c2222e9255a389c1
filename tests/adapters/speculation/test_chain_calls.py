"""The calls of a chain find their planned calls; everything is sent once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel

from conure.adapters.client import NotReadyError
from conure.adapters.langchain import ChatConure
from conure.adapters.langchain.acceleration.chain_run import ChainRun
from conure.adapters.langchain.acceleration.plan import AwaitedValue, ChainPlan
from conure.adapters.langchain.acceleration.planner import identity_of, plan_of
from conure.adapters.langchain.compilation.values import ClientValue, Source
from conure.adapters.speculation.outbox import OutboxRequest
from conure.adapters.speculation.registry import CallRecord, PlanFailedError
from conure.adapters.speculation.run import SpeculativeRun
from conure.server.program.errors import ProgramError
from conure.server.program.status import Event, NodeStatus, ProgramStatus

from .calls import call, committed, content, event, node


class Case:
    """x -> a -> (the chain computes s from it) -> b, c."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.computed = Source("x"), Source("s")

        def fresh(hint: str) -> str:
            return hint

        x = self.root.view(ClientValue(self.root, lambda v: v), "text", fresh).variable
        s = self.computed.view(ClientValue(self.computed, lambda v: v), "text", fresh).variable
        self.awaited = AwaitedValue("at s", "RunnableLambda", "code", self.computed)
        calls = (
            call("a", {x}, {"text": "say "}, {"input": x}),
            call("b", {s}, {"input": s}),
            call("c", {s, "a"}, {"input": s}, {"text": "/"}, content("a")),
        )
        self.plan = ChainPlan(
            calls, {"at s": self.awaited}, self.root, may_grow=False, is_direct=False
        )
        monkeypatch.setattr(SpeculativeRun, "flush", lambda self, *_: None)
        io_thread = SimpleNamespace(wake=lambda function: function())
        client: Any = SimpleNamespace(identity="server", io_thread=io_thread)
        self.chain = ChainRun(client, "chain", is_streamed=False)
        self.registry = self.chain._registry
        self.outbox = self.chain._run.outbox

    def next(self) -> OutboxRequest:
        request = self.outbox.next()
        assert request is not None
        return request

    def begin(self) -> dict[str, Any]:
        self.chain.begin([(self.plan, self.plan.inputs("tea"))])
        request = self.next()
        self.outbox.accepted(request, SimpleNamespace(id=request.program.id))
        assert not request.is_complete
        return request.body

    def claim(self, text: str, **more: Any) -> CallRecord:
        return self.chain._claim({**node("z", text), **more})

    def reject_all(self, failure: Exception) -> None:
        """Reject the next request, and each of its parts."""
        while (request := self.outbox.next()) is not None:
            self.outbox.rejected(request, failure)

    def heard(self, *records: CallRecord) -> list[Event | Exception]:
        heard: list[Event | Exception] = []
        for record in records:
            self.registry.listen(record, heard.append)
        return heard


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(monkeypatch)


def ids(request: OutboxRequest) -> list[str]:
    body = request.body.get("program", request.body)
    return [each["id"] for each in body["nodes"]]


def test_plan_is_sent_once_in_one_request(case: Case) -> None:
    body = case.begin()
    program = body["program"]
    assert [each["id"] for each in program["nodes"]] == ["a_call", "b_call", "c_call"]
    assert (body["inputs"], set(program["variables"])) == ({"x": "tea"}, {"x", "s"})
    assert set(program["outputs"]) == {"b", "c"}
    assert case.outbox.next() is None


def test_nothing_is_sent_before_a_call_can_run(case: Case) -> None:
    case.chain.begin([(case.plan, {})])
    assert case.outbox.next() is None
    case.chain.observe(case.awaited, "S")
    request = case.next()
    assert len(ids(request)) == 3
    assert request.body["inputs"] == {"s": "S"}


def test_call_is_found_by_prompt_and_settings(case: Case) -> None:
    case.begin()
    assert case.chain._claim(node("z", "say tea", temperature=1)).variable == "miss1"
    assert case.claim("say tee").variable == "miss2"
    assert case.claim("say tea", meta={"run_id": "r"}).variable == "a"
    assert case.claim("say tea").variable == "miss3"
    assert case.chain.stats.num_served == 1
    assert ids(case.next()) == ["miss1_call", "miss2_call", "miss3_call"]


def test_prompts_are_known_when_their_values_are(case: Case) -> None:
    case.begin()
    assert case.claim("S").variable.startswith("miss")
    why = case.chain.stats.misses[0].why
    case.chain.observe(case.awaited, "S")
    request = case.next()
    assert request.body == {"inputs": {"s": "S"}}
    assert case.claim("S").variable == "b"
    case.registry.on_event(committed("a", "A"))
    assert case.claim("S/A").variable == "c"
    assert why == "at s (RunnableLambda): it is not computed yet"


def test_listener_receives_past_and_future_events(case: Case) -> None:
    case.begin()
    record = case.claim("say tea")
    case.registry.on_event(event("node.delta", variable="a", text="A", offset=0))
    heard = case.heard(record)
    case.registry.on_event(committed("a", "AA"))
    assert [each.type for each in heard if isinstance(each, Event)] == [
        "node.delta",
        "variable.committed",
    ]
    assert len(case.heard(record)) == 1


def test_failures_reach_listeners(case: Case) -> None:
    case.begin()
    heard = case.heard(case.claim("say tea"))
    case.registry.on_event(event("node.failed", node="a_call", code="x", message="no"))
    assert [getattr(each, "code", "") for each in heard] == ["x"]
    case.chain.observe(case.awaited, "S")
    other = case.claim("S")
    heard = case.heard(other)
    lost = ProgramError("client.stream", "gone")
    case.outbox.program_ended(case.outbox.programs[0], lost, has_finished=False)
    assert heard == [lost]
    assert case.heard(other) == [lost]


def test_rejected_call_is_not_planned(case: Case) -> None:
    case.chain.begin([(case.plan, case.plan.inputs("tea"))])
    case.reject_all(ProgramError("constraint.invalid", "no such language"))
    assert case.claim("say tea").variable.startswith("miss")
    assert set(case.registry.rejections) == {"no such language"}


def test_claimed_call_that_is_rejected_is_sent_again(case: Case) -> None:
    case.chain.begin([(case.plan, case.plan.inputs("tea"))])
    request = case.next()
    planned = case.claim("say tea")
    heard = case.heard(planned)
    missed = case.claim("other")
    heard_of_missed = case.heard(missed)
    assert not case.chain.stats.misses[1:]
    case.outbox.rejected(request, ProgramError("constraint.invalid", "no such language"))
    while not heard:
        case.outbox.rejected(case.next(), ProgramError("constraint.invalid", "no such language"))
    assert [type(each) for each in heard] == [PlanFailedError]
    assert [type(each) for each in case.heard(planned)] == [PlanFailedError]
    assert heard_of_missed == []
    again = case.chain._resend(node("z", "say tea"), planned, PlanFailedError("x", ""))
    assert (case.chain.stats.num_served, len(case.chain.stats.misses)) == (0, 2)
    reason = ProgramError("store.unavailable", "full")
    case.reject_all(reason)
    assert heard_of_missed == [reason]
    assert case.heard(again) == [reason]


def test_calls_that_are_rejected_together_are_sent_alone(case: Case) -> None:
    records = [case.claim(text) for text in ("one", "two")]
    heard = case.heard(*records)
    case.outbox.rejected(case.next(), ProgramError("model.unknown", "no such model"))
    assert heard == []
    assert [len(ids(case.next())) for _ in records] == [1, 1]
    assert len(case.chain.stats.misses) == 2


def test_value_for_a_rejected_plan_is_not_sent(case: Case) -> None:
    case.chain.begin([(case.plan, case.plan.inputs("tea"))])
    request = case.next()
    case.chain.observe(case.awaited, "before")
    case.outbox.rejected(request, ProgramError("constraint.invalid", "no such language"))
    case.reject_all(ProgramError("constraint.invalid", "no such language"))
    case.chain.observe(case.awaited, "after")
    case.claim("other")
    request = case.next()
    assert (request.body["inputs"], request.body["program"]["variables"]) == ({}, {})


def test_rejected_value_fails_the_calls_that_wait_for_it(case: Case) -> None:
    case.begin()
    case.registry.on_event(committed("a", "A"))
    case.chain.observe(case.awaited, "S")
    claimed = case.claim("S")
    assert claimed.variable == "b"
    heard = {"b": case.heard(claimed), "z": case.heard(case.claim("other"))}
    request = case.next()
    assert request.body == {"inputs": {"s": "S"}}
    case.outbox.rejected(request, ProgramError("value.too_large", "no"))
    kinds = {name: [type(each) for each in events] for name, events in heard.items()}
    assert kinds == {"b": [PlanFailedError], "z": []}
    case.chain._resend(node("z", "S"), claimed, PlanFailedError("x", ""))
    assert (case.chain.stats.num_served, len(case.chain.stats.misses)) == (0, 2)
    for prompt in ("S", "S/A"):
        assert case.claim(prompt).variable.startswith("miss")
    assert not case.registry.is_settled(), "what waits on the server has to be stopped"


def test_unneeded_calls_are_reported_at_the_end(case: Case) -> None:
    case.begin()
    assert not case.registry.is_settled()
    case.registry.on_event(committed("a", "A"))
    case.chain._end(is_failed=False)
    ran, waited = NodeStatus(status="cancelled", engine="e"), NodeStatus(status="cancelled")
    nodes = {"a_call": ran, "b_call": ran, "c_call": waited, "somebody_elses": ran}
    status = ProgramStatus(id="p", status="cancelled", created_at="now", nodes=nodes)
    case.registry.note_started(status)
    assert case.chain._finished().wasted == ["at a", "at b"]
    for name in ("b", "c"):
        case.registry.on_event(event("node.skipped", node=f"{name}_call", code="x"))
    assert case.registry.is_settled()


def test_names_of_later_calls_differ_from_the_names_of_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SpeculativeRun, "flush", lambda self, *_: None)
    llm = ChatConure(base_url="http://127.0.0.1:9")
    ask = ChatPromptTemplate.from_template
    chain = RunnableParallel(miss2=ask("A {x}") | llm, in4_answer=ask("B {x}") | llm)
    plan = plan_of(chain, identity=identity_of(llm), prefix="", config=None)
    client: Any = SimpleNamespace(identity="server")
    run = ChainRun(client, "chain", is_streamed=False)
    assert run.prefix() == ""
    run.begin([(plan, {})])
    assert {each.variable for each in plan.calls} == {"miss2", "in4_answer"}
    assert run._claim(node("z", "another prompt")).variable == "miss3"
    assert run.prefix() == "in5_"


def test_names_are_assigned_under_the_lock_of_the_calls(case: Case) -> None:
    lock: Any = case.registry.lock
    num_reads = 0

    class Names(set[str]):
        def __iter__(self) -> Any:
            nonlocal num_reads
            num_reads += 1
            assert lock._is_owned(), "the garbage collector may wait for this lock"
            return super().__iter__()

    case.chain._names = Names()
    assert [case.chain.prefix(), case.chain.prefix()] == ["", "in2_"]
    assert case.claim("an unplanned prompt").variable == "miss3"
    assert num_reads == 3


def test_run_without_planned_calls_uses_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeRun, "flush", lambda self, *_: None)
    llm = ChatConure(base_url="http://127.0.0.1:9")
    chain = ChatPromptTemplate.from_template("A {x}") | llm
    plan = plan_of(chain, identity=None, prefix="", config=None)
    run = ChainRun(None, "chain", is_streamed=False)
    assert [run.prefix(), run.prefix()] == ["", ""]
    client: Any = SimpleNamespace(identity="server")
    assert run.bind_to(client)
    assert run.prefix() == ""
    run.begin([(plan, plan.inputs({"x": "tea"})), (plan, plan.inputs({"x": "cake"}))])
    assert not run._registry.values
    assert run._claim(node("z", "another prompt")).variable == "miss1"


def test_unneeded_calls_of_one_place_are_counted_one_by_one(case: Case) -> None:
    calls = [replace(call(name, set(), name), place="at a") for name in "de"]
    case.registry.plan(calls)
    for record in case.registry.records.values():
        record.was_started = True
    case.chain._end(is_failed=False)
    assert case.chain._finished().wasted == ["at a", "at a"]


def test_the_end_reads_the_calls_under_their_lock(case: Case) -> None:
    lock: Any = case.registry.lock

    class Records(dict[str, CallRecord]):
        def values(self) -> Any:
            assert lock._is_owned(), "another thread may add a call"
            return super().values()

    case.registry.records = Records()
    case.chain._end(is_failed=False)
    case.chain._finished()


async def test_the_answers_to_one_call_share_its_time_limit(case: Case) -> None:
    run, times = case.chain._run, iter((0.0, 100.0, 100.0))
    run._first_request_ended.set_result(None)

    def clock() -> float:
        now_s = next(times)
        if now_s:  # the second answer is late
            late = partial(case.registry.on_event, committed("miss2", "B"))
            asyncio.get_running_loop().call_later(0.01, late)
        return now_s

    run.clock = clock
    answers = asyncio.create_task(case.chain.aresult([node("y", "one"), node("z", "two")], 10))
    await asyncio.sleep(0)
    case.registry.on_event(committed("miss1", "A"))
    with pytest.raises(NotReadyError, match="after 10 s"):
        await answers


def test_complete_plan_is_submitted_closed(case: Case) -> None:
    calls = (call("a", set(), "say"),)
    case.chain.begin([(ChainPlan(calls, {}, Source("y"), may_grow=False, is_direct=False), {})])
    assert case.next().is_complete
