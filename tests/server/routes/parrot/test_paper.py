"""The paper's calls: what they become, and what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.ir import GenerateNode, Objective
from conure.server.program.status import VariableStatus

from ...inprocess import answer
from ...service_double import ScriptedService, app_of, client_at, in_process, over_socket, until
from ...test_app import check_problem

ID_FORM = "p_{:024x}"
"""The form of the server's ids distinguishes sessions from names of clients."""
FIRST, SECOND = ID_FORM.format(1), ID_FORM.format(2)


def sessions_service() -> ScriptedService:
    return ScriptedService(ID_FORM)


def placeholder(name: str, in_out: bool, **fields: Any) -> dict[str, Any]:
    return {"name": name, "in_out": in_out, "semantic_var_id": None, "transforms": "", **fields}


def request(
    prompt: str, *placeholders: dict[str, Any], session: str | None = None
) -> dict[str, Any]:
    return {"prompt": prompt, "placeholders": list(placeholders), "session_id": session}


WRITE = request(
    "Write Python for: {{task}}\nCode:{{code}}",
    placeholder("task", False),
    placeholder("code", True, max_tokens=64, stop=["\n\n"], temperature=0),
)


async def test_prompt_becomes_a_node_of_an_open_program() -> None:
    service = sessions_service()
    async with in_process(app_of(service)) as client:
        answer = await client.post("/v1/submit", json=WRITE)
        assert answer.status_code == 200, answer.text
        bound = answer.json()
    submission = service.programs[FIRST].submission
    assert submission.open
    assert bound["session_id"] == FIRST
    assert [(p["name"], p["in_out"]) for p in bound["placeholders"]] == [
        ("task", False),
        ("code", True),
    ]
    task, code = (p["semantic_var_id"].removeprefix(f"{FIRST}.") for p in bound["placeholders"])
    assert set(submission.program.variables) == {task}
    [node] = msgspec.to_builtins(submission.program.nodes)
    assert node == {
        "op": "generate",
        "id": bound["request_id"],
        "prompt": [
            {"text": "Write Python for: "},
            {"input": task},
            {"text": "\nCode:"},
            {"output": code, "max_tokens": 64, "stop": ["\n\n"], "temperature": 0},
        ],
    }


async def test_later_request_reads_earlier_output() -> None:
    service = sessions_service()
    async with in_process(app_of(service)) as client:
        first = (await client.post("/v1/submit", json=WRITE)).json()
        code = first["placeholders"][1]["semantic_var_id"]
        second = request(
            "Test: {{code}}{{output:test}}",
            placeholder("code", False, semantic_var_id=code),
            placeholder("test", True),
            session=FIRST,
        )
        answer = (await client.post("/v1/submit", json=second)).json()
    assert answer["session_id"] == FIRST
    assert answer["request_id"] != first["request_id"]
    assert answer["placeholders"][0]["semantic_var_id"] == code
    [appended] = service.appended
    assert appended.variables == {}
    [node] = appended.nodes
    assert isinstance(node, GenerateNode)
    assert node.prompt
    assert node.prompt[1].input == code.removeprefix(f"{FIRST}.")


async def test_transforms_become_expressions() -> None:
    service = sessions_service()
    async with in_process(app_of(service)) as client:
        body = request(
            "{{a}}{{b}}",
            placeholder("a", False, transforms="strip"),
            placeholder("b", True, transforms="json:x.y"),
        )
        bound = (await client.post("/v1/submit", json=body)).json()["placeholders"]
    a, b = (p["semantic_var_id"].removeprefix(f"{FIRST}.") for p in bound)
    generate, before, after = msgspec.to_builtins(service.programs[FIRST].submission.program.nodes)
    assert before["expr"] == {"strip": {"var": a}}
    assert generate["prompt"][0] == {"input": before["output"]}
    assert after["expr"] == {
        "get": [{"parse_json": {"var": generate["prompt"][1]["output"]}}, "x", "y"]
    }
    assert after["output"] == b


async def test_set_commits_and_get_waits_with_criteria() -> None:
    service = sessions_service()
    async with in_process(app_of(service)) as client:
        bound = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"]
        task, code = (p["semantic_var_id"] for p in bound)
        body = {"semantic_var_id": task, "content": "sort", "session_id": FIRST}
        assert (await client.post("/v1/set", json=body)).json() == {"semantic_var_id": task}
        assert service.puts[0][1].value == "sort"
        body = {"semantic_var_id": code, "criteria": "LATENCY", "session_id": FIRST}
        waiting = asyncio.ensure_future(client.post("/v1/get", json=body))
        program = service.programs[FIRST]
        await until(lambda: program.num_waiters == 1)
        program.commit(code.removeprefix(f"{FIRST}."), "sorted()")
        assert (await waiting).json() == {"semantic_var_id": code, "content": "sorted()"}
        assert service.objectives == ["latency"]


async def test_get_ends_with_its_connection() -> None:
    service = sessions_service()
    async with over_socket(app_of(service)) as url, client_at(url) as client:
        code = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"][1]
        body = {"semantic_var_id": code["semantic_var_id"], "criteria": "ttft"}
        waiting = asyncio.ensure_future(client.post("/v1/get", json=body))
        program = service.programs[FIRST]
        await until(lambda: program.num_waiters == 1)
        waiting.cancel()
        await until(lambda: program.num_waiters == 0)


async def test_get_ends_when_waiting_is_pointless() -> None:
    class Impatient(ScriptedService):
        async def get(
            self,
            program: str,
            variable: str,
            *,
            tenant: str,
            wait_s: float,
            objective: Objective | None = None,
        ) -> VariableStatus:
            return VariableStatus(name=variable, status="waiting")

    async with in_process(app_of(Impatient(ID_FORM))) as client:
        code = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"][1]
        answer = await client.post("/v1/get", json={"semantic_var_id": code["semantic_var_id"]})
        check_problem(answer, 424, "variable.no_value")


async def test_get_of_failed_variable_returns_its_error() -> None:
    service = sessions_service()
    async with in_process(app_of(service)) as client:
        code = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"][1]
        name = code["semantic_var_id"].removeprefix(f"{FIRST}.")
        service.programs[FIRST].fail(name, "failed", "engine.failed", "it broke")
        answer = await client.post("/v1/get", json={"semantic_var_id": code["semantic_var_id"]})
        check_problem(answer, 424, "engine.failed")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (request("{{a}}", placeholder("a", False)), "submit.no_output"),
        (request("{{a}}", placeholder("a", True)), "submit.starts_with_output"),
        (request("{{a}}{{b}}", placeholder("a", True)), "submit.unknown_placeholder"),
        (
            request("{{a}}", placeholder("a", True), placeholder("b", False)),
            "submit.unused_placeholder",
        ),
        (
            request("{{a}}", placeholder("a", True), placeholder("a", True)),
            "submit.duplicate_placeholder",
        ),
        (request("{{input:a}}", placeholder("a", True)), "submit.direction"),
        (request("{{a}}", placeholder("a", True, transforms="rot13")), "submit.unknown_transform"),
        (request("{{a}}", placeholder("a", True, transforms="json:")), "submit.unknown_transform"),
        (
            request("{{a}}", placeholder("a", True, transforms="strip:x")),
            "submit.unknown_transform",
        ),
        (
            request("{{a}}", placeholder("a", True, semantic_var_id=f"{SECOND}.x")),
            "submit.other_session",
        ),
        (
            request("{{a}}{{b}}", placeholder("a", True), placeholder("b", False, max_tokens=3)),
            "submit.sampling_of_input",
        ),
    ],
)
async def test_inconsistent_requests_are_rejected(body: dict[str, Any], code: str) -> None:
    service = sessions_service()
    async with in_process(app_of(service)) as client:
        problem = check_problem(await client.post("/v1/submit", json=body), 400, code)
        assert problem["path"].startswith(("placeholders", "prompt"))
    assert not service.programs


async def test_malformed_ids_and_criteria_are_rejected() -> None:
    async with in_process(app_of(sessions_service())) as client:
        answer = await client.post("/v1/get", json={"semantic_var_id": "nodot"})
        check_problem(answer, 400, "variable.malformed_id")
        body = {"semantic_var_id": f"{FIRST}.x", "session_id": SECOND}
        check_problem(await client.post("/v1/get", json=body), 400, "variable.other_session")
        body = {"semantic_var_id": f"{FIRST}.x", "criteria": "cheap"}
        check_problem(await client.post("/v1/get", json=body), 400, "get.unknown_criteria")
        body = {"semantic_var_id": f"{FIRST}.x", "content": "y"}
        check_problem(await client.post("/v1/set", json=body), 404, "program.unknown")


async def test_clients_choose_the_ids_of_sessions_and_variables(tmp_path: Path) -> None:
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with in_process(app) as client:

        async def send(path: str, **body: Any) -> Any:
            found = await client.post(f"/v1/{path}", json=body)
            assert found.status_code == 200, found.text
            return found.json()

        ids = {"session_id": "chat 7"}
        # The value may be sent before the prompt that reads it.
        await send("set", semantic_var_id="the task", content="tea", **ids)
        body = request(
            "Sell {{task}}: {{ad}}",
            placeholder("task", False, semantic_var_id="the task"),
            placeholder("ad", True, semantic_var_id="ad", max_tokens=20),
            session="chat 7",
        )
        bound = await send("submit", **body)
        assert bound["session_id"] == "chat 7"
        assert [p["semantic_var_id"] for p in bound["placeholders"]] == ["the task", "ad"]
        body = request(
            "Shorter: {{ad}}{{short}}",
            placeholder("ad", False, semantic_var_id="ad"),
            placeholder("short", True),
            session="chat 7",
        )
        [_, short] = (await send("submit", **body))["placeholders"]
        ad = (await send("get", semantic_var_id="ad", **ids))["content"]
        assert ad == answer("Sell tea: ")[:20]
        found = await send("get", semantic_var_id=short["semantic_var_id"])
        assert found["content"] == answer(f"Shorter: {ad}")


@pytest.mark.parametrize("session", ["s" * 256, "p_alice", "p_1", "p_0123456789abcdef"])
async def test_every_name_of_a_client_is_a_session(tmp_path: Path, session: str) -> None:
    async with in_process(create_app(Config(data=tmp_path, engine="fake"))) as client:
        for name, content in (("tea", "green"), ("p_bob.tea", "black")):
            body = {"session_id": session, "semantic_var_id": name, "content": content}
            stored = await client.post("/v1/set", json=body)
            assert stored.status_code == 200, stored.text
            body = {"session_id": session, "semantic_var_id": name}
            assert (await client.post("/v1/get", json=body)).json()["content"] == content


async def test_unknown_names_of_clients_are_errors() -> None:
    async with in_process(app_of(sessions_service())) as client:
        body = {"semantic_var_id": "ad", "session_id": "chat"}
        check_problem(await client.post("/v1/get", json=body), 404, "session.not_found")
        await client.post("/v1/submit", json=WRITE | {"session_id": "chat"})
        check_problem(await client.post("/v1/get", json=body), 404, "variable.unknown")


async def test_oversized_prompt_is_rejected_before_acceptance() -> None:
    service = sessions_service()
    too_long = request("{{a}}" * 10_500 + "{{o}}", placeholder("a", False), placeholder("o", True))
    async with in_process(app_of(service)) as client:
        check_problem(await client.post("/v1/submit", json=too_long), 400, "program.invalid")
        assert service.programs == {}
        opened = (await client.post("/v1/submit", json=WRITE)).json()
        again = too_long | {"session_id": opened["session_id"]}
        check_problem(await client.post("/v1/submit", json=again), 400, "program.invalid")
        assert service.appended == []
