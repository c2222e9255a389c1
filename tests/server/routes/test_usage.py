"""Usage and metrics over HTTP. Ids in paths create no metric series."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ..service_double import ScriptedService, app_of, in_process
from ..test_app import PROGRAM, check_problem


async def series(client: httpx.AsyncClient) -> dict[tuple[str, tuple[str, ...]], float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    media_type, version, charset = answer.headers["content-type"].split("; ")
    assert (media_type, charset) == ("text/plain", "charset=utf-8")
    assert version.startswith("version=")
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_unrouted_methods_create_no_series() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        await series(client)
        before = await series(client)
        for number in range(9):
            await client.request(f"MADEUP{number}", "/v1/programs")
        assert (await series(client)).keys() == before.keys()


async def test_requests_are_counted_by_route_template() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        await series(client)
        await client.get("/v1/programs/p_0")
        before = await series(client)
        for number in range(20):
            await client.get(f"/v1/programs/p_{number}")
            await client.get(f"/nowhere/{number}")
        after = await series(client)
        assert after.keys() == before.keys()
        name = "conure_http_request_seconds_count"
        [count] = [
            (before[key], after[key])
            for key in after
            if key[0] == name and "/v1/programs" in key[1][1]
        ]
        assert count == (1, 21)
        assert ("conure_double", ()) in after, "the service's own metrics are included"


async def test_requests_are_counted_by_outcome() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        await client.post("/v1/programs", json={})
        await client.get("/healthz", headers={"Host": "example.com"})
        service.refusal = RuntimeError("a bug")
        await client.post("/v1/programs", json=PROGRAM)
        counts = {
            labels: value
            for (name, labels), value in (await series(client)).items()
            if name == "conure_http_request_seconds_count"
        }
    assert counts == {
        ("POST", "/v1/programs", "2xx"): 1,
        ("POST", "/v1/programs", "4xx"): 1,
        ("POST", "/v1/programs", "5xx"): 1,
        ("GET", "/healthz", "4xx"): 1,
    }


async def test_usage_is_returned_by_day() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/programs", json=PROGRAM)
        service.programs["p_1"].finish()
        answer = await client.get("/v1/usage", params={"since": "2026-01-31"})
        usage = answer.json()
        assert (usage["since"], usage["until"], usage["programs"]) == (
            "2026-01-31",
            None,
            {"done": 1},
        )
        assert usage["receipts"]["prompt_tokens"]["logical"] == 0


@pytest.mark.parametrize("day", ["yesterday", "2026-02-30", "20260131", "2026-1-31", ""])
async def test_invalid_day_is_rejected(day: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        for name in ("since", "until"):
            problem = check_problem(
                await client.get("/v1/usage", params={name: day}), 400, "request.invalid"
            )
            assert name in problem["detail"]
