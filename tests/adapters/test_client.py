"""Both clients against a server that refuses, breaks, repeats itself and forgets."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from typing import Any

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
from conure.adapters.connection import STREAM_SILENCE_S, Follower, Settings, is_stream
from conure.adapters.exchange import Request
from conure.server.program.errors import (
    ConflictError,
    ConureError,
    NotFoundError,
    ProgramError,
    RunError,
    UnavailableError,
)
from conure.server.program.status import EventType, Receipt

PROGRAM = "/v1/programs/p_1"


async def test_a_submission_gets_through_refusals_and_lost_answers(
    caller: Any, double: Any, kit: Any
) -> None:
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


async def test_a_refused_program_is_an_error_with_its_place(
    caller: Any, double: Any, kit: Any
) -> None:
    problem = kit.problem(400, "program.cycle", "a -> b -> a", path="program.nodes[1]")
    double.on("POST", "/v1/programs", kit.Answer(400, problem))
    with pytest.raises(ProgramError, match="a -> b -> a") as caught:
        await caller.submit()
    assert (caught.value.code, caught.value.path) == ("program.cycle", "program.nodes[1]")
    assert len(double.seen) == 1


async def test_a_value_is_waited_for(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    waiting = kit.Answer(202, {"status": "running"})
    path = f"{PROGRAM}/variables/out"
    double.on("GET", path, waiting, waiting, kit.Answer(200, {"status": "done", "value": None}))
    assert await caller(run.get, "out") is None
    assert await caller(run.result) == {"out": None}


async def test_a_value_that_takes_too_long_or_never_comes_is_an_error(
    caller: Any, double: Any, kit: Any
) -> None:
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


async def test_values_nodes_and_the_end_can_be_sent(caller: Any, double: Any, kit: Any) -> None:
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


async def test_a_program_can_be_taken_up_by_its_id(caller: Any, double: Any, kit: Any) -> None:
    double.on("GET", PROGRAM, kit.status("done", receipt={"calls": 4}))
    run = await caller(caller.client.attach, "p_1")
    assert run.outputs == ["out"]
    assert (await caller(run.receipt)).calls == 4


async def test_events_go_on_where_the_connection_broke(caller: Any, double: Any, kit: Any) -> None:
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
    asked = [seen.query for seen in double.of("GET", f"{PROGRAM}/events")]
    assert asked == ["after=0", "after=1", "after=1", "after=2", "after=2"]


async def test_a_submission_can_be_answered_by_its_events(
    caller: Any, double: Any, kit: Any
) -> None:
    accepted = kit.sse(1, "program.accepted", outputs=["out"])
    double.on("POST", "/v1/programs", kit.followed(accepted, kit.finished(2)))
    run = await caller.submit(follow=True)
    assert (run.id, run.outputs) == ("p_1", ["out"])
    assert [event.seq for event in await caller.events(run)] == [1, 2]
    (post,) = double.seen
    assert (post.headers["accept"], post.query) == ("text/event-stream", "")
    # Once they are read, they are asked for as others are.
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[accepted, kit.finished(2)]))
    assert [event.seq for event in await caller.events(run)] == [1, 2]
    assert [seen.method for seen in double.seen] == ["POST", "GET"]


async def test_an_answer_of_events_goes_on_where_it_broke(
    caller: Any, double: Any, kit: Any
) -> None:
    accepted, queued = kit.sse(1, "program.accepted"), kit.sse(2, "node.queued", node="n")
    broken = kit.followed(accepted, queued[:9], is_cut=True)
    double.on("POST", "/v1/programs", kit.Answer(is_lost=True), broken)
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[queued, kit.finished(3)]))
    run = await caller.submit(follow=True)
    assert [event.seq for event in await caller.events(run)] == [1, 2, 3]
    assert [seen.query for seen in double.of("GET", f"{PROGRAM}/events")] == ["after=1"]
    assert len({post.headers["idempotency-key"] for post in double.of("POST", "/v1/programs")}) == 1


async def test_only_who_reads_what_was_asked_for_gets_the_answer(
    caller: Any, double: Any, kit: Any
) -> None:
    accepted = kit.sse(1, "program.accepted")
    double.on("POST", "/v1/programs", kit.followed(accepted, kit.finished(2), gate=lambda: False))
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.finished(2)]))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    run = await caller.submit(follow=True, types=["variable.committed"])
    (post,) = double.seen
    assert post.query == "types=program.finished&types=variable.committed"
    assert [event.seq for event in await caller.events(run)] == [2], "all types, on another stream"
    other = await caller.submit(follow=True)
    await caller(other.cancel)
    async with asyncio.timeout(5):
        while double.num_disconnects < 2:  # noqa: ASYNC110 - a double has no event for it
            await asyncio.sleep(0.001)


async def test_a_server_that_only_takes_programs_is_asked_for_their_events(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.finished(2)]))
    run = await caller.submit(follow=True)
    assert (run.id, run.outputs) == ("p_1", ["out"])
    assert [event.seq for event in await caller.events(run)] == [2]


async def test_a_result_that_is_followed_is_there_with_the_outputs_whatever_else_runs(
    caller: Any, double: Any, kit: Any
) -> None:
    value = kit.sse(1, "variable.committed", variable="out", value=7)
    endless = kit.followed(value, kit.finished(2), gate=lambda: False)
    double.on("POST", "/v1/programs", endless, kit.followed(value + kit.finished(2)))
    async with asyncio.timeout(5):
        run = await caller.submit(follow=True)
        assert await caller(run.result) == {"out": 7}
        while double.num_disconnects < 1:  # noqa: ASYNC110 - a double has no event for it
            await asyncio.sleep(0.001)
        run = await caller.submit(follow=True)
        assert await caller(run.result) == {"out": 7}
    assert [seen.method for seen in double.seen] == ["POST"] * 2


async def test_an_answer_of_events_that_names_no_program_is_an_error(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.Answer(202, chunks=[kit.finished(2)]))
    with pytest.raises(ConureError) as caught:
        await caller.submit(follow=True)
    assert caught.value.code == "client.answer"


def test_an_answer_has_to_begin_in_time_and_its_events_may_be_silent_for_longer() -> None:
    headers = {"content-type": "text/event-stream", "location": PROGRAM}
    transport = httpx.MockTransport(lambda _: httpx.Response(202, headers=headers))
    settings = Settings("http://there", app=None, timeout_s=2, retry=None, headers=None)
    request = Request("POST", "/v1/programs", is_followed=True)
    with httpx.Client(base_url=settings.base_url, transport=transport) as http:
        sent = http.build_request(**settings.arguments(request))
        assert sent.extensions["timeout"]["read"] == 2
        with contextlib.closing(http.send(sent, stream=True)) as response:
            assert is_stream(response)
            assert response.request.extensions["timeout"]["read"] == STREAM_SILENCE_S


async def test_a_refused_program_that_is_followed_is_the_same_error(
    caller: Any, double: Any, kit: Any
) -> None:
    problem = kit.problem(400, "program.cycle", "a -> b -> a", path="program.nodes[1]")
    double.on("POST", "/v1/programs", kit.Answer(400, problem))
    with pytest.raises(ProgramError, match="a -> b -> a"):
        await caller.submit(follow=True)


def test_a_stream_that_was_heard_since_has_its_whole_patience_again() -> None:
    now = [0.0]
    retry = Retry(patience_s=15, clock=lambda: now[0])
    settings = Settings(None, app=None, timeout_s=5, retry=retry, headers=None)
    settings.is_known = True
    follower = Follower(settings, "p", 0, None)
    follower.broken(httpx.ReadError("cut"))
    follower.arguments()
    follower.feed(b": ping\n\n")
    now[0] = 3600
    follower.broken(httpx.ReadError("cut again, after an hour"))
    assert follower.pause_s() > 0
    now[0] += 15
    with pytest.raises(ServerUnreachableError):
        follower.broken(httpx.ReadError("cut, and nothing was heard in between"))


def test_who_names_no_types_is_not_sent_all_of_them() -> None:
    settings = Settings(None, app=None, timeout_s=5, retry=None, headers=None)
    wanted: list[list[EventType] | None] = [None, [], ["node.delta"]]
    asked = [
        Follower(settings, "p", 0, types).arguments()["params"].get("types") for types in wanted
    ]
    assert asked == [None, ["program.finished"], ["node.delta", "program.finished"]]


async def test_events_of_a_program_that_has_ended_come_to_an_end(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    run = await caller.submit()
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[]))
    double.on("GET", PROGRAM, kit.status("running"), kit.status("done"))
    assert await caller.events(run, 9) == []
    assert len(double.of("GET", f"{PROGRAM}/events")) == 2


async def test_events_that_cannot_be_had_are_an_error(caller: Any, double: Any, kit: Any) -> None:
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


def asks(kit: Any, seq: int, request: str, name: str = "double", **args: Any) -> bytes:
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


async def test_client_steps_run_here_once_however_often_they_are_asked(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    ask = asks(kit, 2, "r1", n=21)
    double.on(
        "GET",
        f"{PROGRAM}/events",
        kit.Answer(chunks=[ask], is_cut=True),
        # A server that was restarted may number its events anew after what it lost.
        kit.Answer(
            chunks=[
                asks(kit, 3, "r1", n=21),
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


async def test_a_program_that_is_taken_up_again_repeats_no_step(
    caller: Any, double: Any, kit: Any
) -> None:
    variables = {"out": {"status": "done", "value": 4}}
    double.on("GET", PROGRAM, kit.status("done", variables=variables, receipt={"calls": 0}))
    committed = kit.sse(3, "variable.committed", variable="out", value=4)
    stream = kit.Answer(chunks=[asks(kit, 2, "r", n=2), committed, kit.finished(4)])
    double.on("GET", f"{PROGRAM}/events", stream)
    run = await caller(caller.client.attach, "p_1")
    result = await caller(run.serve_client_steps, {"double": lambda n: 1 / 0})
    assert result.outputs == {"out": 4}
    assert put_bodies(double) == []


async def test_a_coroutine_function_is_a_function_too(caller: Any, double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    stream = kit.Answer(chunks=[asks(kit, 2, "r", n=1), kit.finished(5)], gate=has_answer(double))
    double.on("GET", f"{PROGRAM}/events", stream)
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "done", "value": 7}))

    async def later(n: int) -> int:
        await asyncio.sleep(0)
        return n + 6

    result = await caller(caller.client.run, kit.program, functions={"double": later})
    assert put_bodies(double)[0]["value"] == 7
    assert result.outputs == {"out": 7}, "a value that no event told is asked for"


@pytest.mark.parametrize("make", [lambda n: 1 / 0, lambda n: object()])
async def test_what_a_function_raises_is_told_to_the_server_and_to_the_caller(
    caller: Any, double: Any, kit: Any, make: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    failed = kit.sse(3, "node.failed", node="s", code="client.failed", message="double: oh")
    chunks = [asks(kit, 2, "r", n=1), failed + kit.finished(4, "failed")]
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "failed"}))
    double.on("GET", f"{PROGRAM}/variables/out", kit.Answer(424, kit.problem(424, "c.f", "x")))
    with pytest.raises(RunError, match="double: oh") as caught:
        await caller(caller.client.run, kit.program, functions={"double": make})
    assert isinstance(caught.value.__cause__, ZeroDivisionError | TypeError)
    error = put_bodies(double)[0]["error"]
    assert error["code"] == "client.failed"
    assert error["message"].startswith(f"double: {type(caught.value.__cause__).__name__}")


async def test_a_value_that_the_server_refuses_is_its_steps_failure(
    caller: Any, double: Any, kit: Any
) -> None:
    failed = kit.sse(3, "node.failed", node="s", code="request.invalid", message="too deep")
    chunks = [asks(kit, 2, "r", n=1), failed + kit.finished(4, "failed")]
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


async def test_a_step_without_a_function_is_refused_before_anything_is_submitted(
    caller: Any, double: Any
) -> None:
    program = {"nodes": [{"id": "s", "op": "client", "name": "search", "output": "x"}]}
    with pytest.raises(ProgramError, match="'search'") as caught:
        await caller(caller.client.run, program, functions={"fetch": print})
    assert caught.value.code == "client.no_function"
    assert double.seen == []


async def test_a_step_that_appears_later_without_a_function_fails_at_once(
    caller: Any, double: Any, kit: Any
) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    chunks = [asks(kit, 2, "r", name="new"), kit.finished(4, "failed")]
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=chunks, gate=has_answer(double)))
    double.on("PUT", f"{PROGRAM}/variables/out", kit.Answer(200, {"status": "failed"}))
    with pytest.raises(RunError):
        await caller(caller.client.run, kit.program)
    assert put_bodies(double)[0]["error"]["code"] == "client.no_function"


def test_a_run_that_is_interrupted_cancels_its_program(
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


async def test_a_coroutine_that_is_cancelled_cancels_its_program(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    never = kit.Answer(chunks=[asks(kit, 2, "r", n=1), b""], gate=lambda: False)
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


def test_one_async_client_serves_one_loop_after_the_other(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())

    async def submit(client: AsyncClient) -> str:
        async with client:
            return (await client.submit(kit.program)).id

    with Client(app=double) as owner:
        client = owner.asynchronous()
        assert [asyncio.run(submit(client)) for _ in range(2)] == ["p_1", "p_1"]
    assert double.lifespan == ["startup", "shutdown"]


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONURE_URL", "http://127.0.0.1:9")
    with (
        Client(retry=Retry(first_patience_s=0.01)) as client,
        pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:9.*conure serve"),
    ):
        client.submit({"nodes": []})


def test_importing_the_client_loads_neither_langchain_nor_a_server() -> None:
    code = (
        "import sys, conure.adapters.client; "
        "heavy = {'langchain_core', 'torch', 'litestar', 'pydantic', 'numpy'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
