"""What may be repeated, how long it waits, and which error an answer stands for."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from conure.adapters import exchange
from conure.adapters.exchange import (
    NotReadyError,
    Pause,
    Reply,
    Request,
    Retry,
    ServerUnreachableError,
    repeat,
)
from conure.server.program import errors
from conure.server.program.ir import Options, Program, Submission
from conure.server.program.status import Accepted

RETRY = Retry(max_retries=2, first_s=0.1, most_s=5, noise=random.Random(0))
DONE = Reply(200, {}, b"{}")
BUSY = Reply(503, {"retry-after": "3"}, b"{}")


def drive(
    flow: Generator[Request | Pause, Reply | None, Any], *answers: Reply | ServerUnreachableError
) -> tuple[Any, list[Request], list[float]]:
    """Run a flow against these answers."""
    requests: list[Request] = []
    pauses: list[float] = []
    left = list(answers)
    what = next(flow)
    while True:
        try:
            if isinstance(what, Pause):
                pauses.append(what.delay_s)
                what = flow.send(None)
                continue
            requests.append(what)
            answer = left.pop(0)
            if isinstance(answer, ServerUnreachableError):
                what = flow.throw(answer)
            else:
                what = flow.send(answer)
        except StopIteration as end:
            return end.value, requests, pauses


def lost(*, was_sent: bool = True) -> ServerUnreachableError:
    return ServerUnreachableError("lost", was_sent=was_sent)


def test_a_refusal_is_repeated_no_sooner_than_it_asks_for() -> None:
    reply, requests, pauses = drive(repeat(Request("POST", "/x"), RETRY), BUSY, BUSY, DONE)
    assert reply == DONE
    assert len(requests) == 3
    assert all(3 <= pause <= 3.2 for pause in pauses)


def test_retries_come_to_an_end() -> None:
    reply, requests, _ = drive(repeat(Request("GET", "/x"), RETRY), BUSY, BUSY, BUSY)
    assert reply == BUSY
    assert len(requests) == 3


def test_a_wait_that_is_asked_too_long_is_not_waited_for() -> None:
    hours = Reply(429, {"retry-after": "7200"}, b"{}")
    reply, requests, pauses = drive(repeat(Request("GET", "/x"), RETRY), hours)
    assert (reply, len(requests), pauses) == (hours, 1, [])


def test_pauses_grow_are_jittered_and_bounded() -> None:
    retry = Retry(first_s=1, most_s=3, noise=random.Random(1))
    for attempt, most in [(0, 1), (1, 2), (2, 3), (50, 3)]:
        delays = {retry.delay_s(attempt) for _ in range(50)}
        assert len(delays) > 40
        assert max(delays) <= most


class Away:
    """A server that is out of reach until some time, and a clock that only waiting moves."""

    def __init__(self, until_s: float, *, is_known: bool, seed: int = 0) -> None:
        self.now_s = 0.0
        self.num_tries = 0
        self._until_s = until_s
        self._is_known = is_known
        self._retry = Retry(clock=lambda: self.now_s, noise=random.Random(seed))

    def ask(self) -> Reply:
        flow = repeat(Request("GET", "/x"), self._retry)
        what = next(flow)
        while True:
            try:
                if isinstance(what, Pause):
                    self.now_s += what.delay_s
                    what = flow.send(None)
                    continue
                self.num_tries += 1
                if self.now_s >= self._until_s:
                    what = flow.send(DONE)
                else:
                    gone = ServerUnreachableError("gone", is_known=self._is_known)
                    what = flow.throw(gone)
            except StopIteration as end:
                reply: Reply = end.value
                return reply


@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_is_started_again_is_waited_for(seed: int) -> None:
    server = Away(until_s=12.0, is_known=True, seed=seed)
    assert server.ask() == DONE
    assert 12 <= server.now_s <= 14, "it is found soon after it is back"
    assert server.num_tries <= 20, "and is not besieged before"


@pytest.mark.parametrize(("is_known", "after_s"), [(True, 15.0), (False, 2.0)])
def test_a_server_that_stays_away_is_given_up_in_time(is_known: bool, after_s: float) -> None:
    server = Away(until_s=1e9, is_known=is_known)
    with pytest.raises(ServerUnreachableError):
        server.ask()
    assert server.now_s == pytest.approx(after_s), "the last try is made when time is up"


def test_many_clients_do_not_come_back_at_once() -> None:
    found = []
    for seed in range(50):
        server = Away(until_s=5.0, is_known=True, seed=seed)
        server.ask()
        found.append(server.now_s)
    assert max(found) - min(found) > 1


def test_who_waits_for_a_value_waits_no_longer_for_the_server() -> None:
    now = [0.0]
    retry = Retry(clock=lambda: now[0])
    flow = exchange.get("p", "x", retry, wait_s=3.0, clock=lambda: now[0])
    what = next(flow)
    with pytest.raises(ServerUnreachableError):
        while True:
            if isinstance(what, Pause):
                now[0] += what.delay_s
                what = next(flow)
            else:
                what = flow.throw(ServerUnreachableError("gone"))
    assert now[0] == pytest.approx(3.0)


def test_without_retries_nobody_waits() -> None:
    flow = repeat(Request("GET", "/x"), Retry(max_retries=0))
    next(flow)
    with pytest.raises(ServerUnreachableError):
        flow.throw(lost())


def test_what_may_have_arrived_is_repeated_only_if_that_does_no_harm() -> None:
    with pytest.raises(ServerUnreachableError):
        drive(repeat(Request("POST", "/x", repeatable=False), RETRY), lost())
    for request, failure in [
        (Request("POST", "/x", repeatable=False), lost(was_sent=False)),
        (Request("PUT", "/x"), lost()),
    ]:
        reply, _, _ = drive(repeat(request, RETRY), failure, DONE)
        assert reply == DONE


def test_a_lost_submission_is_repeated_under_the_same_key() -> None:
    accepted = Accepted(id="p", status="accepted", outputs=[], url="/")
    answer = Reply(202, {}, msgspec.json.encode(accepted))
    made, requests, _ = drive(exchange.submit({}, RETRY, key=None), lost(), BUSY, answer)
    assert made == accepted
    assert len({request.headers["Idempotency-Key"] for request in requests}) == 1
    _, others, _ = drive(exchange.submit({}, RETRY, key=None), answer)
    assert others[0].headers != requests[0].headers


def test_a_long_wait_is_several_polls_and_ends_in_time() -> None:
    now = [0.0]
    waits: list[float] = []

    def poll() -> None:
        what = next(flow)
        while isinstance(what, Request):
            waits.append(what.wait_s)
            now[0] += what.wait_s
            what = flow.send(Reply(202, {}, b'{"status":"waiting"}'))

    flow = exchange.get("p", "x", RETRY, wait_s=50, clock=lambda: now[0])
    with pytest.raises(NotReadyError, match="'x' is waiting after 50 s"):
        poll()
    assert waits == [20, 20, 10]


def test_a_variable_that_failed_is_not_asked_for_again() -> None:
    body = msgspec.json.encode(
        {"code": "server.draining", "detail": "gone", "variable_status": "failed"}
    )
    with pytest.raises(errors.UnavailableError, match="gone"):
        drive(exchange.get("p", "x", RETRY, wait_s=None, clock=lambda: 0.0), Reply(503, {}, body))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "program.cycle", errors.ProgramError),
        (400, "prompt.too_long", errors.PromptError),
        (404, "program.not_found", errors.NotFoundError),
        (409, "variable.committed", errors.ConflictError),
        (422, "expr.json", errors.ExpressionError),
        (424, "run.killed", errors.RunError),
        (424, "prompt.too_long", errors.PromptError),
        (429, "queue.full", errors.UnavailableError),
        (503, "server.draining", errors.UnavailableError),
        (500, "server.internal", errors.ConureError),
    ],
)
def test_an_error_comes_back_as_the_class_it_left_as(
    status: int, code: str, expected: type[errors.ConureError]
) -> None:
    body = {"code": code, "detail": "why", "path": "program.nodes[3]"}
    error = exchange.error_of(Reply(status, {"retry-after": "2"}, msgspec.json.encode(body)))
    assert type(error) is expected
    assert (error.code, error.message, error.path) == (code, "why", "program.nodes[3]")
    assert (error.http_status, error.retry_after_s) == (status, 2.0)


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"[1]", b'{"detail": 3}'])
def test_an_error_of_somebody_else_is_still_an_error(body: bytes) -> None:
    error = exchange.error_of(Reply(502, {}, body))
    assert error.code == "http.502"
    assert error.message


def test_an_answer_of_another_server_is_told_as_such() -> None:
    with pytest.raises(errors.ConureError, match="is this a Conure server"):
        drive(exchange.status("p", RETRY), Reply(200, {}, b"<html>"))


def test_a_submission_is_a_program_with_what_is_said_beside_it() -> None:
    program = Program(name="p")
    whole = Submission(program=program, inputs={"a": 1}, options=Options(trace=True))
    body = exchange.submission_body(whole, inputs={"b": 2}, options={"deadline_s": 3.0})
    assert body["inputs"] == {"a": 1, "b": 2}
    assert body["options"] == {"trace": True, "deadline_s": 3.0}
    assert exchange.submission_body({"name": "p"}) == {"program": {"name": "p"}}
    assert exchange.submission_body({"program": program, "open": True})["open"] is True
