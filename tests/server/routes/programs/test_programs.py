"""Programs and variables over HTTP: status codes, headers, waiting and leaving."""

from __future__ import annotations

import asyncio
import re

import pytest

from conure.server.app import drain

from ...service_double import ScriptedService, app_of, client_at, in_process, over_socket, until
from ...test_app import PROGRAM, check_problem

VARIABLE = "/v1/programs/p_1/variables/greeting"


async def test_submission_is_202_and_replay_is_marked() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        headers = {"Idempotency-Key": "k1"}
        first = await client.post("/v1/programs", json=PROGRAM, headers=headers)
        assert first.status_code == 202
        assert first.headers["location"] == "/v1/programs/p_1"
        assert "idempotent-replay" not in first.headers
        assert first.json() == {
            "id": "p_1",
            "status": "accepted",
            "outputs": ["greeting"],
            "url": "/v1/programs/p_1",
        }
        again = await client.post("/v1/programs", json=PROGRAM, headers=headers)
        assert again.headers["idempotent-replay"] == "true"
        assert again.json() == first.json()


async def test_submission_can_return_the_event_stream() -> None:
    service = ScriptedService()
    service.on_submit = lambda program: program.finish()
    headers = {"Accept": "text/event-stream", "Idempotency-Key": "k1"}
    async with in_process(app_of(service)) as client:
        first = await client.post("/v1/programs", json=PROGRAM, headers=headers)
        assert (first.status_code, first.headers["location"]) == (202, "/v1/programs/p_1")
        assert first.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert re.findall("event: (.*)", first.text) == ["program.accepted", "program.finished"]
        query = {"types": "variable.committed"}
        again = await client.post("/v1/programs", json=PROGRAM, headers=headers, params=query)
        assert again.headers["idempotent-replay"] == "true"
        assert re.findall("event: (.*)", again.text) == ["program.finished"]
        for accept in ("*/*", "text/html", "application/json, text/event-stream"):
            answer = await client.post("/v1/programs", json=PROGRAM, headers={"Accept": accept})
            assert answer.headers["content-type"] == "application/json", accept
        wrong = await client.post("/v1/programs", json={}, headers=headers)
        check_problem(wrong, 400, "program.invalid")


async def test_programs_are_listed_in_pages() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        for _ in range(3):
            await client.post("/v1/programs", json=PROGRAM)
        await client.delete("/v1/programs/p_2")
        first = (await client.get("/v1/programs", params={"limit": 2})).json()
        assert [each["id"] for each in first["programs"]] == ["p_3", "p_2"]
        rest = {"limit": 2, "cursor": first["next"]}
        last = (await client.get("/v1/programs", params=rest)).json()
        assert ([each["id"] for each in last["programs"]], last["next"]) == (["p_1"], None)
        ended = (await client.get("/v1/programs", params={"status": "cancelled"})).json()
        assert [each["id"] for each in ended["programs"]] == ["p_2"]
        for wrong in ({"status": "asleep"}, {"limit": 0}, {"limit": 201}, {"cursor": "x"}):
            check_problem(await client.get("/v1/programs", params=wrong), 400, "request.invalid")


async def test_invalid_accept_header_is_rejected_first() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        headers = {"Accept": "text/event-stream;q=1e400"}
        answer = await client.post("/v1/programs", json=PROGRAM, headers=headers)
        check_problem(answer, 400, "request.invalid")
        assert service.programs == {}


async def test_idempotency_key_is_bounded() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        for key in ("", "k" * 256):
            headers = {"Idempotency-Key": key}
            answer = await client.post("/v1/programs", json=PROGRAM, headers=headers)
            problem = check_problem(answer, 400, "request.invalid")
            assert problem["path"].startswith("header.")


async def test_status_cancel_and_append_return_the_program() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json={**PROGRAM, "open": True})
        status = await client.get("/v1/programs/p_1")
        assert (status.status_code, status.json()["name"]) == (200, "greet")
        node = {"id": "x", "op": "expr", "expr": 1, "output": "one"}
        appended = await client.post("/v1/programs/p_1/nodes", json={"nodes": [node]})
        assert appended.status_code == 202
        assert "one" in appended.json()["variables"]
        await client.post("/v1/programs/p_1/nodes", json={"close": True})
        late = await client.post("/v1/programs/p_1/nodes", json={"nodes": [node]})
        check_problem(late, 409, "program.closed")
        cancelled = await client.delete("/v1/programs/p_1")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/programs/p_9"),
        ("DELETE", "/v1/programs/p_9"),
        ("GET", "/v1/programs/p_9/events"),
        ("GET", "/v1/programs/p_9/variables/x"),
    ],
)
async def test_unknown_programs_are_404(method: str, path: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        check_problem(await client.request(method, path), 404, "program.unknown")


async def test_variable_is_202_then_200_even_for_null() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        waiting = await client.get(VARIABLE)
        assert waiting.status_code == 202
        assert waiting.json() == {"name": "greeting", "status": "waiting"}
        service.programs["p_1"].commit("greeting", None)
        done = await client.get(VARIABLE)
        assert done.status_code == 200
        assert done.json() == {"name": "greeting", "status": "done", "value": None}


async def test_dotted_instance_name_is_valid() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        service.programs["p_1"].commit("part.3.0", "x")
        answer = await client.get("/v1/programs/p_1/variables/part.3.0")
        assert answer.json()["value"] == "x"


@pytest.mark.parametrize(
    ("phase", "code", "status"),
    [
        ("failed", "prompt.too_long", 400),
        ("failed", "expr.json", 422),
        ("failed", "engine.lost", 424),
        ("killed", "run.killed", 424),
        ("skipped", "run.skipped", 424),
        ("cancelled", "program.cancelled", 424),
        ("failed", "program.deadline_exceeded", 424),
    ],
)
async def test_valueless_variable_returns_its_own_code(phase: str, code: str, status: int) -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        service.programs["p_1"].fail("greeting", phase, code, "because")
        problem = check_problem(await client.get(VARIABLE), status, code)
        assert problem["detail"] == "because"
        assert (problem["variable"], problem["variable_status"]) == ("greeting", phase)


@pytest.mark.parametrize("wait", ["-1", "600.5", "nan", "x"])
async def test_wait_time_is_bounded(wait: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        await client.post("/v1/programs", json=PROGRAM)
        problem = check_problem(
            await client.get(VARIABLE, params={"wait_s": wait}), 400, "request.invalid"
        )
        assert problem["path"] == "query.wait_s"


async def test_long_poll_returns_value_or_202() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        short = await client.get(VARIABLE, params={"wait_s": 0.01})
        assert short.status_code == 202
        program = service.programs["p_1"]
        waiting = asyncio.ensure_future(client.get(VARIABLE, params={"wait_s": 30}))
        await until(lambda: program.num_waiters == 1)
        program.commit("greeting", "hi")
        assert (await waiting).json()["value"] == "hi"


async def test_long_poll_ends_with_its_connection() -> None:
    service = ScriptedService()
    async with over_socket(app_of(service)) as url, client_at(url) as client:
        await client.post("/v1/programs", json=PROGRAM)
        program = service.programs["p_1"]
        waiting = asyncio.ensure_future(client.get(VARIABLE, params={"wait_s": 600}))
        await until(lambda: program.num_waiters == 1)
        waiting.cancel()
        await until(lambda: program.num_waiters == 0)
        assert (await client.get("/healthz")).status_code == 200


async def test_long_poll_ends_with_a_drain() -> None:
    service = ScriptedService()
    app = app_of(service)
    async with in_process(app) as client:
        await client.post("/v1/programs", json=PROGRAM)
        program = service.programs["p_1"]
        waiting = asyncio.ensure_future(client.get(VARIABLE, params={"wait_s": 600}))
        await until(lambda: program.num_waiters == 1)
        await drain(app, timeout_s=1)
        answer = await waiting
        check_problem(answer, 503, "server.draining")
        assert int(answer.headers["retry-after"]) > 0
        assert program.num_waiters == 0


async def test_put_commits_once() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        path = "/v1/programs/p_1/variables/who"
        first = await client.put(path, json={"value": {"a": [1]}, "request_id": "r"})
        assert first.status_code == 200
        assert first.json()["value"] == {"a": [1]}
        assert service.puts[0][1].request_id == "r"
        check_problem(await client.put(path, json={"value": 2}), 409, "variable.committed")
