"""Behaviour of all routes: ids, errors, middleware, bodies, the OpenAPI document, health."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]  # it has none

from conure.server.app import drain
from conure.server.program.errors import ProgramError, UnavailableError
from conure.server.routes import openai, parrot
from conure.server.routes.programs import programs
from conure.server.service import Readiness

from .service_double import (
    ScriptedService,
    app_of,
    client_at,
    in_process,
    over_socket,
    service_error,
    until,
)

PROGRAM: dict[str, Any] = {
    "program": {
        "name": "greet",
        "variables": {"who": {}},
        "nodes": [
            {
                "id": "say",
                "op": "generate",
                "prompt": [{"text": "Hello "}, {"input": "who"}, {"output": "greeting"}],
            }
        ],
        "outputs": ["greeting"],
    },
    "inputs": {"who": "you"},
}


def check_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    assert problem["code"] == code
    assert problem["title"]
    assert problem["detail"]
    assert problem["type"] == f"urn:conure:problem:{code}"
    assert problem["request_id"] == answer.headers["x-request-id"]
    return problem


async def test_every_response_has_a_request_id() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        for path in ("/healthz", "/nowhere", "/schema/openapi.json", "/v1/models"):
            assert (await client.get(path)).headers["x-request-id"].startswith("req_")
        tame = await client.get("/healthz", headers={"X-Request-ID": "abc-1"})
        assert tame.headers["x-request-id"] == "abc-1"
        wild = await client.get("/healthz", headers={"X-Request-ID": "a b\tc"})
        assert wild.headers["x-request-id"].startswith("req_")


async def test_router_errors_are_problems() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        check_problem(await client.get("/nowhere"), 404, "route.not_found")
        check_problem(await client.get("/schema/nowhere.json"), 404, "route.not_found")
        wrong = await client.patch("/v1/programs")
        check_problem(wrong, 405, "route.method_not_allowed")
        assert "POST" in wrong.headers["allow"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8400", "127.0.0.1:1", "[::1]", "[::1]:9", "127.0.0.2:1"]
)
async def test_local_hosts_are_allowed(host: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        assert (await client.get("/healthz", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "localhost.example.com",
        "127.0.0.1.nip.io",
        "localhost:8400@x",
        "10.0.0.1",
        "::1",
        "[127.0.0.1]",
        "",
    ],
)
async def test_other_hosts_are_forbidden(host: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/v1/programs/p_1", headers={"Host": host})
        check_problem(answer, 403, "host.forbidden")


async def test_other_origins_are_forbidden() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        for origin in ("https://example.com", "null", "http://localhost.example.com"):
            answer = await client.get("/healthz", headers={"Origin": origin})
            check_problem(answer, 403, "origin.forbidden")
        for origin in ("http://localhost:3000", "http://127.0.0.1", "http://[::1]:8400"):
            answer = await client.get("/healthz", headers={"Origin": origin})
            assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/v1/programs", "/v1/programs/p_1/nodes", "/v1/submit"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_bodies_must_be_declared_json(path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.post(path, content=b"{}", headers=headers)
        check_problem(answer, 415, "request.media_type")


async def test_compressed_bodies_are_refused() -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.post("/v1/programs", content=gzip.compress(b"{}"), headers=headers)
        check_problem(answer, 415, "request.media_type")
        assert "'gzip'; send it uncompressed" in answer.json()["detail"]


async def test_charset_is_part_of_the_same_media_type() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.post(
            "/v1/programs",
            content=json.dumps(PROGRAM),
            headers={"Content-Type": "application/json; charset=utf-8"},
        )
        assert answer.status_code == 202, answer.text


async def test_oversized_body_is_413() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 1000

    async with in_process(app_of(ScriptedService(), max_body=2000)) as client:
        headers = {"Content-Type": "application/json"}
        contents: tuple[bytes | AsyncIterator[bytes], ...] = (b" " * 2001, pieces())
        for content in contents:
            answer = await client.post("/v1/programs", content=content, headers=headers)
            problem = check_problem(answer, 413, "request.too_large")
            assert "2,000 bytes" in problem["detail"]


@pytest.mark.parametrize("depth", [65, 5_000, 1_000_000])
async def test_deeply_nested_json_is_a_client_error(depth: int) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        for path in ("/v1/programs", "/v1/chat/completions"):
            answer = await client.post(
                path,
                content=b'{"program": ' + b"[" * depth + b"]" * depth + b"}",
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code == 400


async def test_malformed_json_is_400_with_code_and_path() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/v1/programs", content=b'{"program": ', headers=headers)
        check_problem(answer, 400, "json.malformed")
        body = {"program": {"nodes": [{"id": "a", "op": "generate", "promt": []}]}}
        problem = check_problem(
            await client.post("/v1/programs", json=body), 400, "program.invalid"
        )
        assert "promt" in problem["detail"]


async def test_errors_keep_code_path_and_retry_after() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        service.refusal = service_error(ProgramError, "program.cycle", path="program.nodes[1]")
        problem = check_problem(
            await client.post("/v1/programs", json=PROGRAM), 400, "program.cycle"
        )
        assert problem["path"] == "program.nodes[1]"
        service.refusal = service_error(
            UnavailableError, "queue.full", status=429, retry_after_s=1.2
        )
        answer = await client.post("/v1/programs", json=PROGRAM)
        check_problem(answer, 429, "queue.full")
        assert answer.headers["retry-after"] == "2"


async def test_internal_error_is_a_logged_500_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        service.refusal = RuntimeError("canary-secret")
        with caplog.at_level(logging.ERROR):
            answer = await client.post("/v1/programs", json=PROGRAM)
        problem = check_problem(answer, 500, "server.internal")
        assert "canary" not in answer.text
        assert "canary-secret" in caplog.text
        assert problem["request_id"] in caplog.text


async def test_health_and_readiness_report_state() -> None:
    service = ScriptedService()
    app = app_of(service)
    async with in_process(app) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        service.readiness = Readiness(is_ready=False, reasons=["engine-0 is silent"])
        problem = check_problem(await client.get("/readyz"), 503, "server.not_ready")
        assert "engine-0 is silent" in problem["detail"]
        service.readiness = Readiness(is_ready=True)
        await drain(app, timeout_s=1)
        check_problem(await client.get("/readyz"), 503, "server.draining")
        assert (await client.get("/healthz")).status_code == 200


async def test_engines_report_their_counters() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        [engine] = (await client.get("/v1/engines")).json()["engines"]
        assert (engine["id"], engine["epoch"]) == ("engine-0", 7)
        counters = engine["counters"]
        assert counters["num_blocks"] == 10
        assert counters["num_free"] + counters["num_held"] + counters["num_cached"] == 10


async def test_root_links_the_openapi_document() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        root = (await client.get("/")).json()
        assert root["name"] == "conure"
        assert (await client.get(root["documentation"])).status_code == 200


async def test_service_starts_and_stops_with_application() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)):
        assert service.life == ["start"]
    assert service.life == ["start", "stop"]


async def test_hanging_drain_times_out_and_ends_waits() -> None:
    class Hanging(ScriptedService):
        async def drain(self) -> None:
            await asyncio.Event().wait()

    app = app_of(Hanging())
    await drain(app, timeout_s=0.01)
    assert app.state.draining.is_set()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The OpenAPI document, which takes a second to make."""

    async def read() -> dict[str, Any]:
        async with in_process(app_of(ScriptedService())) as client:
            answer = await client.get("/schema/openapi.json")
            parsed: dict[str, Any] = answer.json()
            return parsed

    return asyncio.run(read())


async def test_openapi_is_one_document_in_all_formats(document: dict[str, Any]) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.get("/schema/openapi.json")
        assert answer.headers["content-type"].startswith("application/vnd.oai.openapi+json")
        assert answer.json() == document
        assert "cdn" not in answer.text
        as_yaml = await client.get("/schema/openapi.yaml")
        assert yaml.safe_load(as_yaml.text) == document
        assert (await client.get("/schema")).json() == document


async def test_other_requests_are_served_while_openapi_is_made() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        document = asyncio.create_task(client.get("/schema/openapi.json"))
        health = asyncio.create_task(client.get("/healthz"))
        await asyncio.wait({document, health}, return_when=asyncio.FIRST_COMPLETED)
        assert health.done()
        assert not document.done()
        assert (await document).status_code == 200


@pytest.mark.parametrize("path", ["/v1/programs", "/v1/programs/explain"])
def test_an_unknown_procedure_is_a_documented_error(path: str, document: dict[str, Any]) -> None:
    operation = document["paths"][path]["post"]
    assert "404" in operation["responses"]


LOWER, UPPER = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}


def unbounded(schema: Any, path: str = "", ends: frozenset[str] = frozenset()) -> list[str]:
    """Return where a schema permits any integer. Bounds next to a `oneOf` apply to all
    alternatives.
    """
    if isinstance(schema, list):
        return [p for i, part in enumerate(schema) for p in unbounded(part, f"{path}[{i}]", ends)]
    if not isinstance(schema, dict):
        return []
    ends = ends | (schema.keys() & (LOWER | UPPER))
    found = []
    for key, part in schema.items():
        inherited = ends if key in ("oneOf", "anyOf") else frozenset()
        found += unbounded(part, f"{path}.{key}", inherited)
    is_open = schema.get("type") == "integer" and not (ends & LOWER and ends & UPPER)
    return [*found, path] if is_open else found


def test_openapi_lists_event_response_of_submission(document: dict[str, Any]) -> None:
    answers = document["paths"]["/v1/programs"]["post"]["responses"]
    assert set(answers["202"]["content"]) == {"application/json", "text/event-stream"}


def test_openapi_lists_text_response_of_explanations(document: dict[str, Any]) -> None:
    paths = document["paths"]
    for path, method in (
        ("/v1/programs/explain", "post"),
        ("/v1/programs/{program}/explain", "get"),
    ):
        operation = paths[path][method]
        assert {"application/json", "text/plain"} == operation["responses"]["200"]["content"].keys()
    assert "requestBody" not in operation


def test_integers_are_bounded_in_openapi(document: dict[str, Any]) -> None:
    bodies = {body.__name__ for body in (*programs.BODIES, *parrot.BODIES, *openai.BODIES)}
    schemas = document["components"]["schemas"]
    assert bodies <= schemas.keys()
    reached, todo = set(), list(bodies)
    while todo:
        name = todo.pop()
        reached.add(name)
        refs = re.findall(r"#/components/schemas/(\w+)", json.dumps(schemas[name]))
        todo += set(refs) - reached
    assert {"Generate", "Limits"} <= reached
    assert unbounded({name: schemas[name] for name in reached}) == []
    parameters = [
        way.get("parameters", []) for at in document["paths"].values() for way in at.values()
    ]
    assert unbounded(parameters) == []


def test_openapi_has_every_route_with_schemas(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert set(paths) == {
        "/",
        "/v1/tokenize",
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/activity",
        "/v1/engines",
        "/v1/usage",
        "/v1/programs",
        "/v1/programs/{program}",
        "/v1/programs/{program}/trace",
        "/v1/programs/{program}/content",
        "/v1/programs/{program}/nodes",
        "/v1/programs/{program}/events",
        "/v1/programs/{program}/variables/{name}",
        "/v1/programs/explain",
        "/v1/programs/{program}/explain",
        "/v1/functions",
        "/v1/procedures",
        "/v1/procedures/{name}",
        "/v1/procedures/{name}/aliases/{alias}",
        "/v1/procedures/{reference}",
        "/v1/procedures/{reference}/pin",
        "/v1/procedures/{reference}/run",
        "/v1/submit",
        "/v1/set",
        "/v1/get",
        "/v1/grammar/check",
        "/v1/session",
        "/v1/session/{session_id}",
        "/v1/semantic_call",
        "/v1/py_native_call",
        "/v1/semantic_var",
        "/v1/semantic_var/{var_id}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/{response}",
        "/v1/responses/{response}/cancel",
        "/v1/responses/{response}/input_items",
        "/v1/models",
        "/v1/models/{model}",
    }
    submit = paths["/v1/programs"]["post"]
    body = submit["requestBody"]["content"]["application/json"]["schema"]
    names = ("Submission", "SourceSubmission")
    assert body == {"oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}
    assert "202" in submit["responses"]
    for path, item in paths.items():
        for operation in item.values():
            assert "429" in operation["responses"] or not path.startswith("/v1/"), path
            for status, answer in operation["responses"].items():
                if int(status) >= 400 and not path.startswith(_OTHER_ERRORS):
                    assert list(answer["content"]) == ["application/problem+json"], (path, status)


_OTHER_ERRORS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/responses",
    "/v1/session",
    "/v1/semantic_",
    "/v1/py_native_call",
)
"""Paths whose errors have the shape of OpenAI's or Parrot's client."""


def test_openapi_references_resolve(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def references(value: Any) -> Any:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    found = set(references(document))
    assert "#/components/schemas/Generate" in found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in schemas, reference


def test_openapi_has_wait_bounds(document: dict[str, Any]) -> None:
    get = document["paths"]["/v1/programs/{program}/variables/{name}"]["get"]
    wait = next(p for p in get["parameters"] if p["name"] == "wait_s")["schema"]
    assert (wait["minimum"], wait["maximum"]) == (0, 600)


async def test_disconnect_inside_body_is_harmless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with over_socket(app_of(ScriptedService())) as url:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/programs HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""
        async with client_at(url) as client:
            assert (await client.get("/healthz")).status_code == 200
    assert "Traceback" not in caplog.text


async def test_head_of_a_wait_ends_with_its_client() -> None:
    service = ScriptedService()
    async with over_socket(app_of(service)) as url, client_at(url) as client:
        await client.post("/v1/programs", json=PROGRAM)
        program = service.programs["p_1"]
        wait = client.head("/v1/programs/p_1/variables/greeting", params={"wait_s": 600})
        waiting = asyncio.ensure_future(wait)
        await until(lambda: program.num_waiters == 1)
        waiting.cancel()
        await until(lambda: program.num_waiters == 0)


async def test_head_of_a_stream_ends_after_its_headers() -> None:
    service = ScriptedService()
    async with over_socket(app_of(service)) as url, client_at(url) as client:
        await client.post("/v1/programs", json=PROGRAM)
        answer = await client.head("/v1/programs/p_1/events")
        assert answer.headers["content-type"].startswith("text/event-stream")
        await until(lambda: service.programs["p_1"].num_readers == 0)
