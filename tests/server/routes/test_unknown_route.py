"""Every wrong base URL gets one sentence that says how to fix it."""

from __future__ import annotations

import openai
import pytest

from conure.server.routes.unknown_route import explain_unknown_route

from ...cpu_time import least_cpu_s
from ..service_double import ScriptedService, app_of, in_process, over_socket
from ..test_app import check_problem

WRONG = [
    ("POST", "/v1/v1/chat/completions", "has /v1, and the client adds it again"),
    ("GET", "/v1/v1/programs/p_1", "end the base URL with the port for Conure's"),
    ("POST", "/chat/completions", "add /v1 to the base URL, as in http://HOST:PORT/v1"),
    ("GET", "/models", "add /v1 to the base URL"),
    ("GET", "/models/acme/tiny", "add /v1 to the base URL"),
    ("POST", "/openai/v1/chat/completions", "the base URL has the path /openai; remove it"),
    ("POST", "/v1/chat/completions/v1/programs", "the base URL has the path /v1/chat/completions;"),
    ("POST", "/v1/chat/completions/v1/submit", "the base URL has the path /v1/chat/completions;"),
    ("GET", "/v1/completions/v1/models", "the base URL has the path /v1/completions; remove it"),
    ("POST", "/v1/programs/v1/programs", "the base URL has the path /v1/programs; remove it"),
    ("POST", "/api/chat/completions", "the base URL ends with /api; end it with /v1 instead"),
    ("GET", "/llm/api/models", "the base URL ends with /llm/api; end it with /v1 instead"),
    ("GET", "/llm/api/models/tiny", "the base URL ends with /llm/api; end it with /v1 instead"),
    ("POST", "/v1/chat/completions/chat/completions", "without /chat/completions"),
    ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
    ("POST", "/v1/images/generations", "generates text only"),
    ("POST", "/v1/moderations", "generates text only"),
    ("GET", "/v1/programs/p_1/event", "/schema lists the routes"),
    ("POST", "/v1/surprise", "/schema lists the routes"),
]


def test_a_long_path_is_explained_quickly() -> None:
    routes = [f"/v1/route_{i}" for i in range(60)]
    path = "/" * 60_000
    assert least_cpu_s(lambda: explain_unknown_route(path, routes)) < 0.5


@pytest.mark.parametrize("path", ["/llm/surprise", "/assets/models/a/b.js"])
async def test_a_path_that_is_like_no_route_gets_no_advice(path: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get(f"http://localhost{path}")
    problem = check_problem(answer, 404, "route.not_found")
    assert problem["detail"] == f"route {path} does not exist"


@pytest.mark.parametrize(("method", "path", "cure"), WRONG)
async def test_a_wrong_base_url_is_explained(method: str, path: str, cure: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.request(method, f"http://localhost{path}", json={})
    problem = check_problem(answer, 404, "route.not_found")
    assert cure in problem["detail"]
    assert problem["error"] == {
        "message": problem["detail"],
        "type": "invalid_request_error",
        "param": None,
        "code": "route.not_found",
    }


async def test_a_wrong_method_names_the_right_one() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/v1/chat/completions")
    problem = check_problem(answer, 405, "route.method_not_allowed")
    assert "use" in problem["detail"]
    assert "POST" in problem["detail"]
    assert problem["error"]["message"] == problem["detail"]


async def test_openai_client_shows_the_cure() -> None:
    async with over_socket(app_of(ScriptedService())) as url:
        for base, cure in (
            (url, "add /v1 to the base URL"),
            (f"{url}/v1/v1", "one /v1 for OpenAI's"),
            (f"{url}/v1/chat/completions", "without /chat/completions"),
        ):
            async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
                with pytest.raises(openai.NotFoundError, match=cure):
                    await client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": "Hi"}]
                    )
