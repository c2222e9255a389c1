"""The comparison of a receipt's estimate with requests that share nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.scaled_workloads import SCALED
from robustness.counterfactual import SALT_CHARS, STAGES, run_program, salt_of


def test_workloads_and_rounds_have_different_salts() -> None:
    names = (*SCALED, *STAGES)
    salts = {f"{salt_of(name, seed)}." for name in names for seed in range(20)}
    assert len(salts) == 20 * len(names)
    assert max(map(len, salts)) + len("1000.") <= SALT_CHARS


async def test_cancelled_program_ends_the_benchmark() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"url": "/v1/programs/p", "status": "cancelled"})

    transport = httpx.MockTransport(reply)
    async with httpx.AsyncClient(base_url="http://double", transport=transport) as http:
        with pytest.raises(AssertionError, match="cancelled"):
            await run_program(http, {})


async def test_benchmark_reads_the_status_once_at_the_end() -> None:
    requests: list[tuple[str, str]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        requests.append((request.method, request.url.path))
        assert len(requests) <= 3, "the benchmark slows the server down"
        has_ended = ("GET", "/v1/programs/p/events") in requests
        status = "done" if has_ended else "running"
        return httpx.Response(200, json={"url": "/v1/programs/p", "status": status})

    transport = httpx.MockTransport(reply)
    async with httpx.AsyncClient(base_url="http://double", transport=transport) as http:
        assert (await run_program(http, {}))["status"] == "done"
    assert requests[-1] == ("GET", "/v1/programs/p")
