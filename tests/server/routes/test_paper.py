"""The paper's calls: what they become, and what they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from conure.server.program.ir import Generate, Objective
from conure.server.program.status import VariableStatus
from conure.server.routes.paper import text_of

from ..service_double import ScriptedService, app_of, in_process, over_socket, until
from ..test_app import check_problem


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


async def test_a_prompt_becomes_a_node_of_a_new_open_program() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        answer = await client.post("/v1/submit", json=WRITE)
        assert answer.status_code == 200, answer.text
        bound = answer.json()
    submission = service.programs["p_1"].submission
    assert submission.open
    assert bound["session_id"] == "p_1"
    assert [(p["name"], p["in_out"]) for p in bound["placeholders"]] == [
        ("task", False),
        ("code", True),
    ]
    task, code = (p["semantic_var_id"].removeprefix("p_1.") for p in bound["placeholders"])
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


async def test_a_later_request_reads_an_earlier_output_in_the_same_session() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        first = (await client.post("/v1/submit", json=WRITE)).json()
        code = first["placeholders"][1]["semantic_var_id"]
        second = request(
            "Test: {{code}}{{output:test}}",
            placeholder("code", False, semantic_var_id=code),
            placeholder("test", True),
            session="p_1",
        )
        answer = (await client.post("/v1/submit", json=second)).json()
    assert answer["session_id"] == "p_1"
    assert answer["request_id"] != first["request_id"]
    assert answer["placeholders"][0]["semantic_var_id"] == code
    [appended] = service.appended
    assert appended.variables == {}
    [node] = appended.nodes
    assert isinstance(node, Generate)
    assert node.prompt
    assert node.prompt[1].input == code.removeprefix("p_1.")


async def test_transforms_become_expressions_before_inputs_and_after_outputs() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        body = request(
            "{{a}}{{b}}",
            placeholder("a", False, transforms="strip"),
            placeholder("b", True, transforms="json:x.y"),
        )
        bound = (await client.post("/v1/submit", json=body)).json()["placeholders"]
    a, b = (p["semantic_var_id"].removeprefix("p_1.") for p in bound)
    generate, before, after = msgspec.to_builtins(service.programs["p_1"].submission.program.nodes)
    assert before["expr"] == {"strip": {"var": a}}
    assert generate["prompt"][0] == {"input": before["output"]}
    assert after["expr"] == {
        "get": [{"parse_json": {"var": generate["prompt"][1]["output"]}}, "x", "y"]
    }
    assert after["output"] == b


async def test_set_commits_and_get_waits_with_its_criterion() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        bound = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"]
        task, code = (p["semantic_var_id"] for p in bound)
        body = {"semantic_var_id": task, "content": "sort", "session_id": "p_1"}
        assert (await client.post("/v1/set", json=body)).json() == {"semantic_var_id": task}
        assert service.puts[0][1].value == "sort"
        body = {"semantic_var_id": code, "criteria": "LATENCY", "session_id": "p_1"}
        waiting = asyncio.ensure_future(client.post("/v1/get", json=body))
        program = service.programs["p_1"]
        await until(lambda: program.num_waiters == 1)
        program.commit(code.removeprefix("p_1."), "sorted()")
        assert (await waiting).json() == {"semantic_var_id": code, "content": "sorted()"}
        assert service.objectives == ["latency"]


async def test_a_get_ends_with_its_connection() -> None:
    service = ScriptedService()
    async with over_socket(app_of(service)) as url, httpx.AsyncClient(base_url=url) as client:
        code = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"][1]
        body = {"semantic_var_id": code["semantic_var_id"], "criteria": "ttft"}
        waiting = asyncio.ensure_future(client.post("/v1/get", json=body))
        program = service.programs["p_1"]
        await until(lambda: program.num_waiters == 1)
        waiting.cancel()
        await until(lambda: program.num_waiters == 0)


async def test_a_get_ends_when_the_service_sees_no_point_in_waiting() -> None:
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

    async with in_process(app_of(Impatient())) as client:
        code = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"][1]
        answer = await client.post("/v1/get", json={"semantic_var_id": code["semantic_var_id"]})
        check_problem(answer, 424, "variable.no_value")


async def test_a_get_of_a_failed_variable_gives_its_error() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        code = (await client.post("/v1/submit", json=WRITE)).json()["placeholders"][1]
        name = code["semantic_var_id"].removeprefix("p_1.")
        service.programs["p_1"].lose(name, "failed", "engine.failed", "it broke")
        answer = await client.post("/v1/get", json={"semantic_var_id": code["semantic_var_id"]})
        check_problem(answer, 424, "engine.failed")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (request("{{a}}", placeholder("a", False)), "submit.no_output"),
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
        (request("{{a}}", placeholder("a", True, semantic_var_id="p_2.x")), "submit.other_session"),
        (
            request("{{a}}{{b}}", placeholder("a", True), placeholder("b", False, max_tokens=3)),
            "submit.sampling_of_input",
        ),
    ],
)
async def test_requests_that_do_not_fit_are_refused(body: dict[str, Any], code: str) -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        problem = check_problem(await client.post("/v1/submit", json=body), 400, code)
        assert problem["path"].startswith(("placeholders", "prompt"))
    assert not service.programs


async def test_malformed_ids_and_criteria_are_refused() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.post("/v1/get", json={"semantic_var_id": "nodot"})
        check_problem(answer, 400, "variable.malformed_id")
        body = {"semantic_var_id": "p_1.x", "session_id": "p_2"}
        check_problem(await client.post("/v1/get", json=body), 400, "variable.other_session")
        body = {"semantic_var_id": "p_1.x", "criteria": "cheap"}
        check_problem(await client.post("/v1/get", json=body), 400, "get.unknown_criteria")
        body = {"semantic_var_id": "p_1.x", "content": "y"}
        check_problem(await client.post("/v1/set", json=body), 404, "program.unknown")


def test_content_is_text_as_it_stands_or_compact_json() -> None:
    assert text_of('"x"') == '"x"'
    assert text_of({"a": [1, None]}) == '{"a":[1,null]}'
