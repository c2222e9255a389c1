"""Mutated requests to all routes: no internal error, and every accepted program ends.

`CONURE_FUZZ_BODIES` sets the number of bodies; `make fuzz` runs many.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import httpx

from conure.server.app import create_app
from conure.server.config import Config

from ..service_double import in_process
from .mutations import mutated, seeds

NUM_BODIES = int(os.environ.get("CONURE_FUZZ_BODIES", "400"))
ENDS_S = 120.0

TEXT: Any = {"type": "text", "text": "u"}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: Any = {
    "model": "default",
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [TEXT]}],
    "max_tokens": 4,
    "temperature": 0.5,
    "stop": ["a"],
    "logit_bias": {"1": 2},
    "n": 1,
    "response_format": {"type": "json_object"},
    "tools": [TOOL],
}
COMPLETION: Any = {"model": "default", "prompt": "p", "max_tokens": 4, "stop": "x", "logprobs": 1}
JOINED: Any = {"concat": [{"var": "o"}, "x"]}
APPEND: Any = {
    "variables": {"q": {"type": "string"}},
    "nodes": [
        {"id": "n", "op": "generate", "prompt": [{"text": "t"}, {"output": "o", "max_tokens": 2}]},
        {"id": "e", "op": "expr", "expr": JOINED, "output": "p", "after": ["n"]},
    ],
    "inputs": {"q": "v"},
    "outputs": ["p"],
    "objectives": {"p": "latency"},
}
VALUE: Any = {"value": {"a": [1]}}
GRAMMAR: Any = {"constraint": {"json_schema": {"type": "array"}}, "text": "[]"}


def body(kind: Any, rng: random.Random) -> Any:
    return mutated(kind, rng, others=[CHAT, APPEND, VALUE, *seeds()])


async def send(client: httpx.AsyncClient, rng: random.Random, documents: list[Any]) -> str | None:
    """Send one request; return the URL of the program that it made."""
    route = rng.random()
    if route < 0.5:
        document = mutated(rng.choice(documents), rng, others=documents)
        answer = await client.post("/v1/programs", json=document)
    elif route < 0.65:
        opened = await client.post("/v1/programs", json={"program": {}, "open": True})
        url = opened.json()["url"]
        answer = await client.post(f"{url}/nodes", json=body(APPEND, rng))
        check(answer)
        check(await client.put(f"{url}/variables/q", json=body(VALUE, rng)))
        return str(url)
    elif route < 0.8:
        answer = await client.post("/v1/chat/completions", json=body(CHAT, rng))
    elif route < 0.9:
        answer = await client.post("/v1/completions", json=body(COMPLETION, rng))
    else:
        answer = await client.post("/v1/grammar/check", json=body(GRAMMAR, rng))
    check(answer)
    return answer.json()["url"] if answer.status_code == 202 else None


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500 or answer.status_code == 503, (
        answer.text,
        answer.request.content,
    )


async def end(client: httpx.AsyncClient, url: str) -> None:
    """Cancel a program if it still runs, and check that it ends without an internal error."""
    check(await client.delete(url))
    events = await client.get(f"{url}/events")
    assert "program.finished" in events.text, events.text
    assert "server.internal" not in events.text, events.text


async def test_no_body_causes_an_internal_error(tmp_path: Path) -> None:
    rng = random.Random(NUM_BODIES)
    documents = seeds()
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with in_process(app) as client:
        client.timeout = httpx.Timeout(ENDS_S)
        urls: list[str] = []
        for _ in range(NUM_BODIES):
            url = await send(client, rng, documents)
            if url is not None:
                urls.append(url)
            if len(urls) > 50:
                await end(client, urls.pop(0))
        for url in urls:
            await end(client, url)
        check(await client.get("/readyz"))
