"""Retries, their delays, and the errors of replies."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from conure.adapters.client.exchange import models, procedures, programs
from conure.adapters.client.exchange.problems import (
    NotReadyError,
    ServerUnreachableError,
    error_of,
)
from conure.adapters.client.exchange.records import Reply, Request, Sleep
from conure.adapters.client.exchange.retry import GRACE_S, Retry
from conure.adapters.client.exchange.transfer import send
from conure.server.program import errors
from conure.server.program.ir import Options, Program, Submission
from conure.server.program.status import Accepted

RETRY = Retry(max_retries=2, base_delay_s=0.1, max_delay_s=5, noise=random.Random(0))
DONE = Reply(200, {}, b"{}")
BUSY = Reply(503, {"retry-after": "3"}, b"{}")


def drive(
    flow: Generator[Request | Sleep, Reply | None, Any], *answers: Reply | ServerUnreachableError
) -> tuple[Any, list[Request], list[float]]:
    """Run a flow against these replies; return its result, requests and sleeps."""
    requests: list[Request] = []
    pauses: list[float] = []
    left = list(answers)
    what = next(flow)
    while True:
        try:
            if isinstance(what, Sleep):
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


def refused_always(request: Request, retry: Retry, reply: Reply) -> tuple[int, float]:
    """Send a request that always gets this reply; return the requests and the seconds."""
    now_s, num_requests = 0.0, 0
    flow = send(request, replace(retry, clock=lambda: now_s))
    what = next(flow)
    with pytest.raises(StopIteration) as end:
        while True:
            if isinstance(what, Sleep):
                now_s += what.delay_s
                what = flow.send(None)
            else:
                num_requests += 1
                what = flow.send(reply)
    assert end.value.value == reply
    return num_requests, now_s


def lost(*, was_sent: bool = True) -> ServerUnreachableError:
    return ServerUnreachableError("lost", was_sent=was_sent)


def test_a_retry_respects_retry_after() -> None:
    reply, requests, pauses = drive(send(Request("POST", "/x"), RETRY), BUSY, BUSY, DONE)
    assert reply == DONE
    assert len(requests) == 3
    assert all(3 <= pause <= 3.2 for pause in pauses)


def test_retries_are_bounded() -> None:
    reply, requests, _ = drive(send(Request("GET", "/x"), RETRY), BUSY, BUSY, BUSY)
    assert reply == BUSY
    assert len(requests) == 3


FULL = Reply(429, {"retry-after": "3"}, b'{"code": "queue.full"}')


def test_a_program_that_a_busy_server_refuses_is_sent_again_for_minutes() -> None:
    retry = Retry(max_retries=1, refused_timeout_s=60, noise=random.Random(0))
    num_requests, now_s = refused_always(Request("POST", "/v1/programs"), retry, FULL)
    assert 19 <= num_requests <= 20
    assert now_s <= 60


def test_a_client_without_retries_is_refused_at_once() -> None:
    retry = Retry(max_retries=0)
    reply, requests, pauses = drive(send(Request("POST", "/v1/programs"), retry), FULL)
    assert (reply, len(requests), pauses) == (FULL, 1, [])


def test_a_long_retry_after_is_not_waited_for() -> None:
    hours = Reply(429, {"retry-after": "7200"}, b"{}")
    reply, requests, pauses = drive(send(Request("GET", "/x"), RETRY), hours)
    assert (reply, len(requests), pauses) == (hours, 1, [])


def test_delays_grow_with_jitter_up_to_a_bound() -> None:
    retry = Retry(base_delay_s=1, max_delay_s=3, noise=random.Random(1))
    for attempt, most in [(0, 1), (1, 2), (2, 3), (50, 3)]:
        delays = {retry.delay_s(attempt) for _ in range(50)}
        assert len(delays) > 40
        assert max(delays) <= most


class UnreachableServer:
    """A server that is unreachable until some time, and a clock that only sleeps advance."""

    def __init__(self, until_s: float, *, is_known: bool, seed: int = 0) -> None:
        self.now_s = 0.0
        self.num_tries = 0
        self._until_s = until_s
        self._is_known = is_known
        self._retry = Retry(clock=lambda: self.now_s, noise=random.Random(seed))

    def ask(self) -> Reply:
        flow = send(Request("GET", "/x"), self._retry)
        what = next(flow)
        while True:
            try:
                if isinstance(what, Sleep):
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
def test_a_restarting_server_is_waited_for(seed: int) -> None:
    server = UnreachableServer(until_s=12.0, is_known=True, seed=seed)
    assert server.ask() == DONE
    assert 12 <= server.now_s <= 14, "reached soon after its return"
    assert server.num_tries <= 20, "and not flooded before"


@pytest.mark.parametrize(("is_known", "after_s"), [(True, 15.0), (False, 2.0)])
def test_an_unreachable_server_times_out(is_known: bool, after_s: float) -> None:
    server = UnreachableServer(until_s=1e9, is_known=is_known)
    with pytest.raises(ServerUnreachableError):
        server.ask()
    assert server.now_s == pytest.approx(after_s), "the last try is at the timeout"


def test_clients_spread_their_reconnections() -> None:
    found = []
    for seed in range(50):
        server = UnreachableServer(until_s=5.0, is_known=True, seed=seed)
        server.ask()
        found.append(server.now_s)
    assert max(found) - min(found) > 1


def test_get_bounds_the_unreachable_timeout() -> None:
    now = [0.0]
    retry = Retry(clock=lambda: now[0])
    flow = programs.get("p", "x", retry, wait_s=3.0, clock=lambda: now[0])
    what = next(flow)
    with pytest.raises(ServerUnreachableError):
        while True:
            if isinstance(what, Sleep):
                now[0] += what.delay_s
                what = next(flow)
            else:
                what = flow.throw(ServerUnreachableError("gone"))
    assert now[0] == pytest.approx(3.0)


def test_a_call_with_a_time_limit_waits_no_longer_for_a_reply() -> None:
    now = [100.0]
    retry = Retry(clock=lambda: now[0]).from_now(5.0)
    flow = send(Request("GET", "/x"), retry)
    request = next(flow)
    assert isinstance(request, Request)
    assert request.timeout_s == 5.0 + GRACE_S
    now[0] = 106.0
    with pytest.raises(ServerUnreachableError):
        flow.throw(lost())
    assert retry.reply_timeout_s() == GRACE_S, "later requests of the same run"


def test_a_call_without_a_time_limit_has_the_timeouts_of_its_client() -> None:
    assert RETRY.from_now(None) is RETRY
    request = next(send(Request("GET", "/x"), RETRY))
    assert isinstance(request, Request)
    assert request.timeout_s is None


def test_zero_retries_never_wait() -> None:
    flow = send(Request("GET", "/x"), Retry(max_retries=0))
    next(flow)
    with pytest.raises(ServerUnreachableError):
        flow.throw(lost())


def test_only_repeatable_requests_are_sent_twice() -> None:
    with pytest.raises(ServerUnreachableError):
        drive(send(Request("POST", "/x", repeatable=False), RETRY), lost())
    for request, failure in [
        (Request("POST", "/x", repeatable=False), lost(was_sent=False)),
        (Request("PUT", "/x"), lost()),
    ]:
        reply, _, _ = drive(send(request, RETRY), failure, DONE)
        assert reply == DONE


def test_submit_retries_keep_the_idempotency_key() -> None:
    accepted = Accepted(id="p", status="accepted", outputs=[], url="/")
    answer = Reply(202, {}, msgspec.json.encode(accepted))
    made, requests, _ = drive(programs.submit({}, RETRY, key=None), lost(), BUSY, answer)
    assert made == accepted
    assert len({request.headers["Idempotency-Key"] for request in requests}) == 1
    _, others, _ = drive(programs.submit({}, RETRY, key=None), answer)
    assert others[0].headers != requests[0].headers


def test_a_long_wait_is_split_into_polls() -> None:
    now = [0.0]
    waits: list[float] = []

    def poll() -> None:
        what = next(flow)
        while isinstance(what, Request):
            waits.append(what.wait_s)
            now[0] += what.wait_s
            what = flow.send(Reply(202, {}, b'{"status":"waiting"}'))

    flow = programs.get("p", "x", RETRY, wait_s=50, clock=lambda: now[0])
    with pytest.raises(NotReadyError, match=r"variable 'x' is waiting after 50 s.*longer wait_s"):
        poll()
    assert waits == [20, 20, 10]


def test_a_failed_variable_is_not_retried() -> None:
    body = msgspec.json.encode(
        {"code": "server.draining", "detail": "gone", "variable_status": "failed"}
    )
    with pytest.raises(errors.UnavailableError, match="gone"):
        drive(programs.get("p", "x", RETRY, wait_s=None, clock=lambda: 0.0), Reply(503, {}, body))


def test_only_the_field_makes_a_503_final() -> None:
    body = msgspec.json.encode({"code": "server.starting", "detail": 'no "variable_status" yet'})
    reply, requests, _ = drive(send(Request("GET", "/x"), RETRY), Reply(503, {}, body), DONE)
    assert (reply, len(requests)) == (DONE, 2)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "program.cycle", errors.ProgramError),
        (400, "prompt.too_long", errors.PromptError),
        (404, "program.not_found", errors.NotFoundError),
        (409, "variable.committed", errors.ConflictError),
        (413, "language.too_large", errors.ProgramError),
        (422, "expr.json", errors.ExpressionError),
        (424, "run.killed", errors.RunError),
        (424, "prompt.too_long", errors.PromptError),
        (429, "queue.full", errors.UnavailableError),
        (503, "server.draining", errors.UnavailableError),
        (500, "server.internal", errors.ConureError),
    ],
)
def test_an_error_keeps_its_class(
    status: int, code: str, expected: type[errors.ConureError]
) -> None:
    body = {"code": code, "detail": "why", "path": "program.nodes[3]"}
    error = error_of(Reply(status, {"retry-after": "2"}, msgspec.json.encode(body)))
    assert type(error) is expected
    assert (error.code, error.message, error.path) == (code, "why", "program.nodes[3]")
    assert (error.status, error.retry_after_s) == (status, 2.0)


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"[1]", b'{"detail": 3}'])
def test_a_foreign_error_body_is_an_error(body: bytes) -> None:
    error = error_of(Reply(502, {}, body))
    assert error.code == "http.502"
    assert "answered with status 502" in error.message
    assert "<" not in error.message


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "no model x", "code": 404}}', b'{"error": "no model x"}']
)
def test_the_message_of_a_foreign_error_is_kept(body: bytes) -> None:
    error = error_of(Reply(404, {}, body))
    assert error.code == "http.404"
    assert "no model x" in error.message


def test_a_foreign_error_names_address_software_and_message() -> None:
    headers = {"content-type": "application/json; charset=utf-8", "server": "uvicorn"}
    url = "http://there:1/v1/programs"
    error = error_of(Reply(404, headers, b'{"detail": "Not Found"}', url=url))
    assert error.message == (
        f"{url} (uvicorn) answered with status 404, application/json and the message 'Not Found'; "
        "is this a Conure server? `conure serve` prints its address"
    )


@pytest.mark.parametrize("flow", [models.list_all, procedures.list_all])
@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[]"])
def test_a_success_of_another_server_is_an_error(flow: Any, body: bytes) -> None:
    with pytest.raises(errors.ConureError, match="is this a Conure server") as raised:
        drive(flow(RETRY), Reply(200, {}, body))
    assert raised.value.code == "client.answer"


def test_a_reply_of_another_server_is_named() -> None:
    with pytest.raises(errors.ConureError, match="is this a Conure server"):
        drive(programs.status("p", RETRY), Reply(200, {}, b"<html>"))


def test_submission_body_merges_its_arguments() -> None:
    program = Program(name="p")
    whole = Submission(program=program, inputs={"a": 1}, options=Options(trace=True))
    body = programs.submission_body(whole, inputs={"b": 2}, options={"deadline_s": 3.0})
    assert body["inputs"] == {"a": 1, "b": 2}
    assert body["options"] == {"trace": True, "deadline_s": 3.0}
    assert programs.submission_body({"name": "p"}) == {"program": {"name": "p"}}
    assert programs.submission_body({"program": program, "open": True})["open"] is True


def test_texts_to_embed_are_sent_in_requests_of_bounded_size() -> None:
    texts = ["a" * 40_000, "b" * 40_000, "c" * 100_000, *["d"] * 70]
    sent: list[list[str]] = []

    def answered(request: Request) -> Reply:
        batch = msgspec.json.decode(request.body or b"")["input"]
        sent.append(batch)
        assert request.wait_s == models.EMBEDDING_WAIT_S
        data = [{"embedding": [float(len(text))]} for text in batch]
        return Reply(200, {}, msgspec.json.encode({"data": data}))

    flow = models.embed(texts, RETRY, model="default", dimensions=None)
    step = next(flow)
    with pytest.raises(StopIteration) as stop:
        while True:
            assert isinstance(step, Request)
            step = flow.send(answered(step))
    assert [text for batch in sent for text in batch] == texts
    assert [len(batch) for batch in sent] == [1, 1, 1, 64, 6]
    assert stop.value.value == [[float(len(text))] for text in texts]


def test_a_function_that_was_not_called_is_no_program() -> None:
    def shop(report: str) -> str:
        return report

    with pytest.raises(TypeError, match=r"run\(shop\(...\)\)"):
        programs.submission_body(shop)  # type: ignore[arg-type]  # a mistake of a user


def test_a_short_wait_limits_the_sum_of_all_delays() -> None:
    retry = replace(RETRY, max_retries=9).within(10.0)
    _, now_s = refused_always(Request("GET", "/x"), retry, BUSY)
    assert 9 <= now_s <= 10


def test_a_short_wait_limits_all_retries() -> None:
    retry = Retry().within(3.0)
    assert (retry.unreachable_timeout_s, retry.refused_timeout_s) == (3, 3)
    assert retry.max_retry_after_s == 3
    assert Retry().within(0.0).max_retry_after_s == Retry().first_contact_timeout_s
    assert RETRY.within(1_000.0) == RETRY
