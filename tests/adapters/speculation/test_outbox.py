"""Requests of a run: batches, programs that are full, values across programs, rejections."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from conure.adapters.client import ServerUnreachableError
from conure.adapters.speculation import outbox as module
from conure.adapters.speculation.answer_stream import program_failure
from conure.adapters.speculation.outbox import OutboxRequest, SpeculativeOutbox
from conure.adapters.speculation.planned_call import SEED_BITS, PlannedCall, seeded_node
from conure.adapters.speculation.registry import (
    CallRecord,
    PlanFailedError,
    PlannedCallRegistry,
)
from conure.server.program.errors import (
    ConflictError,
    NotFoundError,
    ProgramError,
    RunError,
    UnavailableError,
)
from conure.server.program.ir import Json
from conure.server.program.status import Event

from .calls import call, committed, content, event, node

SEGMENT = {"text": "x"}


class Sent:
    """An outbox, and the requests that a server accepted from it."""

    def __init__(self) -> None:
        self.registry = PlannedCallRegistry()
        self.outbox = SpeculativeOutbox(self.registry, "test", may_grow=True)
        self.requests: list[OutboxRequest] = []

    def accept_all(self) -> None:
        while (request := self.outbox.next()) is not None:
            self.outbox.accepted(request, SimpleNamespace(id=request.program.id))
            self.requests.append(request)

    def reject_next(self, failure: Exception) -> list[str]:
        request = self.outbox.next()
        assert request is not None
        self.outbox.rejected(request, failure)
        return [record.variable for record in request.records]

    def heard(self, name: str) -> list[Event | Exception]:
        heard: list[Event | Exception] = []
        self.registry.listen(self.registry.records[name], heard.append)
        return heard


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    monkeypatch.setattr(module, "MAX_BATCH", 2)
    monkeypatch.setattr(module, "MAX_NODES", 3)
    return Sent()


def test_full_program_is_followed_by_another(sent: Sent) -> None:
    sent.registry.plan([call(name, set(), SEGMENT) for name in "abcde"])
    sent.accept_all()
    sizes = [(request.action, len(request.records)) for request in sent.requests]
    assert sizes == [("submit", 2), ("submit", 2), ("append", 1)]
    sent.outbox.end(is_cancelled=False)
    sent.accept_all()
    assert [request.action for request in sent.requests[3:]] == ["close", "close"]


def test_answer_of_another_program_is_sent_as_a_value(sent: Sent) -> None:
    calls = [call(name, set(), SEGMENT) for name in "abc"]
    sent.registry.plan([*calls, call("d", {"a"}, content("a"))])
    sent.accept_all()
    second = sent.requests[1]
    assert set(second.body["program"]["variables"]) == {"a"}
    assert second.body["inputs"] == {}
    sent.registry.on_event(committed("a", "A"))
    sent.accept_all()
    (value,) = sent.requests[2:]
    assert value.program is sent.outbox.programs[1]
    assert value.body == {"inputs": {"a": {"content": "A"}}}
    sent.accept_all()
    assert len(sent.requests) == 3


def test_failure_in_another_program_fails_its_readers(sent: Sent) -> None:
    calls = [call(name, set(), SEGMENT) for name in "abc"]
    sent.registry.plan([*calls, call("d", {"a"}, content("a")), call("e", {"d"}, content("d"))])
    sent.accept_all()
    sent.registry.on_event(event("node.failed", node="a_call", code="x", message="no"))
    assert [type(each) for each in sent.heard("d")] == [PlanFailedError]
    assert [type(each) for each in sent.heard("e")] == [PlanFailedError]
    assert sent.heard("b") == []


def test_rejected_batch_is_split_until_one_call_is_at_fault(sent: Sent) -> None:
    sent.registry.plan([call(name, set(), SEGMENT) for name in "ab"])
    failure = ProgramError("program.invalid", "bad")
    assert sent.reject_next(failure) == ["a", "b"]
    assert sent.reject_next(failure) == ["a"]
    sent.accept_all()
    assert [type(each) for each in sent.heard("a")] == [PlanFailedError]
    assert sent.heard("b") == []
    assert sent.registry.rejections == ["bad"]


def test_readers_of_a_rejected_call_are_not_sent(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT), call("b", {"a"}, content("a"))])
    failure = ProgramError("program.invalid", "bad")
    sent.reject_next(failure)
    sent.reject_next(failure)
    assert sent.outbox.next() is None
    assert [type(each) for each in sent.heard("b")] == [PlanFailedError]


def test_busy_server_gets_unplanned_calls_alone(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT)])
    sent.registry.add_unplanned(call("b", set(), SEGMENT))
    failure = UnavailableError("admission.full", "busy")
    assert sent.reject_next(failure) == ["a", "b"]
    assert [type(each) for each in sent.heard("a")] == [PlanFailedError]
    assert sent.heard("b") == []
    assert sent.reject_next(failure) == ["b"]
    assert sent.heard("b") == [failure]
    assert sent.outbox.next() is None


@pytest.mark.parametrize(
    "failure", [ConflictError("program.closed", "closed"), RuntimeError("client closed")]
)
def test_failure_of_a_whole_batch_is_not_split(sent: Sent, failure: Exception) -> None:
    sent.registry.plan([call(name, set(), SEGMENT) for name in "ab"])
    assert sent.reject_next(failure) == ["a", "b"]
    assert sent.outbox.next() is None


def test_unreachable_server_is_reported_to_every_call(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT)])
    sent.registry.add_unplanned(call("b", set(), SEGMENT))
    failure = ServerUnreachableError("no answer")
    sent.reject_next(failure)
    assert sent.heard("a") == sent.heard("b") == [failure]


def test_cancelled_run_fails_what_was_not_sent(sent: Sent) -> None:
    sent.registry.plan([call(name, set(), SEGMENT) for name in "ab"])
    sent.accept_all()
    sent.registry.plan([call("c", set(), SEGMENT)])
    sent.outbox.end(is_cancelled=True)
    sent.accept_all()
    assert [request.action for request in sent.requests[1:]] == ["cancel"]
    assert [type(each) for each in sent.heard("c")] == [RunError]
    late = sent.registry.add_unplanned(call("d", set(), SEGMENT))
    assert isinstance(late.failure, RunError)


def test_requests_follow_a_submission_without_its_answer(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT), call("b", {"s"}, {"input": "s"})])
    submission = sent.outbox.next()
    assert submission is not None
    assert submission.body["id"] == submission.program.id
    sent.registry.set_values({"s": "S"})
    sent.registry.add_unplanned(call("c", set(), SEGMENT))
    values, append = sent.outbox.next(), sent.outbox.next()
    assert values is not None
    assert append is not None
    assert values.body == {"inputs": {"s": "S"}}
    assert [record.variable for record in append.records] == ["c"]
    assert values.program is append.program is submission.program
    assert sent.outbox.is_busy


def test_call_that_reads_an_append_under_way_waits_for_it(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT)])
    sent.accept_all()
    sent.registry.plan([call("b", set(), SEGMENT)])
    append = sent.outbox.next()
    assert append is not None
    sent.registry.plan([call("c", {"b"}, content("b"))])
    assert sent.outbox.next() is None
    sent.outbox.accepted(append)
    later = sent.outbox.next()
    assert later is not None
    assert [record.variable for record in later.records] == ["c"]


def test_values_are_sent_when_a_call_can_start_by_them(sent: Sent) -> None:
    reader = call("b", {"s", "t", "a"}, {"input": "s"}, {"input": "t"}, content("a"))
    sent.registry.plan([call("a", set(), SEGMENT), reader])
    sent.accept_all()
    sent.registry.set_values({"s": "S"})
    assert sent.outbox.next() is None
    sent.registry.set_values({"t": "T"})
    sent.accept_all()
    assert sent.requests[-1].body == {"inputs": {"s": "S", "t": "T"}}


def test_call_that_overtook_a_rejected_submission_is_sent_again(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT)])
    submission = sent.outbox.next()
    sent.registry.add_unplanned(call("b", set(), SEGMENT))
    append = sent.outbox.next()
    assert submission is not None
    assert append is not None
    sent.outbox.rejected(submission, ProgramError("program.invalid", "bad"))
    sent.outbox.rejected(append, NotFoundError("program.not_found", "no such program"))
    again = sent.outbox.next()
    assert again is not None
    assert (again.action, [record.variable for record in again.records]) == ("submit", ["b"])
    assert sent.heard("b") == []


def refuse_early(sent: Sent) -> tuple[OutboxRequest, list[OutboxRequest]]:
    """Return a submission, and what followed it: values and a call, which arrived before it."""
    sent.registry.plan([call("a", {"s"}, {"input": "s"}), call("b", set(), SEGMENT)])
    submission = sent.outbox.next()
    sent.registry.set_values({"s": "S"})
    sent.registry.add_unplanned(call("c", set(), SEGMENT))
    values, append = sent.outbox.next(), sent.outbox.next()
    assert submission is not None
    assert values is not None
    assert append is not None
    return submission, [values, append]


def test_requests_that_a_busy_server_did_not_expect_follow_its_answer(sent: Sent) -> None:
    submission, early = refuse_early(sent)
    for request in early:
        sent.outbox.rejected(request, NotFoundError("program.not_found", "no such program"))
    assert sent.outbox.next() is None
    sent.outbox.accepted(submission, SimpleNamespace(id=submission.program.id))
    sent.accept_all()
    assert [request.body for request in sent.requests] == [request.body for request in early]
    assert sent.heard("a") == sent.heard("c") == []
    assert sent.registry.rejections == []


def test_requests_that_arrived_before_a_rejected_submission_are_sent_again(sent: Sent) -> None:
    submission, early = refuse_early(sent)
    for request in early:
        sent.outbox.rejected(request, NotFoundError("program.not_found", "no such program"))
    sent.outbox.rejected(submission, UnavailableError("queue.full", "busy"))
    sent.accept_all()
    (again,) = sent.requests
    assert (again.action, [record.variable for record in again.records]) == ("submit", ["c"])


def test_requests_follow_a_submission_that_was_accepted_meanwhile(sent: Sent) -> None:
    submission, early = refuse_early(sent)
    sent.outbox.accepted(submission, SimpleNamespace(id=submission.program.id))
    for request in early:
        sent.outbox.rejected(request, NotFoundError("program.not_found", "no such program"))
    sent.accept_all()
    assert [request.body for request in sent.requests] == [request.body for request in early]
    gone = NotFoundError("program.not_found", "it was deleted")
    sent.registry.add_unplanned(call("d", set(), SEGMENT))
    sent.reject_next(gone)
    assert sent.heard("d") == [gone]


def test_number_of_requests_under_way_is_bounded(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNDER_WAY", 2)
    requests = []
    for name in "abc":
        sent.registry.add_unplanned(call(name, set(), SEGMENT))
        requests.append(sent.outbox.next())
    first, second, third = requests
    assert first is not None
    assert second is not None
    assert third is None
    sent.outbox.accepted(first, SimpleNamespace(id=first.program.id))
    assert sent.outbox.next() is not None


def test_lost_connection_is_reported_by_an_error_of_the_client(sent: Sent) -> None:
    sent.registry.add_unplanned(call("a", set(), SEGMENT))
    sent.reject_next(RuntimeError("Cannot send a request, as the client has been closed."))
    (failure,) = sent.heard("a")
    assert isinstance(failure, UnavailableError)
    assert failure.code == "client.stream"


def test_a_value_observed_again_changes_no_planned_call(sent: Sent) -> None:
    """The server has the first value: a call that reads the second one must not match."""
    sent.registry.plan([call("a", {"v", "w"}, content("v"), content("w"))], {})
    sent.registry.set_values({"v": {"content": "first"}})
    sent.registry.set_values({"v": {"content": "second"}})
    sent.registry.set_values({"w": {"content": "w"}})
    text = {"text": "w"}
    assert not sent.registry.has_planned(node("a", {"text": "second"}, text))
    assert sent.registry.has_planned(node("a", {"text": "first"}, text))


def appended(sent: Sent) -> OutboxRequest:
    """Return an append of call `b` to the program of call `a`."""
    sent.registry.plan([call("a", set(), SEGMENT)])
    sent.accept_all()
    sent.registry.add_unplanned(call("b", set(), SEGMENT))
    append = sent.outbox.next()
    assert append is not None
    return append


@pytest.mark.parametrize(
    "failure",
    [
        ConflictError("session.ended", "it has ended"),
        ProgramError("quota.journal_bytes", "too much", status=413),
    ],
)
def test_calls_that_a_program_does_not_take_go_to_another_one(
    sent: Sent, failure: Exception
) -> None:
    append = appended(sent)
    sent.outbox.rejected(append, failure)
    sent.accept_all()
    again = sent.requests[-1]
    assert (again.action, [record.variable for record in again.records]) == ("submit", ["b"])
    assert sent.heard("b") == []
    sent.registry.on_event(committed("a", "A"))
    sent.outbox.end(is_cancelled=False)
    sent.accept_all()
    closed = [request.program for request in sent.requests if request.action == "close"]
    has_ended = failure.code == "session.ended"  # type: ignore[attr-defined]  # both have a code
    assert closed == ([again.program] if has_ended else [append.program, again.program])


def test_calls_of_a_program_that_lost_its_client_are_sent_again(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT), call("b", {"a"}, content("a"))])
    sent.accept_all()
    sent.registry.on_event(committed("a", "A"))
    lost = RunError("program.lease_lost", "no reader")
    sent.outbox.program_ended(sent.requests[0].program, lost, has_finished=True)
    sent.registry.add_unplanned(call("c", set(), SEGMENT))
    sent.accept_all()
    again = sent.requests[-1]
    assert (again.action, [record.variable for record in again.records]) == ("submit", ["b", "c"])
    assert again.body["inputs"] == {"a": {"content": "A"}}
    assert sent.heard("b") == sent.heard("c") == []


def test_a_late_rejection_does_not_affect_calls_that_were_sent_again(sent: Sent) -> None:
    append = appended(sent)
    lost = RunError("program.lease_lost", "no reader")
    sent.outbox.program_ended(append.program, lost, has_finished=True)
    sent.accept_all()
    program = sent.requests[-1].program
    sent.outbox.rejected(append, ConflictError("session.ended", "it has ended"))
    record = sent.registry.records["b"]
    assert (record.is_sent, record.program) == (True, program.id)
    assert sent.outbox.next() is None
    assert sent.heard("b") == []


def test_calls_go_to_another_program_if_events_cannot_be_read(sent: Sent) -> None:
    program = appended(sent).program
    unreachable = ServerUnreachableError("no answer")
    sent.outbox.program_ended(program, unreachable, has_finished=False)
    assert sent.heard("a") == sent.heard("b") == [unreachable]
    sent.registry.add_unplanned(call("c", set(), SEGMENT))
    again = sent.outbox.next()
    assert again is not None
    assert (again.action, [record.variable for record in again.records]) == ("submit", ["c"])


def test_a_program_that_is_stopped_ends_the_run(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT)])
    sent.accept_all()
    stopped = RunError("run.cancelled", "it was cancelled")
    sent.outbox.program_ended(sent.requests[0].program, stopped, has_finished=True)
    assert sent.heard("a") == [stopped]
    assert sent.registry.add_unplanned(call("b", set(), SEGMENT)).failure is stopped


def stop(sent: Sent, code: str) -> None:
    """Stop the first program as the server does: it kills the nodes first."""
    program = sent.outbox.programs[0]
    for name in "ab":
        killed = event("node.killed", node=f"{name}_call", code=code, message="stopped")
        sent.outbox.on_event(program, killed)
    finished = event("program.finished", status="cancelled", code=code, message="stopped")
    sent.outbox.program_ended(program, program_failure(finished), has_finished=True)


def claimed(sent: Sent) -> list[CallRecord]:
    """Return a planned call that the app has made and that has a text, and an unplanned call."""
    sent.registry.plan([call("a", set(), SEGMENT)])
    record = sent.registry.claim(node("z", SEGMENT))
    assert record is not None
    unplanned = sent.registry.add_unplanned(call("b", set(), SEGMENT))
    sent.accept_all()
    sent.registry.on_event(event("node.delta", variable="a", node="a_call", text="A", offset=0))
    return [record, unplanned]


def test_killed_calls_of_a_program_that_lost_its_client_continue(sent: Sent) -> None:
    claimed(sent)
    stop(sent, "program.lease_lost")
    sent.accept_all()
    first, again = sent.requests
    assert [record.variable for record in again.records] == ["a", "b"]
    assert seeds(first) == seeds(again)
    sent.registry.on_event(event("node.delta", variable="a", node="a_call", text="AA", offset=0))
    sent.registry.on_event(committed("b", "B"))
    assert [each.data["text"] for each in sent.heard("a")] == ["A", "AA"]  # type: ignore[union-attr]  # no error
    assert [each.type for each in sent.heard("b")] == ["variable.committed"]  # type: ignore[union-attr]  # no error


@pytest.mark.parametrize("may_grow", [True, False])
def test_killed_calls_of_a_program_that_is_stopped_are_not_sent_again(
    sent: Sent, may_grow: bool
) -> None:
    sent.outbox.may_grow = may_grow
    calls = claimed(sent)
    stop(sent, "program.cancelled")
    assert sent.requests[0].is_complete is not may_grow
    for record in calls:
        assert isinstance(record.failure, RunError)
        assert record.failure.code == "program.cancelled"
    sent.registry.add_unplanned(call("c", set(), SEGMENT))
    assert sent.outbox.next() is None


def test_an_answer_that_does_not_fit_is_made_once_more_in_another_program(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT)])
    sent.accept_all()
    failed = event("node.failed", node="a_call", code="quota.journal_bytes", message="too much")
    sent.outbox.on_event(sent.requests[0].program, failed)
    sent.accept_all()
    assert [request.action for request in sent.requests] == ["submit", "submit"]
    assert sent.heard("a") == []
    sent.outbox.on_event(sent.requests[1].program, failed)
    assert [each.code for each in sent.heard("a")] == ["quota.journal_bytes"]  # type: ignore[union-attr]  # an error


def seeds(request: OutboxRequest) -> list[Json]:
    return [each["output"].get("seed") for each in request.body["program"]["nodes"]]


def test_a_call_that_is_sent_again_keeps_its_seed(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT), call("b", set(), SEGMENT)])
    sent.accept_all()
    lost = RunError("program.lease_lost", "no reader")
    sent.outbox.program_ended(sent.requests[0].program, lost, has_finished=True)
    sent.accept_all()
    first, again = map(seeds, sent.requests)
    assert first == again
    assert None not in first
    assert first[0] != first[1]


def test_a_given_seed_is_sent_and_a_greedy_call_needs_none(sent: Sent) -> None:
    given = PlannedCall("", "a", node("a", SEGMENT, seed=7), frozenset())
    greedy = PlannedCall("", "b", node("b", SEGMENT, temperature=0.0), frozenset())
    sent.registry.plan([given, greedy])
    sent.accept_all()
    assert seeds(sent.requests[0]) == [7, None]


def test_an_output_in_a_prompt_gets_a_seed() -> None:
    segments = [{"text": "x"}, {"output": "a"}]
    text, output = seeded_node({"op": "generate", "prompt": segments}, 5)["prompt"]
    assert text == segments[0]
    assert output == seeded_node({"op": "generate", "prompt": segments}, 5)["prompt"][1]
    assert 0 <= output["seed"] < 2**SEED_BITS


def test_a_call_that_is_abandoned_is_killed_once_the_server_has_it(sent: Sent) -> None:
    record = sent.registry.add_unplanned(call("a", set(), SEGMENT))
    submission = sent.outbox.next()
    assert submission is not None
    for _ in range(2):
        sent.registry.release([record])
    assert sent.outbox.next() is None
    sent.outbox.accepted(submission, SimpleNamespace(id=submission.program.id))
    sent.accept_all()
    (kill,) = sent.requests
    assert kill.body == {
        "nodes": [{"id": "a_call_kill", "op": "kill", "targets": ["a"], "when": True}]
    }


def test_a_call_that_is_abandoned_before_it_is_sent_is_never_sent(sent: Sent) -> None:
    record = sent.registry.add_unplanned(call("a", set(), SEGMENT))
    sent.registry.release([record])
    assert sent.outbox.next() is None


def test_a_call_that_is_abandoned_is_not_sent_again(sent: Sent) -> None:
    abandoned = sent.registry.add_unplanned(call("a", set(), SEGMENT))
    awaited = sent.registry.add_unplanned(call("b", set(), SEGMENT))
    sent.accept_all()
    sent.registry.release([abandoned])
    sent.registry.send_again([abandoned, awaited])
    assert list(sent.registry.unsent) == [awaited]
    assert not abandoned.is_open


def test_a_call_that_has_ended_is_not_killed(sent: Sent) -> None:
    record = sent.registry.add_unplanned(call("a", set(), SEGMENT))
    sent.accept_all()
    sent.registry.on_event(committed("a", "A"))
    sent.registry.release([record])
    assert sent.outbox.next() is None


def test_a_program_is_cancelled_once_no_answer_is_awaited(sent: Sent) -> None:
    sent.registry.plan([call("a", set(), SEGMENT)])
    sent.registry.add_unplanned(call("b", set(), SEGMENT))
    sent.accept_all()
    sent.registry.add_unplanned(call("c", set(), SEGMENT))
    sent.outbox.end(is_cancelled=True, keeps_awaited=True)
    sent.accept_all()
    assert [request.action for request in sent.requests] == ["submit", "append", "close"]
    sent.registry.on_event(committed("b", "B"))
    assert sent.outbox.next() is None
    sent.registry.release([sent.registry.records["c"]])
    sent.accept_all()
    assert sent.requests[-1].action == "cancel"
