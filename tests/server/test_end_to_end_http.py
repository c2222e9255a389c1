"""Routes, executor, journal and the fake engine together, from a client's point of view."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from conure.adapters.client import AsyncClient
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ProgramError

from .routes.programs.test_events import parse
from .service_double import in_process, over_socket
from .test_app import check_problem

ROOT = Path(__file__).parents[2]


def generate(node: str, reads: str, writes: str, **sampling: Any) -> dict[str, Any]:
    output = {"output": writes, "max_tokens": 16, "temperature": 0, **sampling}
    prompt = [{"text": f"{node}: "}, {"input": reads}, {"text": "\n"}, output]
    return {"id": node, "op": "generate", "prompt": prompt}


CHAIN: dict[str, Any] = {
    "program": {
        "name": "chain",
        "variables": {"start": {}},
        "nodes": [generate("one", "start", "first"), generate("two", "first", "second")],
        "outputs": ["second"],
    },
    "inputs": {"start": "go"},
}


@contextlib.asynccontextmanager
async def client_of(data: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Config(data=data, engine="fake", **settings))
    async with over_socket(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


async def finish(client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
    """Return all events of a program. The stream ends when the program ends."""
    events = parse((await client.get(f"{path}/events")).text)
    assert events[-1]["event"] == "program.finished"
    return events


async def test_client_runs_steps_in_every_instance(tmp_path: Path) -> None:
    program = {
        "nodes": [
            {
                "id": "rounds",
                "op": "loop",
                "index": "round",
                "carry": {"found": [[1, 2], {"var": "more"}]},
                "count": 2,
                "body": [
                    {
                        "id": "each",
                        "op": "map",
                        "items": "found",
                        "as": "x",
                        "body": [
                            {
                                "id": "ask",
                                "op": "client",
                                "name": "double",
                                "args": {"n": {"var": "x"}},
                                "output": "twice",
                            }
                        ],
                        "collect": {"more": "twice"},
                    }
                ],
            }
        ],
        "outputs": ["found"],
    }
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with over_socket(app) as url, AsyncClient(url) as client:
        result = await client.run(program, functions={"double": lambda n: 2 * n})
        with pytest.raises(ProgramError, match="'double'"):
            await client.run(program, functions={"triple": lambda n: 3 * n})
    assert result.outputs == {"found": [4, 8]}
    assert result.receipt.blocks_held == 0


async def test_chain_is_submitted_and_awaited(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        answer = await client.post("/v1/programs", json=CHAIN)
        assert answer.status_code == 202, answer.text
        path = answer.headers["location"]
        second = await client.get(f"{path}/variables/second", params={"wait_s": 30})
        assert second.status_code == 200
        assert isinstance(second.json()["value"], str)
        events = await finish(client, path)
        status = (await client.get(path)).json()
    assert status["status"] == "done"
    assert status["variables"]["second"]["value"] == second.json()["value"]
    assert set(status["nodes"]) == {"one", "two"}
    assert status["receipt"]["calls"] == 2
    assert status["receipt"]["blocks_held"] == 0
    assert status["receipt"]["critical_path"] == ["one", "two"]
    committed = [e["data"]["variable"] for e in events if e["event"] == "variable.committed"]
    assert committed[-2:] == ["first", "second"]
    ids = [int(event["id"]) for event in events if "id" in event]
    assert ids == sorted(set(ids))


async def test_events_resume_after_reconnect(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        path = (await client.post("/v1/programs", json=CHAIN)).headers["location"]
        whole = [event for event in await finish(client, path) if "id" in event]
        for i in (0, len(whole) // 2, len(whole) - 2):
            headers = {"Last-Event-ID": whole[i]["id"]}
            rest = parse((await client.get(f"{path}/events", headers=headers)).text)
            assert [event for event in rest if "id" in event] == whole[i + 1 :]


async def test_events_of_a_running_program_resume_after_reconnect(tmp_path: Path) -> None:
    nodes = [
        generate("one", "start", "first"),
        {"id": "ask", "op": "client", "name": "f", "args": {}, "output": "x", "after": ["one"]},
    ]
    program = {"variables": {"start": {}}, "nodes": nodes, "outputs": ["x"]}
    async with client_of(tmp_path) as client:
        body = {"program": program, "inputs": {"start": "go"}}
        path = (await client.post("/v1/programs", json=body)).headers["location"]
        seen: list[str] = []
        async with client.stream("GET", f"{path}/events") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("id: "):
                    seen.append(line.removeprefix("id: "))
                if '"request_id"' in line:
                    break  # the program waits for its client
        asked = await client.put(f"{path}/variables/x", json={"value": 1})
        assert asked.status_code == 200
        headers = {"Last-Event-ID": seen[-1]}
        rest = parse((await client.get(f"{path}/events", headers=headers)).text)
        resumed = [event["id"] for event in rest if "id" in event]
        whole = [event["id"] for event in await finish(client, path) if "id" in event]
        assert seen + resumed == whole


async def test_idempotent_submission_runs_once(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        headers = {"Idempotency-Key": "key"}
        first = await client.post("/v1/programs", json=CHAIN, headers=headers)
        again = await client.post("/v1/programs", json=CHAIN, headers=headers)
        assert again.headers["idempotent-replay"] == "true"
        assert again.json()["id"] == first.json()["id"]
        other = {**CHAIN, "inputs": {"start": "else"}}
        answer = await client.post("/v1/programs", json=other, headers=headers)
        check_problem(answer, 409, "idempotency.conflict")


async def test_client_step_is_requested_and_answered(tmp_path: Path) -> None:
    step = {"id": "ask", "op": "client", "name": "search", "args": {"q": {"var": "first"}}}
    program = {
        "variables": {"start": {}},
        "nodes": [
            generate("one", "start", "first"),
            {**step, "output": "found"},
            generate("two", "found", "second"),
        ],
        "outputs": ["second"],
    }
    async with client_of(tmp_path) as client:
        body = {"program": program, "inputs": {"start": "go"}}
        path = (await client.post("/v1/programs", json=body)).headers["location"]
        requested: dict[str, Any] = {}
        async with client.stream("GET", f"{path}/events") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: ") and '"request_id"' in line:
                    requested = json.loads(line[6:])
                    break
        assert requested["name"] == "search"
        put = f"{path}/variables/found"
        value = {"value": "a result", "request_id": requested["request_id"]}
        assert (await client.put(put, json=value)).status_code == 200
        assert (await client.put(put, json=value)).status_code == 200
        # The program may have ended by now, so two codes are possible.
        assert (await client.put(put, json={"value": "b"})).status_code == 409
        await finish(client, path)
        assert (await client.get(path)).json()["status"] == "done"


async def test_parrot_calls_form_a_session(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        write = {
            "prompt": "Write for {{task}}: {{code}}",
            "placeholders": [
                {"name": "task", "in_out": False, "semantic_var_id": None, "transforms": None},
                {"name": "code", "in_out": True, "transforms": "strip", "max_tokens": 8},
            ],
            "session_id": None,
        }
        answer = await client.post("/v1/submit", json=write)
        assert answer.status_code == 200, answer.text
        session = answer.json()["session_id"]
        task, code = (p["semantic_var_id"] for p in answer.json()["placeholders"])
        test = {
            "prompt": "Test {{code}}: {{test}}",
            "placeholders": [
                {"name": "code", "in_out": False, "semantic_var_id": code, "transforms": ""},
                {"name": "test", "in_out": True, "max_tokens": 8},
            ],
            "session_id": session,
        }
        answer = await client.post("/v1/submit", json=test)
        assert answer.status_code == 200, answer.text
        last = answer.json()["placeholders"][1]["semantic_var_id"]
        get = {"semantic_var_id": last, "criteria": "latency", "session_id": session}
        waiting = asyncio.ensure_future(client.post("/v1/get", json=get))
        body = {"semantic_var_id": task, "content": "sorting", "session_id": session}
        assert (await client.post("/v1/set", json=body)).status_code == 200
        got = await waiting
        assert got.status_code == 200, got.text
        assert isinstance(got.json()["content"], str)
        closed = await client.post(f"/v1/programs/{session}/nodes", json={"close": True})
        assert closed.status_code == 202
        await finish(client, f"/v1/programs/{session}")
        assert (await client.get(f"/v1/programs/{session}")).json()["receipt"]["calls"] == 2


async def test_openai_client_gets_same_answer_streamed(tmp_path: Path) -> None:
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with (
        over_socket(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        [model] = [model.id async for model in client.models.list()]
        whole = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            max_tokens=20,
        )
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert whole.usage is not None
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens > 0
        text = await client.completions.create(model=model, prompt="One, two,", temperature=0)
        assert text.usage is not None
        assert 0 < text.usage.completion_tokens <= 16
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "x " * 200_000}]
            )
        assert caught.value.code == "context_length_exceeded"


async def test_disconnect_cancels_the_program(tmp_path: Path) -> None:
    async with client_of(tmp_path, time_per_output_token=0.01) as client:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        }
        program = ""
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            assert stream.status_code == 200, await stream.aread()
            async for line in stream.aiter_lines():
                program = json.loads(line.removeprefix("data: "))["id"].removeprefix("chatcmpl-")
                break
        events = await finish(client, f"/v1/programs/{program}")
        assert events[-1]["data"]["status"] == "cancelled"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (
            {"program": {"nodes": [generate("a", "x", "y"), generate("b", "y", "x")]}},
            "program.cycle",
        ),
        ({"program": {"nodes": [generate("a", "nowhere", "y")]}}, "program.unknown_variable"),
        ({**CHAIN, "inputs": {"start": "long " * 200_000}}, "prompt.too_long"),
    ],
)
async def test_invalid_program_is_rejected_and_server_continues(
    body: dict[str, Any], code: str, tmp_path: Path
) -> None:
    async with client_of(tmp_path) as client:
        check_problem(await client.post("/v1/programs", json=body), 400, code)
        assert (await client.post("/v1/programs", json=CHAIN)).status_code == 202


async def test_ended_program_is_read_from_journal(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        path = (await client.post("/v1/programs", json=CHAIN)).headers["location"]
        before = [event for event in await finish(client, path) if "id" in event]
        status = (await client.get(path)).json()
    async with client_of(tmp_path) as client:
        after = [event for event in await finish(client, path) if "id" in event]
        assert after == before
        again = (await client.get(path)).json()
        assert again["status"] == "done"
        assert again["variables"] == status["variables"]
        assert again["receipt"] == status["receipt"]
        value = await client.get(f"{path}/variables/second", params={"wait_s": 5})
        assert value.json()["value"] == status["variables"]["second"]["value"]


async def test_engine_is_ready_and_reports_counters(tmp_path: Path) -> None:
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with in_process(app) as client:
        assert (await client.get("/readyz")).status_code == 200
        path = (await client.post("/v1/programs", json=CHAIN)).headers["location"]
        await finish(client, path)
        [engine] = (await client.get("/v1/engines")).json()["engines"]
        counters = engine["counters"]
        assert counters["num_held"] == 0
        assert counters["num_computed_tokens"] > 0


def start(data: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "conure", "serve", "--engine", "fake"),
            *("--port", "0", "--data", str(data), *argv),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `conure serve`; yield its process and its address."""
    process = start(folder)
    try:
        assert process.stdout is not None
        url = re.search(r"http://[^\s,;]+", process.stdout.readline())
        assert url
        yield process, url[0]
    finally:
        process.kill()
        process.communicate()


def test_served_program_runs_by_command_and_sigterm_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, url):
        program = tmp_path / "chain.json"
        program.write_text(json.dumps(CHAIN))
        run = subprocess.run(
            [sys.executable, "-m", "conure", "run", str(program), "--receipt", "--url", url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip()
        assert '"calls": 2' in run.stderr
        server.send_signal(signal.SIGTERM)
        _, error = server.communicate(timeout=60)
        assert (server.returncode, error) == (0, "")


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with serving(tmp_path):
        second = start(tmp_path)
        try:
            out, error = second.communicate(timeout=60)
        finally:
            second.kill()
        assert (second.returncode, out) == (1, "")
        assert error.startswith("conure: ")
        assert error.count("\n") == 1
