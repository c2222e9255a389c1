"""Both clients against a server that refuses requests, breaks connections and repeats events."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import anyio
import httpx
import pytest

from conure.adapters.client import (
    AsyncClient,
    Client,
    NotReadyError,
    Retry,
    Run,
    ServerUnreachableError,
)
from conure.adapters.client.cancellation import acancel_unless_completed, cancel_unless_completed
from conure.adapters.client.client_steps import ClientStepDeduplicator
from conure.adapters.client.connection import (
    STREAM_SILENCE_S,
    ClientSettings,
    EventReader,
    begins_event_stream,
    reply_of,
)
from conure.adapters.client.exchange.records import Request
from conure.adapters.client.exchange.retry import GRACE_S
from conure.server.program.errors import (
    ConflictError,
    ConureError,
    ExpressionError,
    NotFoundError,
    ProgramError,
    RunError,
    UnavailableError,
)
from conure.server.program.status import Event, EventType, Receipt

PROGRAM = "/v1/programs/p_1"


async def test_submit_retries_refusals_and_lost_replies(caller: Any, double: Any, kit: Any) -> None:
    busy = kit.Answer(429, kit.problem(429, "queue.full", "full"), {"Retry-After": "0"})
    double.on("POST", "/v1/programs", busy, kit.Answer(is_lost=True), kit.accepted())
    run = await caller.submit(inputs={"a": 1}, objectives={"out": "latency"}, open=True)
    assert (run.id, run.outputs) == ("p_1", ["out"])
    posts = double.of("POST", "/v1/programs")
    assert len({post.headers["idempotency-key"] for post in posts}) == 1
    assert [post.headers["content-type"] for post in posts] == ["application/json"] * 3
    assert (
        posts[0].body
        == posts[2].body
        == {
            "program": kit.program,
            "inputs": {"a": 1},
            "objectives": {"out": "latency"},
            "open": True,
        }
    )


async def test_an_invalid_program_raises_with_its_path(caller: Any, double: Any, kit: Any) -> None:
    problem = kit.problem(400, "program.cycle", "a -> b -> a", path="program.nodes[1]")
    double.on("POST", "/v1/programs", kit.Answer(400, problem))
    with pytest.raises(ProgramError, match="a -> b -> a") as caught:
        await caller.submit()
    assert (caught.value.code, caught.value.path) == ("program.cycle", "program.nodes[1]")
    assert len(double.seen) == 1


async def test_get_waits_for_a_value(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    waiting = kit.Answer(202, {"status": "running"})
    path = f"{PROGRAM}/variables/out"
    double.on("GET", path, waiting, waiting, kit.Answer(200, {"status": "done", "value": None}))
    assert await caller(run.get, "out") is None
    assert await caller(run.result) == {"out": None}


async def test_get_raises_for_late_and_missing_values(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    double.on("GET", f"{PROGRAM}/variables/slow", kit.Answer(202, {"status": "running"}))
    killed = kit.problem(424, "run.killed", "it was killed", variable_status="killed")
    double.on("GET", f"{PROGRAM}/variables/a%2Fb", kit.Answer(424, killed))
    double.on("GET", f"{PROGRAM}/variables/a/b", kit.Answer(424, killed))
    with pytest.raises(NotReadyError, match="'slow' is running"):
        await caller(run.get, "slow", wait_s=0)
    with pytest.raises(RunError, match="it was killed"):
        await caller(run.get, "a/b")
    with pytest.raises(NotFoundError):
        await caller(run.get, "unknown")


async def test_put_append_and_cancel_send_requests(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    double.on("PUT", f"{PROGRAM}/variables/x", kit.Answer(200, {"status": "done", "value": [1]}))
    double.on("POST", f"{PROGRAM}/nodes", kit.status("running"))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    assert (await caller(run.put, "x", [1], request_id="r")).value == [1]
    assert double.of("PUT", f"{PROGRAM}/variables/x")[0].body == {"value": [1], "request_id": "r"}
    assert (await caller(run.append, {"close": True})).status == "running"
    assert (await caller(run.cancel)).status == "cancelled"
    double.on("PUT", f"{PROGRAM}/variables/y", kit.Answer(409, kit.problem(409, "v.c", "stands")))
    with pytest.raises(ConflictError):
        await caller(run.put, "y", 2)


async def test_procedures_are_stored_and_run(caller: Any, double: Any, kit: Any) -> None:
    path = "/v1/procedures/sum"
    stored = {"name": "sum", "version": "0" * 32, "aliases": ["prod"]}
    double.on("PUT", path, kit.Answer(200, stored))
    text = "text: str\nreturn text"
    found = await caller(caller.client.store_procedure, "sum", text, alias="prod")
    assert (found.version, found.aliases) == ("0" * 32, ["prod"])
    assert double.of("PUT", path)[0].body == {"source": text, "alias": "prod"}
    double.on("PUT", f"{path}/aliases/prod", kit.Answer(200, stored))
    await caller(caller.client.move_alias, "sum", "prod", "0" * 32)
    assert double.of("PUT", f"{path}/aliases/prod")[0].body == {"version": "0" * 32}
    double.on("GET", "/v1/procedures", kit.Answer(200, {"procedures": [stored]}))
    assert [each.name for each in await caller(caller.client.procedures)] == ["sum"]
    double.on("POST", f"{path}/run", kit.accepted())
    run = await caller(caller.client.run_procedure, "sum", {"text": "tea"})
    assert run.id == "p_1"
    sent = double.of("POST", f"{path}/run")[0]
    assert sent.body == {"inputs": {"text": "tea"}, "options": {}}
    assert sent.headers["idempotency-key"]
    with pytest.raises(ExpressionError, match="nan is not a JSON number"):
        await caller(caller.client.run_procedure, "sum", {"text": math.nan})
    with pytest.raises(ProgramError, match="run_procedure"):
        await caller(caller.client.store_procedure, "sum", {"source": text, "inputs": {"a": 1}})


async def test_versions_and_aliases_of_procedures_are_removed(
    caller: Any, double: Any, kit: Any
) -> None:
    path = "/v1/procedures/sum"
    double.on("DELETE", f"{path}/aliases/prod", kit.Answer(204, b""))
    assert await caller(caller.client.remove_alias, "sum", "prod") is None
    double.on("DELETE", f"{path}@0", kit.Answer(204, b""))
    assert await caller(caller.client.remove_procedure, "sum@0") is None
    refusal = kit.problem(409, "procedure.in_use", "named by an alias")
    double.on("DELETE", f"{path}@1", kit.Answer(409, refusal))
    with pytest.raises(ConflictError, match="named by an alias"):
        await caller(caller.client.remove_procedure, "sum@1")


async def test_trace_is_read_line_by_line(caller: Any, double: Any, kit: Any) -> None:
    run = await attached(caller, double, kit)
    lines = b'{"name":"program"}\n{"name":"ask"}\n'
    double.on("GET", f"{PROGRAM}/trace", kit.Answer(200, lines))
    spans = await caller(run.trace, token_ids=True)
    assert [span["name"] for span in spans] == ["program", "ask"]
    assert double.of("GET", f"{PROGRAM}/trace")[0].query == "token_ids=true"


async def test_trace_that_ends_with_an_error_raises(caller: Any, double: Any, kit: Any) -> None:
    run = await attached(caller, double, kit)
    lines = b'{"name":"program"}\n{"error":{"code":"store.damaged","message":"no"}}\n'
    double.on("GET", f"{PROGRAM}/trace", kit.Answer(200, lines))
    with pytest.raises(ConureError) as raised:
        await caller(run.trace)
    assert raised.value.code == "store.damaged"


async def attached(caller: Any, double: Any, kit: Any) -> Any:
    double.on("GET", PROGRAM, kit.status("done"))
    return await caller(caller.client.attach, "p_1")


async def test_attach_returns_a_run_by_id(caller: Any, double: Any, kit: Any) -> None:
    double.on("GET", PROGRAM, kit.status("done", receipt={"calls": 4}))
    run = await caller(caller.client.attach, "p_1")
    assert run.outputs == ["out"]
    assert (await caller(run.receipt)).calls == 4


async def test_events_resume_after_a_broken_connection(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    delta = kit.sse(None, "node.delta", variable="out", text="ab", attempt=0, offset=0)
    queued, done = kit.sse(2, "node.queued", node="n"), kit.finished(9)
    busy = kit.Answer(503, kit.problem(503, "server.starting", "wait"), {"Retry-After": "0"})
    double.on(
        "GET",
        f"{PROGRAM}/events",
        kit.Answer(
            chunks=[kit.sse(1, "program.accepted", outputs=["out"]), delta[:9]], is_cut=True
        ),
        busy,
        kit.Answer(chunks=[delta, b": ping\n\n", queued[:7], queued[7:]], is_cut=True),
        kit.Answer(chunks=[kit.sse(None, "server.draining", program="p_1")]),
        kit.Answer(chunks=[queued, done]),
    )
    double.on("GET", PROGRAM, kit.status("running"))
    events = await caller.events(run)
    assert [event.seq for event in events if event.type != "server.draining"] == [1, None, 2, 9]
    queries = [seen.query for seen in double.of("GET", f"{PROGRAM}/events")]
    assert queries == ["after=0", "after=1", "after=1", "after=2", "after=2"]


async def test_submit_can_attach_the_events(caller: Any, double: Any, kit: Any) -> None:
    accepted = kit.sse(1, "program.accepted", outputs=["out"])
    double.on("POST", "/v1/programs", kit.followed(accepted, kit.finished(2)))
    run = await caller.submit(follow=True)
    assert (run.id, run.outputs) == ("p_1", ["out"])
    assert [event.seq for event in await caller.events(run)] == [1, 2]
    (post,) = double.seen
    assert (post.headers["accept"], post.query) == ("text/event-stream", "")
    # A second reader opens its own stream.
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[accepted, kit.finished(2)]))
    assert [event.seq for event in await caller.events(run)] == [1, 2]
    assert [seen.method for seen in double.seen] == ["POST", "GET"]


async def test_an_attached_stream_resumes_after_a_break(caller: Any, double: Any, kit: Any) -> None:
    accepted, queued = kit.sse(1, "program.accepted"), kit.sse(2, "node.queued", node="n")
    broken = kit.followed(accepted, queued[:9], is_cut=True)
    double.on("POST", "/v1/programs", kit.Answer(is_lost=True), broken)
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[queued, kit.finished(3)]))
    run = await caller.submit(follow=True)
    assert [event.seq for event in await caller.events(run)] == [1, 2, 3]
    assert [seen.query for seen in double.of("GET", f"{PROGRAM}/events")] == ["after=1"]
    assert len({post.headers["idempotency-key"] for post in double.of("POST", "/v1/programs")}) == 1


async def test_an_attached_stream_serves_only_matching_readers(
    caller: Any, double: Any, kit: Any
) -> None:
    accepted = kit.sse(1, "program.accepted")
    double.on("POST", "/v1/programs", kit.followed(accepted, kit.finished(2), gate=lambda: False))
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.finished(2)]))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    run = await caller.submit(follow=True, types=["variable.committed"])
    (post,) = double.seen
    assert post.query == "types=program.finished&types=variable.committed"
    assert [event.seq for event in await caller.events(run)] == [2], (
        "all types, so on another stream"
    )
    other = await caller.submit(follow=True)
    await caller(other.cancel)
    async with asyncio.timeout(60):
        while double.num_disconnects < 2:  # noqa: ASYNC110 - the double has no event for it
            await asyncio.sleep(0.001)


async def test_a_reader_of_past_events_does_not_wait_on_an_attached_stream(
    caller: Any, double: Any, kit: Any
) -> None:
    accepted = kit.sse(1, "program.accepted")
    double.on("POST", "/v1/programs", kit.followed(accepted, kit.finished(2), gate=lambda: False))
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[accepted]))
    run = await caller.submit(follow=True)
    assert [event.seq for event in await caller.events(run, follow=False)] == [1]
    assert "follow=false" in double.of("GET", f"{PROGRAM}/events")[0].query


async def test_a_submission_and_its_run_are_repeated_within_the_given_time(
    caller: Any, double: Any, kit: Any
) -> None:
    busy = kit.Answer(429, kit.problem(429, "queue.full", "full"), {"Retry-After": "0.001"})
    double.on("POST", "/v1/programs", busy, kit.accepted())
    with pytest.raises(UnavailableError, match="full"):
        await caller.submit(retry_within_s=0)
    run = await caller.submit(retry_within_s=0)
    double.on("GET", f"{PROGRAM}/events", kit.Answer(is_lost=True))
    with pytest.raises(ServerUnreachableError):
        await caller.events(run)
    assert len(double.of("GET", f"{PROGRAM}/events")) == 1


@pytest.mark.parametrize("problem", [ServerUnreachableError("gone"), RunError("x", "failed")])
async def test_a_program_on_a_lost_server_is_not_cancelled(problem: ConureError) -> None:
    cancelled = []

    async def acancel(*, timeout_s: float) -> None:
        cancelled.append("awaited")

    run: Any = SimpleNamespace(cancel=lambda *, timeout_s: cancelled.append("called"))
    with pytest.raises(type(problem)), cancel_unless_completed(run):
        raise problem
    run = SimpleNamespace(cancel=acancel)
    with pytest.raises(type(problem)):
        async with acancel_unless_completed(run):
            raise problem
    is_lost = isinstance(problem, ServerUnreachableError)
    assert cancelled == ([] if is_lost else ["called", "awaited"])


async def test_a_program_is_cancelled_although_its_caller_is_cancelled_at_each_await(
    double: Any, kit: Any
) -> None:
    accepted = kit.sse(1, "program.accepted")
    double.on("POST", "/v1/programs", kit.followed(accepted, kit.finished(2), gate=lambda: False))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    async with AsyncClient(app=double) as client:
        run = await client.submit(kit.program, follow=True)
        with anyio.CancelScope() as scope:
            async with acancel_unless_completed(run):
                scope.cancel()
                await asyncio.Event().wait()
    assert len(double.of("DELETE", PROGRAM)) == 1


async def test_events_are_requested_if_none_are_attached(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.finished(2)]))
    run = await caller.submit(follow=True)
    assert (run.id, run.outputs) == ("p_1", ["out"])
    assert [event.seq for event in await caller.events(run)] == [2]


async def test_an_attached_result_needs_only_the_outputs(
    caller: Any, double: Any, kit: Any
) -> None:
    value = kit.sse(1, "variable.committed", variable="out", value=7)
    endless = kit.followed(value, kit.finished(2), gate=lambda: False)
    double.on("POST", "/v1/programs", endless, kit.followed(value + kit.finished(2)))
    async with asyncio.timeout(60):
        run = await caller.submit(follow=True)
        assert await caller(run.result) == {"out": 7}
        while double.num_disconnects < 1:  # noqa: ASYNC110 - the double has no event for it
            await asyncio.sleep(0.001)
        run = await caller.submit(follow=True)
        assert await caller(run.result) == {"out": 7}
    assert [seen.method for seen in double.seen] == ["POST"] * 2


@pytest.mark.parametrize("end", ["node.failed", "node.skipped", "node.killed"])
async def test_an_attached_result_ends_with_a_failure(
    caller: Any, double: Any, kit: Any, end: str
) -> None:
    # An open program does not end with its nodes.
    failed = kit.sse(1, end, node="n", code="expr.type", message="no")
    double.on("POST", "/v1/programs", kit.followed(failed, kit.finished(2), gate=lambda: False))
    problem = {"code": "expr.type", "detail": "no", "status": 422}
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(422, problem))
    async with asyncio.timeout(60):
        run = await caller.submit(follow=True)
        with pytest.raises(ConureError) as caught:
            await caller(run.result)
    assert caught.value.code == "expr.type"


async def test_an_attached_stream_must_name_its_program(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.Answer(202, chunks=[kit.finished(2)]))
    with pytest.raises(ConureError) as caught:
        await caller.submit(follow=True)
    assert caught.value.code == "client.answer"


@pytest.mark.parametrize(("limit_s", "silence_s"), [(None, STREAM_SILENCE_S), (7.0, 7.0)])
def test_an_event_stream_extends_the_read_timeout(limit_s: float | None, silence_s: float) -> None:
    headers = {"content-type": "text/event-stream", "location": PROGRAM}
    transport = httpx.MockTransport(lambda _: httpx.Response(202, headers=headers))
    settings = ClientSettings("http://there", app=None, timeout_s=2, retry=None, headers=None)
    request = Request("POST", "/v1/programs", accepts_stream=True)
    with httpx.Client(base_url=settings.base_url, transport=transport) as http:
        sent = http.build_request(**settings.request_arguments(request))
        assert sent.extensions["timeout"]["read"] == 2
        with contextlib.closing(http.send(sent, stream=True)) as response:
            assert begins_event_stream(response, limit_s)
            assert response.request.extensions["timeout"]["read"] == silence_s


def test_the_time_limit_of_a_call_limits_its_requests_and_streams() -> None:
    settings = ClientSettings(None, app=None, timeout_s=30, retry=None, headers=None)
    request = Request("GET", "/x", wait_s=20.0, timeout_s=7.0)
    assert settings.request_arguments(request)["timeout"].read == 7
    assert settings.request_arguments(request._replace(timeout_s=None))["timeout"].read == 50
    retry = Retry(clock=lambda: 0.0).from_now(5.0)
    stream = EventReader(settings, "p", 0, None, retry=retry).stream_arguments()
    assert stream["timeout"].read == 5 + GRACE_S


async def test_an_invalid_program_raises_with_follow_too(
    caller: Any, double: Any, kit: Any
) -> None:
    problem = kit.problem(400, "program.cycle", "a -> b -> a", path="program.nodes[1]")
    double.on("POST", "/v1/programs", kit.Answer(400, problem))
    with pytest.raises(ProgramError, match="a -> b -> a"):
        await caller.submit(follow=True)


def test_a_ping_resets_the_outage_timer() -> None:
    now = [0.0]
    retry = Retry(unreachable_timeout_s=15, clock=lambda: now[0])
    settings = ClientSettings(None, app=None, timeout_s=5, retry=retry, headers=None)
    settings.is_known = True
    reader = EventReader(settings, "p", 0, None)
    reader.on_disconnect(httpx.ReadError("cut"))
    reader.stream_arguments()
    reader.feed(b": ping\n\n")
    now[0] = 3600
    reader.on_disconnect(httpx.ReadError("cut again, after an hour"))
    assert reader.next_delay_s() > 0
    now[0] += 15
    with pytest.raises(ServerUnreachableError):
        reader.on_disconnect(httpx.ReadError("cut, with no byte in between"))


def test_connections_without_events_do_not_count_as_refusals() -> None:
    settings = ClientSettings(None, app=None, timeout_s=5, retry=Retry(max_retries=1), headers=None)
    reader = EventReader(settings, "p", 0, None)
    for _ in range(5):
        reader.stream_arguments()
        reader.feed(b": ping\n\n")
        assert reader.next_delay_s() > 0
    refusal = reply_of(httpx.Response(503, request=httpx.Request("GET", "http://x/")), b"")
    reader.on_refusal(refusal)
    with pytest.raises(UnavailableError):
        reader.on_refusal(refusal)


def test_an_empty_type_selection_is_not_all_types() -> None:
    settings = ClientSettings(None, app=None, timeout_s=5, retry=None, headers=None)
    selections: list[list[EventType] | None] = [None, [], ["node.delta"]]
    queries = [
        EventReader(settings, "p", 0, types).stream_arguments()["params"].get("types")
        for types in selections
    ]
    assert queries == [None, ["program.finished"], ["node.delta", "program.finished"]]


async def test_events_of_an_ended_program_end(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[]))
    double.on("GET", PROGRAM, kit.status("running"), kit.status("done"))
    assert await caller.events(run, 9) == []
    # One connection while the program ran, one before its status was read, and one after.
    assert len(double.of("GET", f"{PROGRAM}/events")) == 3


async def test_events_between_an_empty_connection_and_the_end_are_read(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    last = [kit.committed({"content": "late"})]
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[]), kit.Answer(chunks=last))
    double.on("GET", PROGRAM, kit.status("done"))
    types = [event.type for event in await caller.events(run)]
    assert types == ["variable.committed", "program.finished"]


async def test_events_raise_final_errors(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    with pytest.raises(NotFoundError):
        await caller.events(run)
    double.on("GET", f"{PROGRAM}/events", kit.Answer(is_lost=True))
    with pytest.raises(ServerUnreachableError):
        await caller.events(run)
    long = kit.Answer(503, kit.problem(503, "server.full", "full"), {"Retry-After": "9999"})
    double.on("GET", f"{PROGRAM}/events", long)
    with pytest.raises(UnavailableError, match="full"):
        await caller.events(run)


def requested(kit: Any, seq: int, request: str, name: str = "double", **args: Any) -> bytes:
    wire: bytes = kit.sse(
        seq,
        "client.requested",
        node="s",
        name=name,
        args=args,
        output="out",
        request_id=request,
        attempt=0,
    )
    return wire


def put_bodies(double: Any) -> list[Any]:
    return [seen.body for seen in double.of("PUT", f"{PROGRAM}/variables/out")]


def has_answer(double: Any) -> Any:
    return lambda: bool(put_bodies(double))


async def test_a_run_and_its_receipt_do_not_request_streamed_text(
    caller: Any, double: Any, kit: Any
) -> None:
    committed = kit.sse(2, "variable.committed", variable="out", value=42)
    double.on("POST", "/v1/programs", kit.followed(committed, kit.finished(3)), kit.accepted())
    assert (await caller(caller.client.run, kit.program)).outputs == {"out": 42}
    (post,) = double.seen
    assert set(parse_qs(post.query)["types"]) == {
        *("client.requested", "node.failed", "program.finished", "variable.committed"),
    }
    double.on("GET", PROGRAM, kit.status("running"), kit.status("done", receipt={"calls": 4}))
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.finished(3)]))
    run = await caller.submit()
    assert (await caller(run.receipt)).calls == 4
    assert double.of("GET", f"{PROGRAM}/events")[0].query == "after=0&types=program.finished"


async def test_a_repeated_step_request_runs_once(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    ask = requested(kit, 2, "r1", n=21)
    double.on(
        "GET",
        f"{PROGRAM}/events",
        kit.Answer(chunks=[ask], is_cut=True),
        # A restarted server may reuse sequence numbers of events that it lost.
        kit.Answer(
            chunks=[
                requested(kit, 3, "r1", n=21),
                kit.sse(4, "variable.committed", variable="out", value=42),
                kit.finished(5),
            ],
            gate=has_answer(double),
        ),
    )
    lost = kit.Answer(is_lost=True)
    double.on("PUT", f"{PROGRAM}/variables/out", lost, kit.Answer(200, {"status": "done"}))
    calls = []

    def twice(n: int) -> int:
        calls.append(n)
        return 2 * n

    result = await caller(caller.client.run, kit.program, functions={"double": twice})
    assert result.outputs == {"out": 42}
    assert result.status == "done"
    assert result.receipt == Receipt(calls=1)
    assert calls == [21]
    assert put_bodies(double)[-1] == {"value": 42, "request_id": "r1"}


async def test_attach_does_not_repeat_ended_steps(caller: Any, double: Any, kit: Any) -> None:
    variables = {"out": {"status": "done", "value": 4}}
    double.on("GET", PROGRAM, kit.status("done", variables=variables, receipt={"calls": 0}))
    committed = kit.sse(3, "variable.committed", variable="out", value=4)
    stream = kit.Answer(chunks=[requested(kit, 2, "r", n=2), committed, kit.finished(4)])
    double.on("GET", f"{PROGRAM}/events", stream)
    run = await caller(caller.client.attach, "p_1")
    result = await caller(run.serve_client_steps, {"double": lambda n: 1 / 0})
    assert result.outputs == {"out": 4}
    assert put_bodies(double) == []


async def test_attach_runs_no_expired_attempt(caller: Any, double: Any, kit: Any) -> None:
    nodes = {"s": {"status": "running", "attempt": 1}}
    double.on("GET", PROGRAM, kit.status("running", nodes=nodes))
    request = {"node": "s", "name": "f", "args": {}, "output": "out"}
    attempts = [
        kit.sse(
            2 + attempt, "client.requested", **request, request_id=f"r{attempt}", attempt=attempt
        )
        for attempt in (0, 1)
    ]
    stream = kit.Answer(chunks=[*attempts, kit.finished(4)], gate=has_answer(double))
    double.on("GET", f"{PROGRAM}/events", stream)
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done", "value": 1}))
    run = await caller(caller.client.attach, "p_1")
    await caller(run.serve_client_steps, {"f": lambda: 1})
    assert [body["request_id"] for body in put_bodies(double)] == ["r1"]


def test_a_step_without_an_answer_can_be_claimed_again() -> None:
    deduplicator = ClientStepDeduplicator()
    data = {"request_id": "r", "node": "n", "name": "f", "output": "out", "args": {}}
    requested_step = Event(1, "client.requested", data)

    def serve(*, begins: bool, has_answer: bool) -> bool:
        """Serve the program once; return whether the step is requested."""
        session = deduplicator.open("p", ["out"])
        step = session.on_event(requested_step, {})
        if step is not None and begins:
            session.begin(step)
            if not has_answer:
                session.release(step)
        session.close()
        deduplicator.close("p")
        return step is not None

    assert serve(begins=False, has_answer=False)
    assert serve(begins=True, has_answer=False)
    assert serve(begins=True, has_answer=True)
    assert not serve(begins=True, has_answer=True)


async def test_a_cancelled_step_runs_when_the_program_is_served_again(
    double: Any, kit: Any
) -> None:
    ask = requested(kit, 2, "r", n=21)
    double.on("GET", PROGRAM, kit.status("running"), kit.status("running"), kit.status("done"))
    double.on(
        "GET",
        f"{PROGRAM}/events",
        kit.Answer(chunks=[ask, kit.finished(3)], gate=lambda: False),
        kit.Answer(chunks=[ask, kit.finished(3)], gate=has_answer(double)),
    )
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done", "value": 42}))
    has_begun = asyncio.Event()

    async def endless(n: int) -> int:
        has_begun.set()
        await asyncio.Event().wait()
        return n

    async with AsyncClient(app=double) as client, asyncio.timeout(60):
        run = await client.attach("p_1")
        serving = asyncio.create_task(run.serve_client_steps({"double": endless}))
        await has_begun.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        run = await client.attach("p_1")
        result = await run.serve_client_steps({"double": lambda n: 2 * n})
    assert result.outputs == {"out": 42}


async def _later(n: int) -> int:
    await asyncio.sleep(0)
    return n + 6


class _Later:
    async def __call__(self, n: int) -> int:
        return await _later(n)


@pytest.mark.parametrize("function", [_later, lambda n: _later(n), _Later()])
async def test_a_step_can_return_an_awaitable(
    function: Any, caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    stream = kit.Answer(
        chunks=[requested(kit, 2, "r", n=1), kit.finished(5)], gate=has_answer(double)
    )
    double.on("GET", f"{PROGRAM}/events", stream)
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done", "value": 7}))

    result = await caller(caller.client.run, kit.program, functions={"double": function})
    assert put_bodies(double)[0]["value"] == 7
    assert result.outputs == {"out": 7}, "requested, as no event reported it"


@pytest.mark.parametrize("make", [lambda n: 1 / 0, lambda n: object(), lambda n: next(iter(()))])
async def test_a_function_error_reaches_server_and_caller(
    caller: Any, double: Any, kit: Any, make: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    failed = kit.sse(3, "node.failed", node="s", code="client.failed", message="double: oh")
    chunks = [requested(kit, 2, "r", n=1), failed + kit.finished(4, "failed")]
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "failed"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(424, kit.problem(424, "c.f", "x")))
    with pytest.raises(RunError, match="double: oh") as caught:
        await caller(caller.client.run, kit.program, functions={"double": make})
    assert isinstance(caught.value.__cause__, ZeroDivisionError | TypeError | RuntimeError)
    error = put_bodies(double)[0]["error"]
    assert error["code"] == "client.failed"
    assert error["message"].startswith(f"double: {type(caught.value.__cause__).__name__}")


USER = ContextVar("USER", default="nobody")


async def test_a_step_has_the_context_of_its_run(caller: Any, double: Any, kit: Any) -> None:
    chunks = [requested(kit, 2, "r", n=1), kit.finished(5)]
    double.on("POST", "/v1/programs", kit.followed(*chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done", "value": 7}))
    USER.set("alice")
    await caller(caller.client.run, kit.program, functions={"double": lambda n: USER.get()})
    assert put_bodies(double)[0]["value"] == "alice"


async def cancel_itself(n: int) -> None:
    task = asyncio.create_task(asyncio.sleep(n))
    task.cancel()
    await task


@pytest.mark.parametrize("function", [cancel_itself, lambda n: pytest.skip("no")])
async def test_a_function_that_raises_no_exception_fails_its_step(
    caller: Any, double: Any, kit: Any, function: Any
) -> None:
    failed = kit.sse(3, "node.failed", node="s", code="client.failed", message="double: oh")
    chunks = [requested(kit, 2, "r", n=1), failed + kit.finished(4, "failed")]
    double.on("POST", "/v1/programs", kit.followed(*chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "failed"}))
    async with asyncio.timeout(60):
        with pytest.raises(RunError, match="double: oh") as caught:
            await caller(caller.client.run, kit.program, functions={"double": function})
    assert not isinstance(caught.value.__cause__, Exception)
    assert put_bodies(double)[0]["error"]["code"] == "client.failed"


def test_an_exit_in_a_thread_of_client_steps_fails_the_step(double: Any, kit: Any) -> None:
    failed = kit.sse(3, "node.failed", node="s", code="client.failed", message="double: oh")
    chunks = [requested(kit, 2, "r", n=1), failed + kit.finished(4, "failed")]
    double.on("POST", "/v1/programs", kit.followed(*chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "failed"}))
    with Client(app=double) as client, pytest.raises(RunError, match="double: oh") as caught:
        client.run(kit.program, functions={"double": lambda n: sys.exit(n)})
    assert isinstance(caught.value.__cause__, SystemExit)


async def test_a_rejected_value_fails_its_step(caller: Any, double: Any, kit: Any) -> None:
    failed = kit.sse(3, "node.failed", node="s", code="request.invalid", message="too deep")
    chunks = [requested(kit, 2, "r", n=1), failed + kit.finished(4, "failed")]
    double.on(
        "POST", "/v1/programs", kit.followed(*chunks, gate=lambda: len(put_bodies(double)) > 1)
    )
    refused = kit.Answer(400, kit.problem(400, "request.invalid", "too deep"))
    double.on("PUT", f"{PROGRAM}/variables/out", refused, kit.Answer(200, {"status": "failed"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(424, kit.problem(424, "c.f", "x")))
    with pytest.raises(RunError, match="too deep") as caught:
        await caller(caller.client.run, kit.program, functions={"double": lambda n: [[n]]})
    assert isinstance(caught.value.__cause__, ProgramError)
    assert [list(body) for body in put_bodies(double)] == [
        ["value", "request_id"],
        ["error", "request_id"],
    ]
    assert put_bodies(double)[1]["error"]["code"] == "request.invalid"


async def test_run_rejects_steps_without_functions(caller: Any, double: Any) -> None:
    program = {"nodes": [{"id": "s", "op": "client", "name": "search", "output": "x"}]}
    with pytest.raises(ProgramError, match="'search'") as caught:
        await caller(caller.client.run, program, functions={"fetch": print})
    assert caught.value.code == "client.no_function"
    assert double.seen == []


async def test_attached_client_leaves_steps_without_function_to_others(
    caller: Any, double: Any, kit: Any
) -> None:
    run = await attached(caller, double, kit)
    double.on("GET", PROGRAM, kit.status("running"))
    chunks = [requested(kit, 2, "r", name="of another client"), kit.finished(4)]
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=chunks))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done", "value": 1}))
    result = await caller(run.serve_client_steps, {"double": print})
    assert result.outputs == {"out": 1}
    assert put_bodies(double) == []


async def test_step_of_a_submitted_text_without_function_fails(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("GET", PROGRAM, kit.status("running"))
    chunks = [requested(kit, 2, "r", name="stock"), kit.finished(4, "failed")]
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "failed"}))
    with pytest.raises(RunError):
        await caller(caller.client.run, "out = client('stock')\nreturn out")
    assert put_bodies(double)[0]["error"]["code"] == "client.no_function"


async def test_outputs_of_an_append_belong_to_the_result(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("POST", f"{PROGRAM}/nodes", kit.status("running"))
    run = await caller(caller.client.submit, {"nodes": []}, open=True)
    run.outputs = []
    await caller(run.append, {"outputs": ["out"]})
    assert run.outputs == ["out"]


@pytest.mark.parametrize("text", ["x: int\nreturn x", "return gen('hi')"])
async def test_text_can_be_explained(caller: Any, double: Any, kit: Any, text: str) -> None:
    double.on(
        "POST", "/v1/programs/explain", kit.Answer(400, kit.problem(400, "seen", "it arrived"))
    )
    with pytest.raises(ProgramError, match="it arrived"):
        await caller(caller.client.explain, text)


async def test_text_that_is_json_is_refused(caller: Any) -> None:
    with pytest.raises(TypeError, match="pass the object"):
        await caller(caller.client.submit, '{"nodes": []}')


async def test_an_appended_step_without_function_fails(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    chunks = [requested(kit, 2, "r", name="new"), kit.finished(4, "failed")]
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "failed"}))
    with pytest.raises(RunError):
        await caller(caller.client.run, kit.program)
    assert put_bodies(double)[0]["error"]["code"] == "client.no_function"


def test_an_interrupted_run_cancels_its_program(
    double: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Run, functions: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "serve_client_steps", interrupt)
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    with Client(app=double) as client, pytest.raises(KeyboardInterrupt):
        client.run(kit.program)
    assert len(double.of("DELETE", PROGRAM)) == 1


async def test_a_run_that_is_interrupted_while_it_submits_is_cancelled(
    caller: Any, double: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise Interrupt

    monkeypatch.setattr(type(caller.client._settings), "unreachable", interrupt)
    double.on("POST", "/v1/programs", kit.Answer(is_lost=True))
    with pytest.raises(Interrupt):
        await caller(caller.client.run, kit.program)
    program = double.of("POST", "/v1/programs")[0].body["id"]
    assert len(double.of("DELETE", f"/v1/programs/{program}")) == 1


async def test_a_run_whose_client_was_closed_raises_its_interruption(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    never = kit.Answer(chunks=[requested(kit, 2, "r", n=1), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    started = asyncio.Event()

    async def forever(n: int) -> None:
        started.set()
        await asyncio.Event().wait()

    client = AsyncClient(app=double)
    task = asyncio.create_task(client.run(kit.program, functions={"double": forever}))
    await started.wait()
    client._settings.is_closed = True
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()


async def test_a_cancelled_coroutine_cancels_its_program(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    never = kit.Answer(chunks=[requested(kit, 2, "r", n=1), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    started = asyncio.Event()

    async def forever(n: int) -> None:
        started.set()
        await asyncio.Event().wait()

    async with AsyncClient(app=double) as client:
        task = asyncio.create_task(client.run(kit.program, functions={"double": forever}))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(double.of("DELETE", PROGRAM)) == 1


def test_one_client_serves_many_threads(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done", "value": 1}))
    values: list[Any] = []
    with Client(app=double) as client:

        def work() -> None:
            values.extend(client.submit(kit.program).get("out") for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert values == [1] * 40


def test_one_async_client_serves_several_loops(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())

    async def submit(client: AsyncClient) -> str:
        async with client:
            return (await client.submit(kit.program)).id

    with Client(app=double) as owner:
        client = owner.asynchronous()
        assert [asyncio.run(submit(client)) for _ in range(2)] == ["p_1", "p_1"]
    assert double.lifespan == ["startup", "shutdown"]


def test_an_unreachable_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONURE_URL", "http://127.0.0.1:9")
    with (
        Client(retry=Retry(first_contact_timeout_s=0.01)) as client,
        pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:9.*conure serve"),
    ):
        client.submit({"nodes": []})


def test_importing_the_client_loads_no_heavy_module() -> None:
    code = (
        "import sys, conure.adapters.client.sync_client; "
        "heavy = {'langchain_core', 'torch', 'litestar', 'pydantic', 'numpy'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
