"""A run sends what is known at one moment in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conure.adapters.client import NotReadyError, Retry
from conure.adapters.speculation import request_tasks
from conure.adapters.speculation.registry import CallRecord, PlanFailedError
from conure.adapters.speculation.run import SpeculativeRun, TimeLimit
from conure.server.program.errors import NotFoundError, RunError
from conure.server.program.status import ProgramStatus

from .calls import call, committed, event, node


class ClientDouble:
    """A client whose I/O thread runs its tasks when the test says so."""

    identity = "server"
    first_contact_timeout_s = 0.01

    def __init__(self) -> None:
        self.is_closed = False
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.bodies: list[dict[str, Any]] = []
        self.io_thread = self.twin = self
        self.may_wait = True

    def start_task(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        if self.is_closed:
            raise RuntimeError("the client is closed")
        self.tasks.append(lambda: function(*args))

    def wake(self, function: Callable[[], object]) -> None:
        function()

    async def submit(self, body: dict[str, Any], **_: Any) -> Any:
        self.bodies.append(body)
        return SimpleNamespace(id=body["id"], events=_no_events)

    async def append(self, _: str, body: dict[str, Any], **__: Any) -> None:
        self.bodies.append(body)

    async def run_tasks(self) -> None:
        while self.tasks:
            await self.tasks.pop(0)()


async def _no_events(**_: Any) -> Any:
    return
    yield


async def test_values_of_parallel_parts_travel_in_one_request() -> None:
    client: Any = ClientDouble()
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True)
    run.plan([call("a", {"x"}, {"input": "x"}), call("b", {"y"}, {"input": "y"})], {"x": 1})
    run.set_values({"y": 2})
    await client.tasks.pop(0)()
    (body,) = client.bodies
    assert body["inputs"] == {"x": 1, "y": 2}


async def test_calls_of_a_closed_client_fail() -> None:
    client: Any = ClientDouble()
    client.is_closed = True
    run = SpeculativeRun(client, "run", is_streamed=False)
    record = run.add_unplanned(call("a", set(), {"text": "tea"}))
    with pytest.raises(Exception, match="the client is closed"):
        list(run.follow(record, lambda record, _: record, TimeLimit(None, run.clock)))
    run.wait_until_sent()
    assert not record.is_open


async def test_a_run_is_idle_after_its_last_request() -> None:
    client: Any = ClientDouble()
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True)
    run.add_unplanned(call("a", set(), {"text": "tea"}))
    run.end(is_cancelled=False)
    await client.run_tasks()
    await run.await_until_sent()
    assert client.bodies[-1] == {"close": True}


class SlowDouble(ClientDouble):
    """A client whose server answers a submission when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted, self.may_answer = asyncio.Event(), asyncio.Event()
        self.requests: list[str] = []
        self.running: set[asyncio.Task[None]] = set()
        self._retry = Retry()

    def start_task(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        self.running.add(asyncio.create_task(function(*args)))

    async def submit(self, body: dict[str, Any], **_: Any) -> Any:
        self.requests.append("submit")
        self.submitted.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.requests.append("given up")
            raise
        return SimpleNamespace(id=body["id"], events=_no_events, cancel=self._cancel)

    async def _cancel(self) -> ProgramStatus:
        self.requests.append("cancel")
        return ProgramStatus(id="p", status="cancelled", created_at="now")

    async def _shield(self, operation: Coroutine[Any, Any, Any]) -> Any:
        return await operation

    async def _do(self, flow: Any) -> Any:
        request = next(flow)
        self.requests.append(request.method)
        raise NotFoundError("program.not_found", "no such program")


async def test_the_end_of_a_run_waits_for_a_prompt_answer_to_a_submission() -> None:
    client: Any = SlowDouble()
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True)
    run.add_unplanned(call("a", set(), "tea"))
    await client.submitted.wait()
    run.end(is_cancelled=True)
    await asyncio.sleep(0.01)
    assert client.requests == ["submit"]
    client.may_answer.set()
    await run.await_until_sent()
    await asyncio.gather(*client.running)
    assert client.requests == ["submit", "cancel"]


async def test_a_submission_without_an_answer_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_tasks, "SUBMISSION_TIMEOUT_S", 0.01)
    client: Any = SlowDouble()
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True)
    run.plan([call("a", set(), "tea")])
    record = run.add_unplanned(call("b", set(), "rum"))
    await client.submitted.wait()
    run.end(is_cancelled=True)
    await run.await_until_sent()
    assert isinstance(record.failure, RunError)
    assert run.calls.rejections == []
    await asyncio.gather(*client.running, return_exceptions=True)
    assert client.requests == ["submit", "given up", "DELETE"]


async def test_an_answer_that_arrived_is_read_after_the_time_limit() -> None:
    client, clock = cast(Any, ClientDouble()), iter((0.0, 100.0))
    run = SpeculativeRun(client, "run", is_streamed=True, may_grow=True, clock=lambda: next(clock))
    record = run.add_unplanned(call("a", set(), "tea"))
    await client.tasks.pop(0)()  # the events stay unread
    run.calls.on_event(event("node.delta", variable="a", node="a_call", offset=0, text="Te"))
    found = []
    async for stream, each in run.afollow(
        record, lambda record, _: record, TimeLimit(10, run.clock)
    ):
        stream.feed(each)
        found.append(each.type)
        run.calls.on_event(committed("a", "Tea"))
        await asyncio.sleep(0)  # the event reaches this loop
    assert found == ["node.delta", "variable.committed"]


@pytest.mark.parametrize("is_sync", [False, True])
async def test_the_time_limit_includes_the_wait_for_the_first_request(is_sync: bool) -> None:
    run = SpeculativeRun(cast(Any, ClientDouble()), "run", is_streamed=False)
    record = run.add_unplanned(call("a", set(), "tea"))  # the request stays without an answer
    with pytest.raises(NotReadyError, match="no answer after"):
        if is_sync:
            list(run.follow(record, lambda record, _: record, TimeLimit(0.01, run.clock)))
        else:
            [
                each
                async for each in run.afollow(
                    record, lambda record, _: record, TimeLimit(0.01, run.clock)
                )
            ]


@pytest.mark.parametrize("is_sync", [False, True])
async def test_the_time_limit_includes_the_call_that_is_sent_again(is_sync: bool) -> None:
    client, clock = cast(Any, ClientDouble()), iter((0.0, 100.0))
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True, clock=lambda: next(clock))
    run.plan([call("a", set(), "tea")])
    await client.tasks.pop(0)()  # the events stay unread
    record = run.calls.claim(node("a", "tea"))
    assert record is not None
    failed = event("node.failed", node="a_call", code="expr.type", message="no")
    run.calls.on_event(failed)

    def resend(record: CallRecord, failure: PlanFailedError) -> CallRecord:
        return run.add_unplanned(call("again", set(), "tea"))

    with pytest.raises(NotReadyError, match="no answer after 10 s"):
        if is_sync:
            list(run.follow(record, resend, TimeLimit(10, run.clock)))
        else:
            [each async for each in run.afollow(record, resend, TimeLimit(10, run.clock))]


async def test_planned_calls_that_are_not_sent_yet_are_dropped_at_the_end() -> None:
    client: Any = ClientDouble()
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True)
    run.plan([call("a", set(), "tea"), call("b", set(), "rum")])
    run.end(is_cancelled=False, keeps_awaited=True)
    await client.run_tasks()
    assert client.bodies == []
