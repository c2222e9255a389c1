"""The routes of the dashboard: negotiation, security headers, caching, and what is not served."""

from __future__ import annotations

import pytest

from ..service_double import ScriptedService, app_of, in_process
from ..test_app import check_problem

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize("accept", [BROWSER, "text/html", "text/html, application/json;q=0.9"])
async def test_a_browser_gets_the_dashboard_at_the_root(accept: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/", headers={"Accept": accept})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["vary"] == "accept"
        assert answer.text.startswith("<!doctype html>")


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "application/*", "text/plain"])
async def test_every_other_client_gets_json_at_the_root(accept: str | None) -> None:
    headers = {} if accept is None else {"Accept": accept}
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["vary"] == "accept"
        assert answer.json()["name"] == "conure"


async def test_an_infinite_weight_is_refused() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/", headers={"Accept": "text/html;q=inf"})
        check_problem(answer, 400, "request.invalid")


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/docs", "text/html; charset=utf-8"),
        ("/dashboard/base.css", "text/css; charset=utf-8"),
        ("/dashboard/js/main.js", "text/javascript; charset=utf-8"),
        ("/dashboard/vendor/dagre.js", "text/javascript; charset=utf-8"),
        ("/dashboard/icon.svg", "image/svg+xml"),
    ],
)
async def test_files_have_their_type_and_the_security_headers(path: str, content_type: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == content_type
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(
            part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == "'self'"
        assert policy["style-src"] == "'self'"
        assert policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in str(policy)


async def test_an_unchanged_file_is_not_sent_again() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        first = await client.get("/dashboard/js/main.js")
        again = await client.get(
            "/dashboard/js/main.js", headers={"If-None-Match": first.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        other = await client.get("/dashboard/js/main.js", headers={"If-None-Match": '"x"'})
        assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "nothing.js",
        "js",
        "files.py",
        "%2e%2e/files.py",
        "..%2ffiles.py",
        "vendor/LICENSE-dagre.txt",
    ],
)
async def test_other_files_are_not_served(path: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        check_problem(await client.get(f"/dashboard/{path}"), 404, "route.not_found")


async def test_the_dashboard_is_for_this_machine_only() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/", headers={"Host": "example.com", "Accept": "text/html"})
        check_problem(answer, 403, "host.forbidden")


async def test_the_list_of_programs_is_searched() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        body = {"program": {"nodes": [{"id": "a", "op": "expr", "expr": 1, "output": "x"}]}}
        for _ in range(11):
            assert (await client.post("/v1/programs", json=body)).status_code == 202
        page = (await client.get("/v1/programs", params={"search": "p_1"})).json()
        assert [each["id"] for each in page["programs"]] == ["p_11", "p_10", "p_1"]
        check = await client.get("/v1/programs", params={"search": "x" * 257})
        check_problem(check, 400, "request.invalid")


async def test_activity_is_served() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/v1/activity")
        assert answer.json() == {
            "engines": [],
            "waiting": [],
            "num_waiting": 0,
            "num_programs": 0,
        }
