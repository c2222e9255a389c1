"""Server-sent events: encoding, resuming, pings, draining, and disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Collection
from typing import Any

import pytest

from conure.server.app import drain
from conure.server.program.status import Event
from conure.server.routes.programs.events import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    batch_events,
    encode_event,
)

from ...service_double import (
    ScriptedProgram,
    ScriptedService,
    app_of,
    client_at,
    in_process,
    over_socket,
    until,
)
from ...test_app import PROGRAM, check_problem

EVENTS = "/v1/programs/p_1/events"


def parse(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.split("\n") if line[:1] not in ("", ":")
        )
        if fields:
            events.append({**fields, "data": json.loads(fields["data"])})
    return events


def tell_a_story(program: ScriptedProgram) -> None:
    program.emit("node.started", node="say")
    program.delta("greeting", "h\ni", offset=0)
    program.commit("greeting", "h\ni")
    program.finish()


async def test_only_journaled_events_have_ids() -> None:
    service = ScriptedService()
    service.on_submit = tell_a_story
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.get(EVENTS)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        events = parse(answer.text)
    assert [event["event"] for event in events] == [
        "program.accepted",
        "node.started",
        "node.delta",
        "variable.committed",
        "program.finished",
    ]
    assert [event.get("id") for event in events] == ["1", "2", None, "3", "4"]
    assert events[2]["data"]["text"] == "h\ni"
    assert service.programs["p_1"].num_readers == 0


async def test_readers_resume_and_header_takes_precedence() -> None:
    service = ScriptedService()
    service.on_submit = tell_a_story
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        by_query = parse((await client.get(EVENTS, params={"after": 3})).text)
        assert [event.get("id") for event in by_query] == [None, "4"]
        headers = {"Last-Event-ID": "3"}
        by_header = parse((await client.get(EVENTS, params={"after": 1}, headers=headers)).text)
        assert by_header == by_query


@pytest.mark.parametrize("after", ["-1", "x", str(2**63)])
async def test_sequence_numbers_are_bounded(after: str) -> None:
    service = ScriptedService()
    service.on_submit = tell_a_story
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.get(EVENTS, params={"after": after})
        check_problem(answer, 400, "request.invalid")
        answer = await client.get(EVENTS, headers={"Last-Event-ID": after})
        check_problem(answer, 400, "request.invalid")


async def test_disconnect_closes_the_service_generator() -> None:
    service = ScriptedService()
    async with over_socket(app_of(service)) as url, client_at(url) as client:
        await client.post("/v1/programs", json=PROGRAM)
        program = service.programs["p_1"]
        async with client.stream("GET", EVENTS) as answer:
            async for line in answer.aiter_lines():
                if line == "event: program.accepted":
                    break
            assert program.num_readers == 1
        await until(lambda: program.num_readers == 0)


async def test_drain_ends_streams_with_its_event() -> None:
    service = ScriptedService()
    app = app_of(service)
    async with in_process(app) as client:
        await client.post("/v1/programs", json=PROGRAM)
        program = service.programs["p_1"]
        reading = asyncio.ensure_future(client.get(EVENTS))
        await until(lambda: program.num_readers == 1)
        await drain(app, timeout_s=1)
        events = parse((await reading).text)
        assert events[-1]["event"] == "server.draining"
        assert "id" not in events[-1]
        assert program.num_readers == 0


async def test_failing_stream_ends_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ScriptedService):
        async def events(
            self,
            program: str,
            *,
            tenant: str,
            after: int,
            is_durable: bool = False,
            texts: Collection[str] | None = None,
            follow: bool = True,
        ) -> AsyncGenerator[Event, None]:
            yield Event(1, "program.accepted", {})
            raise RuntimeError("canary")

    async with in_process(app_of(Failing())) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.get(EVENTS)
        assert len(parse(answer.text)) == 1
        assert "canary" not in answer.text
    assert "canary" in caplog.text


async def test_recorded_events_can_be_read_without_waiting() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.get(EVENTS, params={"follow": "false"})
        assert [event["event"] for event in parse(answer.text)] == ["program.accepted"]


async def test_reader_gets_selected_types_and_the_end() -> None:
    service = ScriptedService()
    service.on_submit = tell_a_story
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.get(EVENTS, params={"types": ["node.started", "node.delta"]})
        assert [event["event"] for event in parse(answer.text)] == [
            "node.started",
            "node.delta",
            "program.finished",
        ]
        refused = await client.get(EVENTS, params={"types": "node.unheard_of"})
        check_problem(refused, 400, "request.invalid")


async def test_filtered_reader_still_gets_pings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conure.server.routes.programs.events.PING_S", 0.001)

    class Talking(ScriptedService):
        async def events(
            self,
            program: str,
            *,
            tenant: str,
            after: int,
            is_durable: bool = False,
            texts: Collection[str] | None = None,
            follow: bool = True,
        ) -> AsyncGenerator[Event, None]:
            for _ in range(100):
                yield Event(None, "node.delta", {})
                await asyncio.sleep(0.0002)
            yield Event(1, "program.finished", {})

    async with in_process(app_of(Talking())) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.get(EVENTS, params={"types": "program.finished"})
        assert answer.text.count(": ping") >= 3
        assert answer.text.count("event:") == 1


async def test_filtered_events_let_other_tasks_run() -> None:
    class Loud(ScriptedService):
        num_ticks = 0

        async def events(
            self,
            program: str,
            *,
            tenant: str,
            after: int,
            is_durable: bool = False,
            texts: Collection[str] | None = None,
            follow: bool = True,
        ) -> AsyncGenerator[Event, None]:
            async def tick() -> None:
                while True:
                    self.num_ticks += 1
                    await asyncio.sleep(0)

            ticking = asyncio.ensure_future(tick())
            for seq in range(1000):
                yield Event(seq, "node.queued", {})
            ticking.cancel()
            yield Event(1000, "program.finished", {})

    service = Loud()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.get(EVENTS, params={"types": "program.finished"})
        assert answer.text.count("event:") == 1
    assert service.num_ticks >= 10


async def test_pings_lose_no_event() -> None:
    release = asyncio.Event()

    async def source() -> AsyncGenerator[Event, None]:
        yield Event(1, "node.queued", {})
        await release.wait()
        yield Event(2, "node.started", {})

    seen: list[int | None] = []
    async for events in batch_events(source(), asyncio.Event(), ping_s=0.001):
        seen += [None] if events is None else [event.seq for event in events]
        if seen.count(None) == 3:
            release.set()
    assert [seq for seq in seen if seq is not None] == [1, 2]
    assert seen.count(None) >= 3


async def test_busy_source_lets_other_tasks_run() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def source() -> AsyncGenerator[Event, None]:
        for seq in range(1000):
            yield Event(seq, "node.queued", {})

    ticking = asyncio.ensure_future(tick())
    lengths = [len(some or []) async for some in batch_events(source(), asyncio.Event(), ping_s=15)]
    ticking.cancel()
    assert sum(lengths) == 1000
    assert max(lengths) == MAX_BATCH
    assert ticks >= 10


async def test_buffer_holds_the_encoding_of_few_large_events() -> None:
    read = 0

    async def source() -> AsyncGenerator[Event, None]:
        nonlocal read
        for seq in range(10):
            read += 1
            yield Event(seq, "yield", {"value": "a" * MAX_BATCH_BYTES}, b"a" * MAX_BATCH_BYTES)

    reading = batch_events(source(), asyncio.Event(), ping_s=15, is_encoded=True)
    [first] = await anext(reading) or []
    assert (first.data, len(first.encoded)) == ({}, MAX_BATCH_BYTES)
    for _ in range(10):  # the buffer is filled while the first one is written
        await asyncio.sleep(0)
    assert read <= 2
    await reading.aclose()


async def test_simultaneous_events_are_sent_together() -> None:
    release = asyncio.Event()

    async def source() -> AsyncGenerator[Event, None]:
        for seq in range(3):
            yield Event(seq, "node.queued", {})
        await release.wait()
        yield Event(3, "node.started", {})

    reading = batch_events(source(), asyncio.Event(), ping_s=15)
    assert [event.seq for event in await anext(reading) or []] == [0, 1, 2]
    release.set()
    assert [event.seq for event in await anext(reading) or []] == [3]
    assert await anext(reading, "over") == "over"


def test_event_is_encoded_as_one_block() -> None:
    block = encode_event(Event(7, "yield", {"value": "a\n\nb\r\nid: 9"}))
    assert block.startswith(b"id: 7\nevent: yield\ndata: {")
    assert block.count(b"\n") == 4
    assert block.endswith(b"}\n\n")
    assert b"\r" not in block
