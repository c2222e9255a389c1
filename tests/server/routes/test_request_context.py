"""Bodies of requests are decoded beside the event loop if they are large."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from conure.server.program.decoding.bodies import decode_json
from conure.server.routes import request_context
from conure.server.routes.request_context import MAX_INLINE_BYTES

from ..service_double import ScriptedService, app_of, in_process

ROUTES = (
    "POST /v1/tokenize",
    "POST /v1/grammar/check",
    "PUT /v1/programs/p_1/variables/x",
    "PUT /v1/procedures/p",
    "PUT /v1/procedures/p/aliases/a",
    "PUT /v1/procedures/p/pin",
    "POST /v1/procedures/p/run",
    "POST /v1/session",
    "POST /v1/semantic_call",
    "POST /v1/py_native_call",
    "POST /v1/semantic_var",
    "GET /v1/semantic_var",
    "POST /v1/semantic_var/x",
    "GET /v1/semantic_var/x",
)


async def test_large_bodies_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def record(body: bytes, record_type: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode_json(body, record_type)

    monkeypatch.setattr(request_context, "decode_json", record)
    async with in_process(app_of(ScriptedService())) as client:
        for route in ROUTES:
            method, path = route.split()
            await client.request(method, path, json={"model": "x" * MAX_INLINE_BYTES})
    assert len(threads) == len(ROUTES)
    assert all(name.startswith("decode") for name in threads), threads
